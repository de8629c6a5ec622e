"""An answer that is JSON: one document, or server-sent events with one each."""

import json
from collections.abc import Callable
from typing import Any

from disconnect_watch.stress.exchange import WrongAnswerError
from disconnect_watch.stress.http import HttpResponse

__all__ = ["DocumentsAnswer", "error_of"]


class DocumentsAnswer:
    """See ``Answer``; a piece is an event, or the one document.

    Args:
        text_of: the text in a document.

            Raises:
                WrongAnswerError: the document is none of the protocol's.
        is_stream: whether events come.
        end_mark: the data of the last event, where the protocol has such a one; a stream that
            ends without it was cut short.
    """

    def __init__(
        self, text_of: Callable[[Any], str], *, is_stream: bool, end_mark: bytes = b""
    ) -> None:
        self.num_pieces = 0
        self.is_complete = False
        self._text_of = text_of
        self._is_stream = is_stream
        self._end_mark = end_mark
        self._is_marked = not end_mark
        self._response = HttpResponse()
        self._rest = b""
        self._text: list[str] = []

    @property
    def is_reusable(self) -> bool:
        """See ``Answer``."""
        return self._response.is_kept_alive

    @property
    def text(self) -> str:
        """See ``Answer``."""
        return "".join(self._text)

    def feed(self, data: bytes) -> None:
        """See ``Answer``."""
        self._rest += self._response.feed(data)
        is_complete = self._response.is_complete
        if self._response.status not in (0, 200):
            if is_complete:
                raise WrongAnswerError(f"status {self._response.status}")
        elif self._is_stream:
            self._take_events()
            if is_complete and (self._rest or not self.num_pieces):
                raise WrongAnswerError("the stream ends in mid-event, or without any")
            if is_complete and not self._is_marked:
                raise WrongAnswerError(f"the stream ends without {self._end_mark.decode()}")
        elif is_complete:
            self._take(self._rest)
        self.is_complete = is_complete

    def end(self) -> None:
        """See ``Answer``."""

    def _take_events(self) -> None:
        *events, self._rest = self._rest.replace(b"\r\n", b"\n").split(b"\n\n")
        for event in events:
            if event.startswith(b":"):
                continue  # a comment, by which some servers see whether anybody is there
            if not event.startswith(b"data:"):
                raise WrongAnswerError("an event is no server-sent event with data")
            data = event.removeprefix(b"data:").strip()
            if self._end_mark and data == self._end_mark:
                self._is_marked = True
            else:
                self._take(data)

    def _take(self, document: bytes) -> None:
        try:
            fields = json.loads(document)
        except ValueError as error:
            raise WrongAnswerError("the answer is no JSON") from error
        self._text.append(self._text_of(fields))
        self.num_pieces += 1


def error_of(fields: Any) -> str | None:
    """What a document says went wrong, in either of the forms that servers use."""
    error = fields.get("error") if isinstance(fields, dict) else None
    if isinstance(error, dict):
        error = error.get("message")
    return str(error) if error else None
