"""What a protocol must tell the clients: the bytes to send, and what becomes of those that come."""

from typing import Protocol

__all__ = ["Answer", "Exchange", "WrongAnswerError"]


class WrongAnswerError(Exception):
    """The server said something, but no right answer; the message is short and repeats."""


class Answer(Protocol):
    """One answer while it comes.

    Attributes:
        num_pieces: how much of it came: events, lines.
        is_complete: whether its end was seen, and all of it is right.
    """

    num_pieces: int
    is_complete: bool

    def feed(self, data: bytes) -> None:
        """Take what was received.

        Raises:
            WrongAnswerError: it can be no right answer any more.
        """

    def end(self) -> None:
        """The server closed; completes an answer that lasts until then."""


class Exchange(Protocol):
    """A request and its answer.

    Attributes:
        max_pieces: how many pieces of an answer to a leaving client can be read before
            its last.
    """

    @property
    def max_pieces(self) -> int: ...

    def request(self, index: int, *, leaves: bool) -> bytes:
        """The whole request of one client; a client that ``leaves`` asks for a long answer."""

    def answer(self, index: int) -> Answer:
        """A new one, of which nothing has come."""
