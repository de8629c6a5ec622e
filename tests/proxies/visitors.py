"""Clients that speak HTTP/1.1 or HTTP/2 on a plain socket, to leave it in any way."""

import contextlib
import socket
import ssl
from typing import Protocol

import h2.config
import h2.connection
import h2.events
import h2.exceptions

from tests.support.net import reset
from tests.support.serve import Client
from tests.support.tls import PEM

__all__ = ["H1", "H2", "HALF_BODY", "Visitor", "path_behind"]

HALF_BODY = bytes(1000)


def path_behind(path: str) -> str:
    """The path of the request that is pipelined behind the one for ``path``."""
    return f"/wait/behind{path}"


class Visitor(Protocol):
    """One request by one client."""

    def ask(self, path: str) -> None: ...

    def begin_upload(self, path: str) -> None:
        """Ask with a body, and send half of it."""

    def read_some(self) -> None:
        """Wait for the first bytes of the answer's body."""

    def leave(self, way: str) -> None: ...

    def read_whole(self, last: bytes) -> None:
        """Read on until ``last``.

        Raises:
            EOFError: the connection or the stream ended before.
        """

    def close(self) -> None: ...


class H1:
    """A client of HTTP/1.1, without TLS."""

    def __init__(self, port: int) -> None:
        self._client = Client(port)
        self._path = ""

    def ask(self, path: str) -> None:
        self._path = path
        self._client.sock.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())

    def begin_upload(self, path: str) -> None:
        self._path = path
        size = 2 * len(HALF_BODY)
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {size}\r\n\r\n"
        self._client.sock.sendall(head.encode() + HALF_BODY)

    def read_some(self) -> None:
        self._client.read_until(b"\r\n\r\n")
        self._client.read_until(b",")

    def leave(self, way: str) -> None:
        sock = self._client.sock
        if way == "rst":
            reset(sock)
            return
        if way == "pipelined":
            self.ask(path_behind(self._path))
        # First the FIN: the close resets where something lies unread.
        sock.shutdown(socket.SHUT_WR)
        if way != "half_close":
            sock.close()

    def read_whole(self, last: bytes) -> None:
        self._client.read_until(last)

    def close(self) -> None:
        self._client.sock.close()


class H2:
    """One stream of a client of HTTP/2 over TLS; ``beside`` is the stream's elder."""

    def __init__(self, port: int, *, beside: "H2 | None" = None) -> None:
        self._line: _Line = _Line(port) if beside is None else beside._line
        self._body = b""
        self._stream_id = 0

    def ask(self, path: str) -> None:
        self._stream_id = self._line.ask(path)

    def begin_upload(self, path: str) -> None:
        self._stream_id = self._line.ask(path, body=HALF_BODY)

    def read_some(self) -> None:
        while not self._body:
            self._read()

    def leave(self, way: str) -> None:
        if way == "rst_stream":
            self._line.reset_stream(self._stream_id)
        elif way == "rst":
            reset(self._line.sock)
        else:
            # The FIN of TCP, with no close_notify before it: first, as a close may reset.
            socket.socket.shutdown(self._line.sock, socket.SHUT_WR)
            self._line.sock.close()

    def read_whole(self, last: bytes) -> None:
        while last not in self._body:
            self._read()

    def close(self) -> None:
        self._line.sock.close()

    def _read(self) -> None:
        self._body += self._line.read(self._stream_id)


class _Line:
    """The connection, and what came for each of its streams."""

    def __init__(self, port: int) -> None:
        context = ssl.create_default_context(cafile=str(PEM))
        context.set_alpn_protocols(["h2"])
        plain = socket.create_connection(("127.0.0.1", port), timeout=40)
        self.sock = context.wrap_socket(plain, server_hostname="localhost")
        self._state = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
        self._state.initiate_connection()
        self._bodies: dict[int, bytes] = {}
        self._authority = f"localhost:{port}"
        self._flush()

    def ask(self, path: str, *, body: bytes = b"") -> int:
        """Begin a stream; it stays open for the rest of a ``body``."""
        stream_id = self._state.get_next_available_stream_id()
        head = {
            ":method": "POST" if body else "GET",
            ":scheme": "https",
            ":authority": self._authority,
            ":path": path,
        }
        self._state.send_headers(stream_id, list(head.items()), end_stream=not body)
        if body:
            self._state.send_data(stream_id, body)
        self._bodies[stream_id] = b""
        self._flush()
        return stream_id

    def reset_stream(self, stream_id: int) -> None:
        self._state.reset_stream(stream_id, error_code=8)  # CANCEL
        self._flush()

    def read(self, stream_id: int) -> bytes:
        """What came for a stream; at least one more record is read where that is nothing."""
        if not self._bodies[stream_id]:
            data = self.sock.recv(65536)
            if not data:
                raise EOFError(f"the connection ended before stream {stream_id}")
            for event in self._state.receive_data(data):
                self._take(event)
            self._flush()
        found, self._bodies[stream_id] = self._bodies[stream_id], b""
        return found

    def _take(self, event: h2.events.Event) -> None:
        if isinstance(event, h2.events.DataReceived):
            assert event.stream_id is not None
            self._bodies[event.stream_id] += event.data or b""
            with contextlib.suppress(h2.exceptions.StreamClosedError):
                self._state.acknowledge_received_data(
                    event.flow_controlled_length or 0, event.stream_id
                )
        elif isinstance(event, h2.events.StreamReset):
            raise EOFError(f"stream {event.stream_id} was reset: {event.error_code}")

    def _flush(self) -> None:
        self.sock.sendall(self._state.data_to_send())
