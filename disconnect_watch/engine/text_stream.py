"""The text of one request as it becomes certain, up to a string at which it is to stop."""

from collections.abc import Sequence

from disconnect_watch.engine.tokenizer import Detokenizer, Tokenizer

__all__ = ["TextStream"]


class TextStream:
    """Detokenizes, and holds back what may turn out to be the beginning of a stop string.

    A stop string may begin in one token and end in a later one, so text that has been told could
    not be taken back. What is held back is always shorter than the longest stop string.

    Attributes:
        stopped_by: the stop string that was found; nothing from it on is ever told.
    """

    def __init__(self, tokenizer: Tokenizer, *, stop: Sequence[str] = ()) -> None:
        self.stopped_by: str | None = None
        self._detokenizer = Detokenizer(tokenizer)
        self._stop = stop
        self._held = ""

    def feed(self, token_id: int) -> str:
        """Take the next token; return the text that is certain now."""
        return self._take(self._detokenizer.feed(token_id))

    def flush(self) -> str:
        """Return what was held back, when no more tokens come."""
        text = self._take(self._detokenizer.flush()) + self._held
        self._held = ""
        return text

    def _take(self, text: str) -> str:
        if self.stopped_by is not None:
            return ""
        if not self._stop:
            return text
        text = self._held + text
        found = [(at, stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            # The one that begins first; where two begin alike, the longer is what was meant.
            at, self.stopped_by = min(found, key=lambda hit: (hit[0], -len(hit[1])))
            self._held = ""
            return text[:at]
        num_held = max(_num_begun(text, stop) for stop in self._stop)
        certain = len(text) - num_held
        self._held = text[certain:]
        return text[:certain]


def _num_begun(text: str, stop: str) -> int:
    """Return how many characters at the end of ``text`` begin ``stop`` without completing it."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
