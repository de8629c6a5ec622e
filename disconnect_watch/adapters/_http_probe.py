"""What may be written to a half-closed HTTP/1.1 client to find out whether it reads.

A client that closed answers any byte with a reset; one that only shut its sending side
takes it, and must find no harm in it:

    before the response head   an interim response, 100 Continue
    inside an event stream     a comment line, at the end of a line
    anywhere else              nothing: each byte would be part of the answer

100, not 102 or 103: some clients take those for the final answer. Never to HTTP/1.0,
which knows neither interim responses nor chunks.

Source: RFC 9110, 15.2; HTML, "9.2.5 Parsing an event stream".
"""

from collections.abc import Mapping, MutableMapping
from typing import Any

__all__ = ["HttpProbe"]

_INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"
_COMMENT = b"2\r\n:\n\r\n"  # a chunk of its own


class HttpProbe:
    """How far the response to one HTTP/1.1 request is, and what may be written now.

    Args:
        method: of the request.
    """

    __slots__ = ("_has_head", "_is_event_stream", "_is_line_ended", "_method")

    def __init__(self, method: str) -> None:
        self._method = method
        self._has_head = False
        self._is_event_stream = False
        self._is_line_ended = True

    def sent(self, message: MutableMapping[str, Any]) -> None:
        """An ASGI message of the response was written."""
        if message["type"] == "http.response.start":
            self._has_head = True
            headers = {name.lower(): value for name, value in message.get("headers", ())}
            media_type = headers.get(b"content-type", b"").partition(b";")[0]
            self._is_event_stream = (
                media_type.strip().lower() == b"text/event-stream"
                and b"content-encoding" not in headers
                and self._is_chunked(message["status"], headers)
            )
        elif message.get("body"):
            self._is_line_ended = message["body"].endswith(b"\n")

    def bytes_now(self) -> bytes:
        """The bytes to write; none where each would be part of the answer."""
        if not self._has_head:
            return _INTERIM
        return _COMMENT if self._is_event_stream and self._is_line_ended else b""

    def _is_chunked(self, status: int, headers: Mapping[bytes, bytes]) -> bool:
        """Whether the body goes out in chunks, as servers send one whose length is not given."""
        return (
            b"content-length" not in headers
            and headers.get(b"transfer-encoding", b"chunked").lower() == b"chunked"
            and self._method != "HEAD"
            and status not in (204, 304)
        )
