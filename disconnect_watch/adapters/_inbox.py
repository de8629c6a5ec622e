"""The one reader of a request's ``receive()``, which takes no message from the application.

An ASGI server tells that the client left through ``receive()``, in the same line as the
request's body, and to a single reader. So who listens for ``http.disconnect`` beside the
application must be that reader, and hand on in order what he finds.

He reads ahead of the application by ``READ_AHEAD`` bytes at most: what the server holds
back of a body is the client's to wait with. Nor does he ask for a body that the client
sends only when asked (``Expect: 100-continue``): to ask is the application's decision.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

__all__ = ["DISCONNECT", "READ_AHEAD", "Inbox", "Message", "Receive", "is_asked_for"]

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]

#: Bytes; as many as uvicorn holds of a body that nobody reads.
READ_AHEAD = 65536

DISCONNECT = "http.disconnect"


class Inbox:
    """What a server said of one request, for the application to receive.

    Args:
        receive: the server's.

    Attributes:
        on_disconnect: called from the loop when the server says ``http.disconnect``, while
            it is listened to.
    """

    def __init__(self, receive: Receive) -> None:
        self.on_disconnect: Callable[[], object] | None = None
        self._receive = receive
        self._messages: deque[Message] = deque()
        self._num_bytes = 0
        self._is_disconnected = False
        self._error: Exception | None = None
        #: Set when there is something new for the application, or for the listener.
        self._news = asyncio.Event()
        self._room = asyncio.Event()
        self._listener: asyncio.Task[None] | None = None

    def listen(self) -> None:
        """Begin to read, unless begun; its partner is ``close``."""
        if self._listener is None:
            self._listener = asyncio.create_task(self._listen())

    async def get(self) -> Message:
        """The application's ``receive()``."""
        self.listen()
        while not self._messages:
            if self._is_disconnected:
                return {"type": DISCONNECT}
            if self._error is not None:
                raise self._error
            self._news.clear()
            await self._news.wait()
        message = self._messages.popleft()
        self._num_bytes -= len(message.get("body", b""))
        self._room.set()
        return message

    def disconnect(self) -> None:
        """Let the application hear ``http.disconnect``, behind what came before it."""
        self._is_disconnected = True
        self._news.set()

    def close(self) -> None:
        """Read no more, until somebody listens again. What was read is kept."""
        self.on_disconnect = None
        if self._listener is not None:
            self._listener.cancel()
            self._listener = None

    async def _listen(self) -> None:
        try:
            while (message := await self._receive())["type"] != DISCONNECT:
                self._messages.append(message)
                self._num_bytes += len(message.get("body", b""))
                self._news.set()
                while self._num_bytes > READ_AHEAD:
                    self._room.clear()
                    await self._room.wait()
        except Exception as error:
            self._error = error  # the application's to see, when it asks
            self._news.set()
        else:
            self.disconnect()
            if self.on_disconnect is not None:
                self.on_disconnect()


def is_asked_for(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Whether the client sends its body only when asked to. Source: RFC 9110, 10.1.1."""
    return any(
        name.lower() == b"expect" and value.lower() == b"100-continue" for name, value in headers
    )
