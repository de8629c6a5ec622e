"""Servers of ``start_server`` whose handlers say how they ended, and clients that leave them."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from disconnect_watch import start_server
from tests.support.net import dial, listener, reset, until

__all__ = ["LEAVING", "Handler", "forever", "hear", "serving", "visited"]

Handle = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None] | None]
Body = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[object]]


@contextlib.asynccontextmanager
async def serving(
    handle: Handle, kind: str = "tcp", **options: Any
) -> AsyncIterator[Callable[[], socket.socket]]:
    """A server on loopback; yields what connects one more client to it."""
    with listener(kind) as listening:
        clients: list[socket.socket] = []
        # A copy: the server closes what it is given.
        server = await start_server(handle, sock=listening.dup(), **options)

        def connect() -> socket.socket:
            clients.append(dial(listening))
            return clients[-1]

        try:
            yield connect
        finally:
            server.close()
            await server.wait_closed()
            for client in clients:
                client.close()


async def forever() -> None:
    await asyncio.get_running_loop().create_future()


class Handler:
    """Runs ``body``, and notes how it ended."""

    def __init__(self, body: Body) -> None:
        self.body = body
        self.num_started = 0
        self.ends: list[object] = []
        self.writer: asyncio.StreamWriter | None = None

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_started += 1
        self.writer = writer
        try:
            self.ends.append(await self.body(reader, writer))
        except BaseException as error:
            self.ends.append(type(error))
            raise
        writer.close()

    async def end(self) -> object:
        """Wait for the one that was called: what it returned, or the class of its error."""
        await until(lambda: self.ends)
        (end,) = self.ends
        return end


@contextlib.asynccontextmanager
async def visited(
    body: Body, kind: str = "tcp", **options: Any
) -> AsyncIterator[tuple[Handler, socket.socket]]:
    """A server whose handler runs ``body``, and one client of it."""
    handler = Handler(body)
    async with serving(handler, kind, **options) as connect:
        yield handler, connect()


def _fin_behind_data(client: socket.socket) -> None:
    client.sendall(b"pipelined")
    client.close()


LEAVING: dict[str, Callable[[socket.socket], None]] = {
    "fin": socket.socket.close,
    "half_close": lambda client: client.shutdown(socket.SHUT_WR),
    "rst": reset,
    "fin_behind_data": _fin_behind_data,
}


async def hear(client: socket.socket, way: str) -> bytes:
    """Wait for one byte, and take it unless a reset needs it: unread, it makes one of a FIN."""
    return await asyncio.to_thread(client.recv, 1, socket.MSG_PEEK if way == "rst" else 0)
