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
        is_reusable: whether the connection may carry another request behind it.
        text: what it says so far, of which the same is told from another.
    """

    num_pieces: int
    is_complete: bool

    @property
    def is_reusable(self) -> bool: ...

    @property
    def text(self) -> str: ...

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
        outlasts: whether an answer to a leaving client is so long that the server can't be done
            with it before the client has left.
        is_http: whether it is HTTP/1.1 that is spoken.
    """

    @property
    def max_pieces(self) -> int: ...

    @property
    def outlasts(self) -> bool: ...

    @property
    def is_http(self) -> bool: ...

    def request(self, index: int, *, leaves: bool) -> bytes:
        """The whole request of one client; a client that ``leaves`` asks for a long answer."""

    def answer(self, index: int) -> Answer:
        """A new one, of which nothing has come."""
