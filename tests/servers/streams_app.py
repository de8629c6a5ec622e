"""The work on asyncio's streams, with just enough HTTP for it."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator

import disconnect_watch as dw
from disconnect_watch.aio import Watch
from disconnect_watch.token import CancelToken
from tests.support.frameworks import Answer

__all__ = ["streams_app"]


class StreamsExchange:
    """One request, and the answer to it."""

    def __init__(self, path: str, writer: asyncio.StreamWriter, watch: Watch | None = None) -> None:
        self.path = path
        self.token = CancelToken() if watch is None else watch.token
        self._watch = watch
        self._writer = writer
        self._is_chunked = False

    async def begin(self, *, length: int | None = None) -> None:
        self._is_chunked = length is None
        kind = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
        await self._send(f"HTTP/1.1 200 OK\r\n{kind}\r\n\r\n".encode())

    async def write(self, data: bytes) -> None:
        await self._send(b"%x\r\n%b\r\n" % (len(data), data) if self._is_chunked else data)

    async def answer(self, body: bytes) -> None:
        """Send the whole answer."""
        self._disarm()
        await self.begin(length=len(body))
        await self.write(body)

    async def end(self) -> None:
        self._disarm()
        await self._send(b"0\r\n\r\n" if self._is_chunked else b"")

    def _disarm(self) -> None:
        """Who has the whole answer may leave."""
        if self._watch is not None:
            self._watch.disarm()

    async def _send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()


@contextlib.asynccontextmanager
async def streams_app(
    answer: Answer, sock: socket.socket, tls: ssl.SSLContext | None, *, mode: str
) -> AsyncIterator[None]:
    """``dw.start_server``, ``dw.watch`` in a handler, or a read beside the work."""

    async def serve(exchange: StreamsExchange) -> None:
        body = await answer(exchange)
        if body is not None:
            await exchange.answer(body)

    async def run(path: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if mode == "watch":
            async with dw.watch(writer) as watch:
                await serve(StreamsExchange(path, writer, watch))
            return
        exchange = StreamsExchange(path, writer)
        if mode == "ours":
            await serve(exchange)
            return
        work = asyncio.ensure_future(serve(exchange))
        listener = asyncio.ensure_future(_read_to_end(reader))
        await asyncio.wait([work, listener], return_when=asyncio.FIRST_COMPLETED)
        listener.cancel()
        work.cancel()
        await asyncio.wait([work])

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                await run(head.split()[1].decode(), reader, writer)

    start = dw.start_server if mode == "ours" else asyncio.start_server
    server = await start(handle, sock=sock.dup(), ssl=tls)
    try:
        yield
    finally:
        server.close()


async def _read_to_end(reader: asyncio.StreamReader) -> None:
    """What came is lost for the next request, which an application would have to keep."""
    with contextlib.suppress(OSError):
        while await reader.read(1 << 16):
            pass
