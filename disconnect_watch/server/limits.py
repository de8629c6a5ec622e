"""Reading a request body no further than the limit."""

import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.requests import Request

from disconnect_watch.server.access import RECORD_KEY, RequestRecord
from disconnect_watch.server.errors import CancelledByPeer, ProtocolError
from disconnect_watch.server.upload import LARGE, Room

__all__ = ["read_all", "read_body", "too_large"]


async def read_body(request: Request, max_body_bytes: int) -> bytes:
    """Take the whole body of a request.

    Raises:
        ProtocolError: larger than the limit, or encoded.
        CancelledByPeer: the client left before the body was complete.
    """
    # RFC 9110 8.4.1: names of codings are case-insensitive.
    if request.headers.get("content-encoding", "").lower() not in ("identity", ""):
        raise ProtocolError("Unsupported content-encoding, only 'identity' is supported.")
    announced = int(request.headers.get("content-length", 0))
    record: RequestRecord | None = request.scope.get("state", {}).get(RECORD_KEY)
    return bytes(await read_all(request.receive, announced, max_body_bytes, record=record))


async def read_all(
    receive: Callable[[], Awaitable[MutableMapping[str, Any]]],
    announced: int,
    max_body_bytes: int,
    *,
    record: RequestRecord | None = None,
    upload: Callable[[int, Room | None], memoryview | None] | None = None,
    room: Room | None = None,
) -> bytes | bytearray | memoryview:
    """Take the whole body by ``receive``, and copy it no oftener than it comes in pieces.

    A body that announces its size is refused before a byte of it is kept; one that
    comes in chunks, as soon as it has grown past the limit. What the client still sends
    of it is dropped by uvicorn: closing the connection instead would reset it, and the
    reset often takes the answer with it.

    Args:
        announced: by ``Content-Length``; 0 where the request has none.
        record: learns when the body was whole.
        upload: see ``UPLOAD_KEY``.
        room: where it is best put, if it is large.

    Raises:
        ProtocolError: larger than the limit.
        CancelledByPeer: the client left before the body was complete.
    """
    if announced > max_body_bytes:
        raise too_large(f"{announced} bytes", max_body_bytes)
    place = upload(announced, room) if upload is not None and announced >= LARGE else None
    body: bytes | bytearray | memoryview = b""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise CancelledByPeer("the client left while it sent its request")
        piece = message.get("body", b"")
        if place is not None:
            body = place
        elif not body:
            body = piece
        elif isinstance(body, bytearray):
            body += piece
        else:
            body = bytearray(body) + piece
        if len(body) > max_body_bytes:
            raise too_large(f"more than {max_body_bytes} bytes", max_body_bytes)
        if not message.get("more_body", False):
            if record is not None:
                record.received_ns = time.monotonic_ns()
            return body


def too_large(size: str, limit: int) -> ProtocolError:
    """What a body of that size is answered."""
    return ProtocolError(
        f"request JSON size of {size} exceeds the maximum allowed input size of {limit} bytes. "
        "Use --max-body-bytes to increase the limit."
    )
