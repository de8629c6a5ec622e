"""A raw server: one line is sent, lines come back."""

import sys
from dataclasses import dataclass

from disconnect_watch.stress.exchange import WrongAnswerError

__all__ = ["LineAnswer", "LineExchange"]

MARK = "{index}"


@dataclass(frozen=True, slots=True)
class LineExchange:
    """Sends a line and reads some.

    Args:
        send: the line without its end; ``{index}`` becomes the client's number.
        num_lines: of an answer; None for one that lasts until the server closes.
        expect: what each line of it must be, ``{index}`` as above; None for anything.
    """

    send: str = "hello {index}"
    num_lines: int | None = 1
    expect: str | None = None

    @property
    def max_pieces(self) -> int:
        """See ``Exchange``. A server that closes may do so after any line."""
        return sys.maxsize if self.num_lines is None else self.num_lines - 1

    @property
    def outlasts(self) -> bool:
        """See ``Exchange``."""
        return True

    @property
    def is_http(self) -> bool:
        """See ``Exchange``."""
        return False

    def request(self, index: int, *, leaves: bool) -> bytes:
        """See ``Exchange``."""
        return _fill(self.send, index) + b"\n"

    def answer(self, index: int) -> "LineAnswer":
        """See ``Exchange``."""
        expected = None if self.expect is None else _fill(self.expect, index)
        return LineAnswer(self.num_lines, expected)


class LineAnswer:
    """See ``Answer``; a piece is a line."""

    def __init__(self, num_lines: int | None, expected: bytes | None) -> None:
        self.num_pieces = 0
        self.is_complete = False
        self._num_lines = num_lines
        self._expected = expected
        self._rest = b""
        self._lines: list[bytes] = []

    @property
    def is_reusable(self) -> bool:
        """See ``Answer``. Whether another line may follow only the server knows."""
        return False

    @property
    def text(self) -> str:
        """See ``Answer``."""
        return b"\n".join(self._lines).decode(errors="replace")

    def feed(self, data: bytes) -> None:
        """See ``Answer``."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if self._expected is not None and line.removesuffix(b"\r") != self._expected:
                raise WrongAnswerError("a line is not what it must be")
            self.num_pieces += 1
            self._lines.append(line)
        if self._num_lines is not None and self.num_pieces >= self._num_lines:
            if self.num_pieces > self._num_lines or self._rest:
                raise WrongAnswerError("more came than the answer")
            self.is_complete = True

    def end(self) -> None:
        """See ``Answer``."""
        if self._num_lines is None and self.num_pieces and not self._rest:
            self.is_complete = True


def _fill(text: str, index: int) -> bytes:
    return text.replace(MARK, str(index)).encode()
