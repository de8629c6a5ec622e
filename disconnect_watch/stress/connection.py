"""The clients' connections to one server: plain or TLS, fresh or kept open."""

import asyncio
import contextlib
import socket
import ssl
import struct
from collections import deque
from types import TracebackType
from typing import Self

from disconnect_watch.stress.target import Address, Target

__all__ = ["Connection", "Connections"]

#: Of a client that reads slowly, bytes: the least that the kernel takes.
_SMALL_WINDOW = 2048
_DISCARD_BYTES = 1 << 16
#: A server that sends without end would otherwise keep the client.
_MAX_READS = 64


class Connection:
    """A connected, non-blocking socket on the loop that runs.

    Attributes:
        sock: under TLS an ``ssl.SSLSocket``.
        num_answers: that were read to their end over it.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.num_answers = 0
        self._loop = asyncio.get_running_loop()

    async def send(self, data: bytes) -> None:
        """Send all of it."""
        if not isinstance(self.sock, ssl.SSLSocket):
            await self._loop.sock_sendall(self.sock, data)
            return
        view = memoryview(data)
        while view:
            try:
                view = view[self.sock.send(view) :]
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as want:
                await self._until_ready(want)

    async def receive(self, num_bytes: int) -> bytes:
        """Some bytes, at most so many; none at the end of the stream."""
        if not isinstance(self.sock, ssl.SSLSocket):
            return await self._loop.sock_recv(self.sock, num_bytes)
        while True:
            try:
                return self.sock.recv(num_bytes)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as want:
                await self._until_ready(want)

    async def shake_hands(self) -> None:
        """Begin TLS."""
        assert isinstance(self.sock, ssl.SSLSocket)
        while True:
            try:
                self.sock.do_handshake()
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as want:
                await self._until_ready(want)
            else:
                return

    async def _until_ready(self, want: ssl.SSLError) -> None:
        ready = self._loop.create_future()
        fd = self.sock.fileno()
        if isinstance(want, ssl.SSLWantWriteError):
            self._loop.add_writer(fd, _set, ready)
        else:
            self._loop.add_reader(fd, _set, ready)
        try:
            await ready
        finally:
            self._loop.remove_writer(fd)
            self._loop.remove_reader(fd)

    @property
    def is_quiet(self) -> bool:
        """Whether neither an end nor a byte is there to be read, as before the next request."""
        if isinstance(self.sock, ssl.SSLSocket):
            try:
                self.sock.recv(1)
            except ssl.SSLWantReadError:
                return True
            except OSError:
                return False
            return False
        try:
            self.sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def discard_what_came(self) -> None:
        """Read what is there, over TLS, and forget it."""
        assert isinstance(self.sock, ssl.SSLSocket)
        with contextlib.suppress(OSError):
            for _ in range(_MAX_READS):
                if not self.sock.recv(_DISCARD_BYTES):
                    return

    def close(self) -> None:
        """Idempotent."""
        self.sock.close()


class Connections:
    """Opens them, and keeps those that may be used again.

    Args:
        address: of the server.
        target: says whether TLS is spoken, and with which host.
        context: for TLS; without one the server's certificate is not looked at, since whether a
            server notices who leaves is asked, not who it is.

    Threads: that of the loop.
    """

    def __init__(
        self, address: Address, target: Target, *, context: ssl.SSLContext | None = None
    ) -> None:
        self._address = address
        self._host = target.host
        self._context = (context or _trusting_context()) if target.is_tls else None
        self._kept: deque[Connection] = deque()
        self._held: list[socket.socket] = []

    async def open(self, *, is_slow: bool = False) -> Connection:
        """A new one.

        Args:
            is_slow: whether its window is to be small.

        Raises:
            OSError: the server refuses, or does not speak TLS.
        """
        sock = socket.socket(self._address.family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            if is_slow:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SMALL_WINDOW)
            await asyncio.get_running_loop().sock_connect(sock, self._address.sockaddr)
            if self._context is not None:
                sock = self._context.wrap_socket(
                    sock, server_hostname=self._host, do_handshake_on_connect=False
                )
                connection = Connection(sock)
                await connection.shake_hands()
                return connection
            return Connection(sock)
        except BaseException:
            sock.close()
            raise

    def take(self) -> Connection | None:
        """One that was kept and is still open, if there is any."""
        while self._kept:
            connection = self._kept.popleft()
            if connection.is_quiet:
                return connection
            connection.close()
        return None

    def keep(self, connection: Connection) -> None:
        """For the next that takes one."""
        self._kept.append(connection)

    def hold(self, sock: socket.socket) -> None:
        """Have it open until the end: a client vanished, and its close would still be heard."""
        self._held.append(sock)

    def close(self) -> None:
        """Close what is open; who vanished goes without a FIN. Idempotent."""
        while self._kept:
            self._kept.pop().close()
        while self._held:
            sock = self._held.pop()
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _set(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)


def _trusting_context() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
