"""The work on an ``asyncio.Protocol``, with just enough HTTP for it."""

import asyncio
import contextlib
import socket
import ssl
from collections import deque
from collections.abc import AsyncIterator
from typing import cast

from disconnect_watch.adapters.protocol import Request, WatchedProtocol
from disconnect_watch.token import CancelToken
from tests.support.frameworks import Answer

__all__ = ["protocol_app"]


class ProtocolExchange:
    """One request, and the answer to it."""

    def __init__(self, path: str, protocol: "Server", request: Request | None) -> None:
        self.path = path
        self.token = CancelToken() if request is None else request.token
        self._protocol = protocol
        self._request = request
        self._is_chunked = False

    async def begin(self, *, length: int | None = None) -> None:
        self._is_chunked = length is None
        kind = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
        await self._protocol.send(f"HTTP/1.1 200 OK\r\n{kind}\r\n\r\n".encode())

    async def write(self, data: bytes) -> None:
        await self._protocol.send(b"%x\r\n%b\r\n" % (len(data), data) if self._is_chunked else data)

    async def answer(self, body: bytes) -> None:
        """Send the whole answer."""
        self._protocol.end(self._request)
        await self.begin(length=len(body))
        await self.write(body)

    async def end(self) -> None:
        self._protocol.end(self._request)
        await self._protocol.send(b"0\r\n\r\n" if self._is_chunked else b"")


class Server(asyncio.Protocol):
    """Answers one request after the other."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._unread = b""
        self._paths = deque[str]()
        self.task: asyncio.Task[None] | None = None
        self._may_write = asyncio.Event()
        self._may_write.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        *heads, self._unread = (self._unread + data).split(b"\r\n\r\n")
        for head in heads:
            if head.startswith((b"GET", b"POST")):
                self._paths.append(head.split()[1].decode())
        self._go_on()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._paths.clear()

    def pause_writing(self) -> None:
        self._may_write.clear()

    def resume_writing(self) -> None:
        self._may_write.set()

    async def send(self, data: bytes) -> None:
        self.transport.write(data)
        await self._may_write.wait()

    def begin(self) -> Request | None:
        """Called by the task of a request."""
        return None

    def end(self, request: Request | None) -> None:
        """Called before the last of an answer."""

    def _go_on(self) -> None:
        if self.task is None and self._paths:
            self.task = asyncio.ensure_future(self._serve(self._paths.popleft()))
            self.task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self.task = None
        if task.cancelled():
            self.transport.abort()
            return
        self._go_on()

    async def _serve(self, path: str) -> None:
        exchange = ProtocolExchange(path, self, self.begin())
        if exchange.token.cancelled:
            return
        body = await self._answer(exchange)
        if body is not None:
            await exchange.answer(body)


class Plain(Server):
    """Cancels in ``connection_lost``."""

    def begin(self) -> Request | None:
        self._is_answered = False
        return None

    def end(self, request: Request | None) -> None:
        self._is_answered = True

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self.task is not None and not self._is_answered:
            self.task.cancel()


class Watched(WatchedProtocol, Server):
    """Cancelled by the mixin."""

    def begin(self) -> Request | None:
        return self.begin_request(asyncio.current_task())

    def end(self, request: Request | None) -> None:
        if request is not None:
            self.end_request(request)


@contextlib.asynccontextmanager
async def protocol_app(
    answer: Answer, sock: socket.socket, tls: ssl.SSLContext | None, *, is_watched: bool
) -> AsyncIterator[None]:
    """The protocol with our mixin or without."""
    kind = Watched if is_watched else Plain
    server = await asyncio.get_running_loop().create_server(
        lambda: kind(answer), sock=sock.dup(), ssl=tls
    )
    try:
        yield
    finally:
        server.close()
