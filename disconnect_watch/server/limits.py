"""Reading a request body no further than the limit."""

from starlette.requests import Request

from disconnect_watch.server.errors import CancelledByPeer, ProtocolError

__all__ = ["read_body"]


async def read_body(request: Request, max_body_bytes: int) -> bytes:
    """Take the whole body of a request.

    A body that announces its size is refused before a byte of it is kept; one that
    comes in chunks, as soon as it has grown past the limit. What the client still sends
    of it is dropped by uvicorn: closing the connection instead would reset it, and the
    reset often takes the answer with it.

    Raises:
        ProtocolError: larger than the limit, or encoded.
        CancelledByPeer: the client left before the body was complete.
    """
    # RFC 9110 8.4.1: names of codings are case-insensitive.
    if request.headers.get("content-encoding", "").lower() not in ("identity", ""):
        raise ProtocolError("Unsupported content-encoding, only 'identity' is supported.")
    announced = int(request.headers.get("content-length", 0))
    if announced > max_body_bytes:
        raise _too_large(f"{announced} bytes", max_body_bytes)
    body = bytearray()
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise CancelledByPeer("the client left while it sent its request")
        body += message.get("body", b"")
        if len(body) > max_body_bytes:
            raise _too_large(f"more than {max_body_bytes} bytes", max_body_bytes)
        if not message.get("more_body", False):
            return bytes(body)


def _too_large(size: str, limit: int) -> ProtocolError:
    return ProtocolError(
        f"request JSON size of {size} exceeds the maximum allowed input size of {limit} bytes. "
        "Use --max-body-bytes to increase the limit."
    )
