"""A client on a plain socket, which can be left in any state and in every way."""

import contextlib
import io
import socket
import ssl
from types import TracebackType
from typing import Self

from disconnect_watch.testing.http import Answer, read_answer
from disconnect_watch.testing.target import Server, target_of
from disconnect_watch.testing.ways import Way, part, parting_bytes, why_not

__all__ = ["LeavingClient"]

_RECV_BYTES = 1 << 16
#: Reads that empty the receive queue before a leave; a server that sends without end would
#: otherwise keep the client.
_MAX_READS = 64


class LeavingClient:
    """Connects, sends, reads, and leaves. Blocking.

    Args:
        server: see ``target_of``.
        timeout: seconds that each call may wait for the server.
        context: for https; without one the server's certificate is not looked at.

    Attributes:
        sock: the socket, under TLS an ``ssl.SSLSocket``.
        num_received: bytes of the answer that came so far.
        is_ended: whether the server closed or reset the connection.

    Raises:
        OSError: nobody listens there.

    Threads: one at a time.
    """

    def __init__(
        self, server: Server, *, timeout: float = 10.0, context: ssl.SSLContext | None = None
    ) -> None:
        self.target = target_of(server)
        self.num_received = 0
        self.is_ended = False
        self._unread = b""
        self._method = "GET"
        self._timeout = timeout
        self.sock = socket.socket(self.target.family)
        try:
            self.sock.settimeout(timeout)
            self.sock.connect(self.target.address)
            if self.target.is_tls:
                self.sock = (context or _trusting_context()).wrap_socket(
                    self.sock, server_hostname=self.target.host
                )
        except BaseException:
            self.sock.close()
            raise

    def send(self, request: bytes) -> None:
        """Send bytes; any number of requests may go before an answer is read."""
        self._method = request.partition(b" ")[0].decode("latin-1") or self._method
        self.sock.sendall(request)

    def read(self, num_bytes: int) -> bytes:
        """Read ``num_bytes`` of the answer.

        Raises:
            EOFError: the server closed before; with what had come.
            TimeoutError: they did not come.
        """
        while len(self._unread) < num_bytes:
            self._receive()
        found, self._unread = self._unread[:num_bytes], self._unread[num_bytes:]
        return found

    def read_until(self, mark: bytes) -> bytes:
        """Read up to and with ``mark``; raises as ``read`` does."""
        while mark not in self._unread:
            self._receive()
        found, _, self._unread = self._unread.partition(mark)
        return found + mark

    def answer(self) -> Answer:
        """Read one whole HTTP answer to what was sent last; raises as ``read_answer`` does."""
        return read_answer(self, method=self._method)

    def leave(self, way: Way, *, request: bytes = b"") -> None:
        """Leave, or half-leave.

        What of the answer has come by now is read first, since a close with bytes unread is a
        reset. A server that sends just then may make one of it all the same.

        Args:
            way: how.
            request: for BEHIND_REQUEST, what is pipelined.

        Raises:
            ValueError: a client of this connection cannot leave so.
            OSError: the server closed before, or does not take the parting bytes.
        """
        problem = why_not(way, family=self.target.family, is_tls=self.target.is_tls)
        if problem is not None:
            raise ValueError(f"cannot leave {self.target.text} by {way}: {problem}")
        if not (way is Way.RST and self.target.family == socket.AF_UNIX):
            self._read_what_came()
        if parting := parting_bytes(way, request):
            # All of it fits the client's own buffer, whatever the server takes.
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * len(parting))
            self.sock.sendall(parting)
        part(self.sock, way)

    def close(self) -> None:
        """Close, as by FIN. Idempotent."""
        self.sock.close()

    def makefile(self, mode: str = "rb") -> io.BufferedReader:
        """What is left to read, for ``http.client``; the connection stays open after it."""
        return io.BufferedReader(_Reader(self))

    def _receive(self) -> None:
        try:
            data = self.sock.recv(_RECV_BYTES)
        except ConnectionError:
            self.is_ended = True
            raise
        if not data:
            self.is_ended = True
            raise EOFError(self._unread)
        self.num_received += len(data)
        self._unread += data

    def _read_what_came(self) -> None:
        """Empty the receive queue without waiting, TLS session tickets too."""
        self.sock.setblocking(False)
        try:
            with contextlib.suppress(
                BlockingIOError, ssl.SSLWantReadError, ConnectionError, EOFError
            ):
                for _ in range(_MAX_READS):
                    self._receive()
        finally:
            self.sock.settimeout(self._timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class _Reader(io.RawIOBase):
    """The client's unread bytes, then those that come."""

    def __init__(self, client: LeavingClient) -> None:
        self._client = client

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "memoryview[int]") -> int:  # type: ignore[override]
        client = self._client
        if not client._unread:
            try:
                client._receive()
            except EOFError:
                return 0
        data = client.read(min(len(buffer), len(client._unread)))
        buffer[: len(data)] = data
        return len(data)


def _trusting_context() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
