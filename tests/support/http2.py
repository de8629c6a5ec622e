"""An HTTP/2 client whose streams and connection can be left one by one."""

import socket
from typing import Self

import h2.config
import h2.connection
import h2.errors
import h2.events

__all__ = ["Http2Client"]


class Http2Client:
    """Speaks HTTP/2 at once, without TLS ("prior knowledge")."""

    def __init__(self, port: int) -> None:
        self.sock = socket.create_connection(("127.0.0.1", port), timeout=40)
        self._http = h2.connection.H2Connection()
        self._http.initiate_connection()
        self._flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def post(self, path: str) -> int:
        """Send one request without a body; returns the stream."""
        stream = self._http.get_next_available_stream_id()
        headers = [
            (":method", "POST"),
            (":path", path),
            (":scheme", "http"),
            (":authority", "test"),
        ]
        self._http.send_headers(stream, headers, end_stream=True)
        self._flush()
        return stream

    def reset(self, stream: int) -> None:
        """Leave one request, as a browser does that is told to stop."""
        self._http.reset_stream(stream, h2.errors.ErrorCodes.CANCEL)
        self._flush()

    def read_body(self, stream: int) -> bytes:
        """Read the whole answer to a request, and drop what belongs to others."""
        body = b""
        while True:
            for event in self._http.receive_data(self.sock.recv(65536)):
                if getattr(event, "stream_id", None) != stream:
                    continue
                if isinstance(event, h2.events.DataReceived):
                    body += event.data
                elif isinstance(event, h2.events.StreamEnded):
                    return body
            self._flush()

    def _flush(self) -> None:
        self.sock.sendall(self._http.data_to_send())
