"""A body is read to its limit and no further."""

from typing import Any

import pytest
from starlette.requests import Request

from disconnect_watch.server.errors import CancelledByPeer, ProtocolError
from disconnect_watch.server.limits import read_body


def request_of(
    *messages: dict[str, Any], announced: int | None = None, encoding: bytes | None = None
) -> Request:
    left = list(messages)

    async def receive() -> dict[str, Any]:
        return left.pop(0)

    headers = [] if announced is None else [(b"content-length", b"%d" % announced)]
    if encoding is not None:
        headers.append((b"content-encoding", encoding))
    return Request({"type": "http", "headers": headers}, receive)


def chunk(body: bytes, *, more: bool = True) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}


@pytest.mark.asyncio
async def test_a_body_at_the_limit_is_whole() -> None:
    request = request_of(chunk(b"abc"), chunk(b"de"), chunk(b"", more=False))
    assert await read_body(request, 5) == b"abcde"


@pytest.mark.asyncio
async def test_an_announced_size_is_refused_without_reading() -> None:
    with pytest.raises(ProtocolError, match=r"size of 6 bytes exceeds .* 5 bytes"):
        await read_body(request_of(announced=6), 5)


@pytest.mark.asyncio
async def test_chunks_are_refused_as_soon_as_they_are_too_many() -> None:
    """Were a third chunk asked for, there would be none."""
    with pytest.raises(ProtocolError, match="more than 5 bytes"):
        await read_body(request_of(chunk(b"abc"), chunk(b"def")), 5)


@pytest.mark.asyncio
async def test_a_client_that_leaves_in_mid_body_has_asked_for_nothing() -> None:
    with pytest.raises(CancelledByPeer):
        await read_body(request_of(chunk(b"abc"), {"type": "http.disconnect"}), 5)


@pytest.mark.asyncio
async def test_identity_is_no_encoding_however_it_is_written() -> None:
    for encoding in (b"identity", b"IDENTITY", b""):
        request = request_of(chunk(b"abc", more=False), encoding=encoding)
        assert await read_body(request, 5) == b"abc"
    with pytest.raises(ProtocolError, match="Unsupported content-encoding"):
        await read_body(request_of(encoding=b"gzip"), 5)
