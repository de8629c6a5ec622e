"""gzip and deflate, both ways, no further than a body may be large.

Source: RFC 9110 8.4 and 12.5.3; RFC 1950 is what it calls deflate.
"""

import zlib

from disconnect_watch.backends.infer import Buffer
from disconnect_watch.errors import cut
from disconnect_watch.server.errors import ProtocolError, UnsupportedError

__all__ = ["UnsupportedCodingError", "accepted_coding", "compress", "decompress"]

#: What zlib calls the two formats.
_WINDOW_BITS = {"gzip": 31, "deflate": 15}


class UnsupportedCodingError(UnsupportedError):
    """A ``Content-Encoding`` that is none of ours; the answer names those."""


def decompress(coding: str, body: Buffer, max_bytes: int) -> Buffer:
    """The body as it was before its ``Content-Encoding``.

    Raises:
        ProtocolError: it is not so encoded, or grows past ``max_bytes``.
        UnsupportedCodingError: in Triton's words.
    """
    if coding in ("", "identity"):
        return body
    if coding not in _WINDOW_BITS:
        raise UnsupportedCodingError("Unsupported compression type")
    inflater = zlib.decompressobj(_WINDOW_BITS[coding])
    try:
        plain = inflater.decompress(body, max_bytes + 1)
    except zlib.error as error:
        raise ProtocolError(f"cannot decompress the request as {coding}: {error}") from None
    if len(plain) > max_bytes:
        raise ProtocolError(
            f"the request is more than {max_bytes} bytes when it is decompressed. "
            "Use --http-max-input-size to increase the limit."
        )
    if not inflater.eof or inflater.unused_data:
        raise ProtocolError(
            f"cannot decompress the request as {coding}: its {len(body)} bytes are "
            + ("not all of it" if not inflater.eof else f"{len(inflater.unused_data)} too many")
        )
    return plain


def accepted_coding(accepts: str) -> str:
    """The coding of ours that an ``Accept-Encoding`` ranks highest, or identity.

    Among equals the one that is named first. A ``*`` asks for none of them.
    """
    best, best_weight = "identity", 0.0
    for part in accepts.split(","):
        name, _, rest = part.strip().partition(";")
        weight = _weight(rest.strip())
        if name.strip().lower() in (*_WINDOW_BITS, "identity") and weight > best_weight:
            best, best_weight = name.strip().lower(), weight
    return best


def compress(coding: str, pieces: list[Buffer]) -> bytes:
    """The pieces as one body in this coding."""
    deflater = zlib.compressobj(wbits=_WINDOW_BITS[coding])
    return b"".join([*map(deflater.compress, pieces), deflater.flush()])


def _weight(text: str) -> float:
    if not text.lower().startswith("q="):
        return 1.0
    try:
        return float(text[2:])
    except ValueError:
        raise ProtocolError(
            f"cannot read the weight {cut(text)!r} in Accept-Encoding, give it as q=0.5"
        ) from None
