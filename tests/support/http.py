"""An HTTP/1.1 client on a plain socket, for servers under test."""

import json
import socket
import ssl
from typing import Any, Self


class Client:
    """A client on a plain socket, or under TLS, which can be left in any state."""

    def __init__(
        self, port: int, host: str = "127.0.0.1", *, tls: ssl.SSLContext | None = None
    ) -> None:
        self.sock = socket.create_connection((host, port), timeout=40)
        if tls is not None:
            self.sock = tls.wrap_socket(self.sock, server_hostname="localhost")
        self._unread = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def post(self, path: str, body: dict[str, Any] | bytes = b"", **headers: str) -> None:
        """Send one request; any number may be sent before an answer is read."""
        self.sock.sendall(request_bytes(path, body, **headers))

    def read_until(self, mark: bytes) -> bytes:
        """Read up to and with ``mark``.

        Raises:
            EOFError: the server closed first; with all that had come.
        """
        while mark not in self._unread:
            data = self.sock.recv(65536)
            if not data:
                raise EOFError(self._unread)
            self._unread += data
        found, _, self._unread = self._unread.partition(mark)
        return found + mark

    def read_rest(self) -> bytes:
        """Read until the server closes."""
        rest, self._unread = self._unread, b""
        while data := self.sock.recv(65536):
            rest += data
        return rest

    def read_response(self) -> tuple[int, dict[str, str], bytes]:
        """Read one whole response: status, headers with lower-case names, body."""
        head = self.read_until(b"\r\n\r\n").decode("latin-1")
        status_line, *lines = head.strip().split("\r\n")
        headers = {
            name.lower(): value.strip()
            for name, _, value in (line.partition(":") for line in lines)
        }
        body = b""
        if headers.get("transfer-encoding") == "chunked":
            while size := int(self.read_until(b"\r\n"), 16):
                body += self._read_exactly(size)
                self.read_until(b"\r\n")
            self.read_until(b"\r\n")
        else:
            body = self._read_exactly(int(headers.get("content-length", 0)))
        return int(status_line.split()[1]), headers, body

    def _read_exactly(self, size: int) -> bytes:
        while len(self._unread) < size:
            data = self.sock.recv(65536)
            if not data:
                raise EOFError(self._unread)
            self._unread += data
        found, self._unread = self._unread[:size], self._unread[size:]
        return found


def request_bytes(path: str, body: dict[str, Any] | bytes = b"", **headers: str) -> bytes:
    """One HTTP/1.1 POST."""
    content = json.dumps(body).encode() if isinstance(body, dict) else body
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: test",
        f"Content-Length: {len(content)}",
        *(f"{name.replace('_', '-')}: {value}" for name, value in headers.items()),
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + content
