"""The server's end of one connection, and what its owner does before the client acts."""

import asyncio
import contextlib
import os
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Iterator
from typing import cast

from tests.matrix.cells import Cell
from tests.matrix.leaver import Leaver, TlsEnd
from tests.support.net import dial, listener, until
from tests.support.tls import client_context, server_context

__all__ = [
    "LoopEnd",
    "Streams",
    "connect",
    "loop_end",
    "read_by_task",
    "read_by_thread",
    "shut_reading",
    "streams_end",
    "thread_end",
]

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
#: What a loop has of its end: streams, the transport of a pipe, or its fd alone.
LoopEnd = Streams | asyncio.Transport | int

_GREETING = b"."
_RESPONSE = bytes(1000)
_MORE_THAN_FITS = bytes(1 << 23)
#: The window that a socket begins with is 64 KB: what is behind more is behind a full one.
_ROOM_FOR_BODY = 600_000


@contextlib.contextmanager
def connect(cell: Cell, leaver: Leaver) -> Iterator[int]:
    """The fd of our end, blocking and without TLS yet; the leaver has the other end.

    Who gives the fd to a socket leaves its number to this block, which closes it.
    """
    if cell.is_pipe:
        theirs, ours = os.pipe()
        leaver.take(theirs)
    else:
        with listener("tcp" if cell.is_tls else cell.kind) as listening:
            if "300k" in cell.way.act:
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _ROOM_FOR_BODY)
            ours = _accept(cell, leaver, listening)
    try:
        yield ours
    finally:
        leaver.do("drop")
        with contextlib.suppress(OSError):  # closed by the socket it was given to
            os.close(ours)


def _accept(cell: Cell, leaver: Leaver, listening: socket.socket) -> int:
    client = dial(listening)
    client.settimeout(None)
    if cell.way.when == "accept":
        leaver.take(client)
        leaver.answer()
        leaver.do(cell.way.act)
        return listening.accept()[0].detach()
    server, _ = listening.accept()
    ours, theirs = (client, server) if cell.way.is_client else (server, client)
    tls: TlsEnd | None = None
    if cell.is_tls:
        tls = {"is_server": cell.way.is_client, "version": cell.kind}
    leaver.take(theirs, tls)
    return ours.detach()


def _context(cell: Cell) -> ssl.SSLContext | None:
    if not cell.is_tls:
        return None
    return client_context(cell.kind) if cell.way.is_client else server_context(cell.kind)


def _prepare(cell: Cell, fd: int) -> None:
    """What needs the socket itself, and not its owner's layers."""
    way = cell.way
    with socket.socket(fileno=os.dup(fd)) as sock:
        if way.server == "probe":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
        elif cell.kind == "unix" and "rst" in way.act:
            sock.send(b".")  # only what the client has not read makes a reset of its close


def shut_reading(fd: int) -> None:
    """The owner wants to hear no more of the client, who may stay."""
    with socket.socket(fileno=os.dup(fd)) as sock:
        sock.shutdown(socket.SHUT_RD)


@contextlib.contextmanager
def thread_end(cell: Cell, leaver: Leaver, fd: int) -> Iterator[socket.socket | None]:
    """The end as a plain thread's code has it; None for a pipe."""
    if cell.kind == "pipe":
        leaver.answer()
        _send_to_pipe(cell, fd)
        yield None
        return
    sock = socket.socket(fileno=fd)
    context = _context(cell)
    if context is not None:
        is_client = cell.way.is_client
        name = "localhost" if is_client else None
        sock = context.wrap_socket(sock, server_side=not is_client, server_hostname=name)
        if not is_client:
            sock.sendall(_GREETING)
    with sock:
        if cell.way.when != "accept":
            leaver.answer()
        _prepare(cell, fd)
        if cell.way.server == "send":
            sock.sendall(_RESPONSE)
        elif cell.way.server == "fill":
            sock.setblocking(False)
            with contextlib.suppress(BlockingIOError, ssl.SSLWantWriteError):
                while sock.send(_MORE_THAN_FITS):
                    pass
            sock.setblocking(True)
        yield sock


def _send_to_pipe(cell: Cell, fd: int) -> None:
    os.set_blocking(fd, False)
    if cell.way.server == "send":
        os.write(fd, _RESPONSE)
    elif cell.way.server == "fill":
        with contextlib.suppress(BlockingIOError):
            while os.write(fd, _MORE_THAN_FITS):
                pass


@contextlib.contextmanager
def read_by_thread(sock: socket.socket) -> Iterator[None]:
    """Read and forget, as a thread that waits for the next request does."""

    def read() -> None:
        with contextlib.suppress(OSError):
            while sock.recv(1 << 16):
                pass

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            socket.socket.shutdown(sock, socket.SHUT_RDWR)
        thread.join()


@contextlib.asynccontextmanager
async def loop_end(cell: Cell, leaver: Leaver, fd: int) -> AsyncIterator[LoopEnd]:
    """The end as code on the running loop has it."""
    if cell.kind == "pipe":
        leaver.answer()
        _send_to_pipe(cell, fd)
        yield fd
    elif cell.kind == "pipe_transport":
        leaver.answer()
        async with _pipe_transport(cell, fd) as transport:
            yield transport
    else:
        async with streams_end(cell, leaver, fd) as streams:
            yield streams


class _Ended(asyncio.Protocol):
    """Tells when its transport is closed."""

    def __init__(self) -> None:
        self.is_lost = asyncio.Event()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost.set()


@contextlib.asynccontextmanager
async def _pipe_transport(cell: Cell, fd: int) -> AsyncIterator[asyncio.Transport]:
    loop = asyncio.get_running_loop()
    opened, protocol = await loop.connect_write_pipe(_Ended, os.fdopen(fd, "wb", 0))
    # typeshed knows not that it has what any transport has but reading.
    transport = cast("asyncio.Transport", opened)
    try:
        if cell.way.server == "send":
            transport.write(_RESPONSE)
        elif cell.way.server == "fill":
            transport.write(_MORE_THAN_FITS)
        await asyncio.sleep(0)  # uvloop sends at the end of its turn
        yield transport
    finally:
        if not transport.is_closing():
            transport.abort()
        await protocol.is_lost.wait()


@contextlib.asynccontextmanager
async def streams_end(cell: Cell, leaver: Leaver, fd: int) -> AsyncIterator[Streams]:
    """The end of a socket as streams of the running loop."""
    reader, writer = await _open_streams(cell, socket.socket(fileno=fd))
    try:
        if cell.is_tls and not cell.way.is_client:
            writer.write(_GREETING)
        if cell.way.when != "accept":
            await until(leaver.has_answered)
            leaver.answer()
        _prepare(cell, fd)
        if cell.way.server == "send":
            writer.write(_RESPONSE)
        elif cell.way.server == "fill":
            writer.write(_MORE_THAN_FITS)
        await asyncio.sleep(0)  # uvloop sends at the end of its turn
        yield reader, writer
    finally:
        writer.transport.abort()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def _open_streams(cell: Cell, sock: socket.socket) -> Streams:
    sock.setblocking(False)
    context = _context(cell)
    if cell.way.is_client:
        return await asyncio.open_connection(sock=sock, ssl=context, server_hostname="localhost")
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(loop=loop)
    protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
    transport, _ = await loop.connect_accepted_socket(lambda: protocol, sock, ssl=context)
    return reader, asyncio.StreamWriter(transport, protocol, reader, loop)


@contextlib.asynccontextmanager
async def read_by_task(reader: asyncio.StreamReader) -> AsyncIterator[None]:
    """Read and forget, as a handler that waits for the next request does."""

    async def read() -> None:
        with contextlib.suppress(OSError):
            while await reader.read(1 << 16):
                pass

    task = asyncio.create_task(read())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
