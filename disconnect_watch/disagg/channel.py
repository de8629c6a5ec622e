"""A stream of bytes between two nodes, every wait of which can be ended from another thread."""

import contextlib
import errno
import os
import select
import socket
import ssl
import threading
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any, Self

from disconnect_watch.disagg.errors import PeerLostError, TransferCancelledError
from disconnect_watch.token import CancelToken

__all__ = ["Address", "Channel", "Interrupt"]

#: A family, and a path or what ``getaddrinfo`` gives for a host and port.
Address = tuple[int, Any]


class Interrupt:
    """Ends the waits of one transfer, and of no later one on the same channel.

    Args:
        cancel: counts as ``set`` from the moment on that it is, which is before it calls that.

    Threads: ``set`` from any, also when it is closed; the rest from the one that waits.
    """

    def __init__(self, cancel: CancelToken | None = None) -> None:
        self._cancel = cancel
        self._lock = threading.Lock()
        self._reader, self._writer = socket.socketpair()
        self._is_closed = False
        self._is_set = False

    @property
    def is_set(self) -> bool:
        return self._is_set or (self._cancel is not None and self._cancel.cancelled)

    def set(self, _: object = None) -> None:
        """End the wait under way, or the next one."""
        # A closed number may be another file's before the write gets there.
        with self._lock:
            was_set, self._is_set = self._is_set, True
            # Behind the word, which whoever is woken looks at.
            if not was_set and not self._is_closed:
                self._writer.send(b".")

    def clear(self) -> None:
        """Take notice, and wait again."""
        with self._lock:
            if self._is_set:
                self._reader.recv(1)
            self._is_set = False

    def fileno(self) -> int:
        return self._reader.fileno()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._lock:
            self._is_closed = True
            self._reader.close()
            self._writer.close()


class Channel:
    """One stream socket, plain or TLS.

    Args:
        sock: connected, the channel's from here on; None for one that ``connect`` makes.

    Attributes:
        timeout: seconds that a wait may last in which no byte moves; None waits for ever.
        interrupt: ends waits with ``TransferCancelledError`` while it is there.

    Raises:
        PeerLostError: from each call, where the other side has gone or is silent.

    Threads: one at a time, but for ``shutdown``.
    """

    def __init__(self, sock: socket.socket | None = None) -> None:
        self._lock = threading.Lock()
        self._is_shut = self._is_closed = False
        self._sock = sock or socket.socket()
        self._sock.setblocking(False)
        self.timeout: float | None = None
        self.interrupt: Interrupt | None = None

    @property
    def sock(self) -> socket.socket:
        return self._sock

    def connect(self, addresses: Iterable[Address]) -> None:
        """Connect to the first of these that answers."""
        failed = []
        for family, address in addresses:
            self._replace(socket.socket(family, socket.SOCK_STREAM))
            try:
                number = self._sock.connect_ex(address)
            except (OSError, ValueError) as error:  # it can be no address of that family
                failed.append(f"{address}: {error}")
                continue
            if number == errno.EINPROGRESS:
                self._wait(select.POLLOUT)
                number = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if not number:
                return
            failed.append(f"{address}: {os.strerror(number)}")
        raise PeerLostError(f"connect to {', '.join(failed)}")

    def start_tls(self, context: ssl.SSLContext, server_hostname: str | None) -> None:
        """Speak TLS from here on; a server's side is given no name."""
        tls = context.wrap_socket(
            self._sock,
            server_side=server_hostname is None,
            server_hostname=server_hostname,
            do_handshake_on_connect=False,
        )
        self._replace(tls)
        while True:
            try:
                tls.do_handshake()
                return
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as wanted:
                self._wait(_events_of(wanted))
            except OSError as error:
                raise PeerLostError(f"TLS handshake: {error}") from error

    def send(self, *parts: "bytes | bytearray | memoryview") -> None:
        """Send all bytes of all parts."""
        for part in parts:
            view = memoryview(part)
            while view:
                try:
                    view = view[self._sock.send(view) :]
                except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError) as wanted:
                    self._wait(_events_of(wanted, otherwise=select.POLLOUT))
                except OSError as error:
                    raise PeerLostError(f"send: {error}") from error

    def recv(self, num_bytes: int) -> bytearray:
        """Receive exactly so many bytes."""
        received = bytearray(num_bytes)
        view = memoryview(received)
        while view:
            try:
                num = self._sock.recv_into(view)
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError) as wanted:
                self._wait(_events_of(wanted))
                continue
            except OSError as error:
                raise PeerLostError(f"receive: {error}") from error
            if not num:
                raise PeerLostError("receive: the other node has closed the connection")
            view = view[num:]
        return received

    @contextlib.contextmanager
    def interrupted_by(self, interrupt: Interrupt | None) -> Iterator[None]:
        """Let the waits in the block be ended by that alone."""
        before, self.interrupt = self.interrupt, interrupt
        try:
            yield
        finally:
            self.interrupt = before

    def check(self) -> None:
        """Raise what a wait would, at a place where none comes."""
        if self.interrupt is not None and self.interrupt.is_set:
            raise TransferCancelledError("pull: the transfer was cancelled or released midway")

    def has_news(self) -> bool:
        """Whether something can be received, an end included, without a wait."""
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return bool(poll.poll(0))

    def wait(self) -> None:
        """Wait until there is news; an interrupt here loses none of it. Not for TLS."""
        while not self.has_news():
            self._wait(select.POLLIN)

    def shutdown(self) -> None:
        """End both directions, so that whoever waits here, or on the other side, finds an end."""
        with self._lock:
            self._is_shut = True
            if not self._is_closed:
                # Not TLS's own, which would leave the waiting thread without its state.
                with contextlib.suppress(OSError):
                    socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket. Idempotent."""
        with self._lock:
            self._is_closed = True
            self._sock.close()

    def _replace(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        with self._lock:
            self._sock, before = sock, self._sock
            before.close()  # TLS has taken its fd over
            if self._is_shut:
                raise PeerLostError("the connector was closed")

    def _wait(self, events: int) -> None:
        interrupt = self.interrupt
        poll = select.poll()
        poll.register(self._sock, events)
        if interrupt is not None:
            poll.register(interrupt, select.POLLIN)
        ready = poll.poll(None if self.timeout is None else self.timeout * 1000)
        self.check()
        if not ready:
            raise PeerLostError(f"the other node was silent for {self.timeout} s")


def _events_of(wanted: OSError, *, otherwise: int = select.POLLIN) -> int:
    if isinstance(wanted, ssl.SSLWantReadError):
        return select.POLLIN
    if isinstance(wanted, ssl.SSLWantWriteError):
        return select.POLLOUT
    return otherwise
