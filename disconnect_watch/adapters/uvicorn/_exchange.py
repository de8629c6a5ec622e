"""One request that is being answered: uvicorn's cycle, our token and its watch.

Three kinds, one a request, so that a plain one pays for nothing else:

    Exchange           ends its watch before the last of the response
    ProbedExchange     knows what may be written to a half-closed client
    UnchunkedExchange  sends to HTTP/1.0 what it can read
"""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import TYPE_CHECKING, Any

from disconnect_watch.adapters._fast import Exchange
from disconnect_watch.adapters._http_probe import HttpProbe

if TYPE_CHECKING:
    from disconnect_watch.adapters.uvicorn._watched import WatchedProtocol

__all__ = ["Exchange", "Message", "ProbedExchange", "Receive", "Send", "UnchunkedExchange"]

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class ProbedExchange(Exchange):
    """Follows its response, to know at each moment what would do no harm in it."""

    __slots__ = ("_probe",)

    def __init__(self, protocol: "WatchedProtocol", cycle: Any) -> None:
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
