"""One request that is being answered: uvicorn's cycle, our token and its watch.

Three kinds, one a request, so that a plain one pays for nothing else:

    Exchange           ends its watch before the last of the response
    ProbedExchange     knows what may be written to a half-closed client
    UnchunkedExchange  sends to HTTP/1.0 what it can read
"""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import TYPE_CHECKING, Any

from disconnect_watch.adapters._content_length import content_length
from disconnect_watch.adapters._http_probe import HttpProbe
from disconnect_watch.token import CancelToken, Reason

if TYPE_CHECKING:
    from disconnect_watch.adapters.uvicorn._grace import GracePeriod
    from disconnect_watch.adapters.uvicorn._watched import WatchedProtocol

__all__ = ["Exchange", "Message", "ProbedExchange", "Receive", "Send", "UnchunkedExchange"]

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class Exchange:
    """One request and its watch, whose ids are 0 while nothing is armed.

    Attributes:
        token: the request's.
        armed: what the watch sets: the token, or with a grace what begins that.
        grace: None where the token is set at once.
        head: the first message of the response, once it was sent.
        num_bytes_left: of a body in pieces, from the first on; infinity where that is unknown.
        on_cancel: called when the request is cancelled; for ``CancelOnDisconnect``.
    """

    __slots__ = (
        "armed",
        "cycle",
        "fin_watch_id",
        "grace",
        "head",
        "num_bytes_left",
        "on_cancel",
        "protocol",
        "token",
        "watch_id",
    )

    def __init__(self, protocol: "WatchedProtocol", cycle: Any) -> None:
        self.protocol = protocol
        self.cycle = cycle
        self.token = self.armed = CancelToken()
        self.grace: GracePeriod | None = None
        self.watch_id = 0
        self.fin_watch_id = 0
        self.on_cancel: Callable[[Reason], object] | None = None
        self.head: Message | None = None
        self.num_bytes_left: float | None = None

    def send(self, message: Message) -> Awaitable[None]:
        """The ``send`` of the application: uvicorn's, whose coroutine it returns."""
        # In this order: asked for each piece of a long body.
        if message.get("more_body"):
            if self._is_last_piece(message):
                self.protocol.end_before_last(self)
        elif message["type"] == "http.response.body":
            self.protocol.end_before_last(self)
        else:
            self.head = message
        sending: Awaitable[None] = self.cycle.send(message)
        return sending

    def _is_last_piece(self, message: Message) -> bool:
        """Whether the client has all with it, though an empty message is still to come.

        Middleware sends a body in that way, and so do streams of a known length.
        """
        if self.num_bytes_left is None:
            self.num_bytes_left = content_length(self.head)
        self.num_bytes_left -= len(message.get("body", b""))
        return self.num_bytes_left <= 0

    def cancel(self, reason: Reason) -> None:
        """Set the token, and have ``receive()`` tell of it."""
        self.token.cancel(reason)
        self.disconnect()
        if self.on_cancel is not None:
            self.on_cancel(reason)

    def disconnect(self) -> None:
        """Have uvicorn's ``receive`` tell of it, and drop what is sent from now on."""
        self.cycle.disconnected = True
        self.cycle.message_event.set()

    def question(self) -> bytes:
        """What may be written now to find out whether a half-closed client reads."""
        return b""


class ProbedExchange(Exchange):
    """Follows its response, to know at each moment what would do no harm in it."""

    __slots__ = ("_probe",)

    def __init__(self, protocol: "WatchedProtocol", cycle: Any) -> None:
        super().__init__(protocol, cycle)
        self._probe = HttpProbe(cycle.scope["method"])

    async def send(self, message: Message) -> None:
        await super().send(message)
        self._probe.sent(message)

    def question(self) -> bytes:
        return self._probe.bytes_now()


class UnchunkedExchange(Exchange):
    """Has a body of unknown length end with the connection.

    uvicorn's httptools protocol would send it in chunks, of which a client of HTTP/1.0
    knows nothing; but it takes the framing as given where that is set before the head
    (uvicorn 0.54, ``chunked_encoding`` and ``expected_content_length`` of the cycle).

    Source: RFC 9112 6.1 and 6.3.
    """

    __slots__ = ("_ends_with_connection",)

    def __init__(self, protocol: "WatchedProtocol", cycle: Any) -> None:
        super().__init__(protocol, cycle)
        self._ends_with_connection = False

    def send(self, message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            names = {name.lower() for name, _ in message.get("headers", ())}
            self._ends_with_connection = not names & {b"content-length", b"transfer-encoding"}
            if self._ends_with_connection:
                self.cycle.chunked_encoding = False
        elif self._ends_with_connection:
            self.cycle.expected_content_length = len(message.get("body", b""))
        return super().send(message)
