"""A reverse proxy before any HTTP server: whoever leaves here has left there, too.

Nothing is kept back: a piece of a body goes on as it comes, both ways, and no further piece is
taken before it has gone. What is of one hop alone stays on its hop.

Source: RFC 9110 7.6, "Message Forwarding".
"""

import logging
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any, Self
from urllib.parse import urlsplit

import aiohttp
from yarl import URL

from disconnect_watch.adapters.asgi import CancelOnDisconnect
from disconnect_watch.server.access import (
    RECORD_KEY,
    AccessLog,
    App,
    Message,
    Receive,
    RequestRecord,
    Scope,
    Send,
)
from disconnect_watch.server.answers import error_response

__all__ = ["ReverseProxy", "failure", "passed"]

_logger = logging.getLogger("disconnect_watch.gateway")

#: Of one hop; and what `Connection` names.
_OF_ONE_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
#: Answered by our own server: the body is asked for before it is passed on.
_OWN = frozenset({b"expect", b"host", b"x-request-id"})

Headers = list[tuple[bytes, bytes]]


class _Left(Exception):
    """The client left while it sent its request."""


class ReverseProxy:
    """An ASGI application that asks one server; use it as an asynchronous context manager.

    To be run inside ``CancelOnDisconnect``: a request whose task is cancelled closes its
    connection to the server, at whatever point it is.

    Args:
        url: ``http://host:port``, with a path that goes before each request's.
        keep_alive: seconds for which a connection is kept for later requests: fewer than the
            server keeps it, which ends it otherwise just as a request goes out.
        connect_within: seconds in which the server must take a connection.

    Raises:
        ValueError: it is no such URL.
    """

    def __init__(self, url: str, *, keep_alive: float = 4.0, connect_within: float = 5.0) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
            raise ValueError(f"cannot take {url!r} for a server: give http://HOST:PORT")
        self.url = url.rstrip("/")
        self._keep_alive = keep_alive
        self._connect_within = connect_within
        self._session: aiohttp.ClientSession

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=self._keep_alive),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._connect_within),
            # What a client did not say is not said for it.
            skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[App]:
        """The proxy as ``serve`` takes it: logged, and each request ended with its client."""
        async with self:
            yield CancelOnDisconnect(AccessLog(self))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on, and its answer back."""
        assert scope["type"] == "http"
        record: RequestRecord = scope["state"][RECORD_KEY]
        has_begun = False

        async def begin(response: aiohttp.ClientResponse) -> None:
            nonlocal has_begun
            has_begun = True
            await send(
                {
                    "type": "http.response.start",
                    "status": response.status,
                    "headers": passed(response.raw_headers),
                }
            )

        try:
            async with await self._ask(scope, receive, record) as response:
                await begin(response)
                async for data in response.content.iter_any():
                    await send({"type": "http.response.body", "body": data, "more_body": True})
        except _Left:
            return
        except (aiohttp.ClientError, TimeoutError) as error:
            if record.has_left:
                return
            if has_begun:
                # Nothing that was cut short may look complete: no last chunk.
                _logger.warning("%s ended an answer half-way: %s", self.url, error)
                return
            await failure(scope, error, self.url)(scope, receive, send)
            return
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _ask(
        self, scope: Scope, receive: Receive, record: RequestRecord
    ) -> aiohttp.ClientResponse:
        headers = passed(scope["headers"])
        names = {name for name, _ in headers}
        given = dict(scope["headers"])
        headers.append((b"x-request-id", given.get(b"x-request-id") or record.request_id.encode()))
        if scope.get("client"):
            before = given.get(b"x-forwarded-for")
            client = scope["client"][0].encode()
            headers = [each for each in headers if each[0] != b"x-forwarded-for"]
            headers.append((b"x-forwarded-for", b"%b, %b" % (before, client) if before else client))
        if b"x-forwarded-proto" not in names:
            headers.append((b"x-forwarded-proto", scope["scheme"].encode()))
        if b"x-forwarded-host" not in names and b"host" in given:
            headers.append((b"x-forwarded-host", given[b"host"]))
        query = scope["query_string"].decode("latin-1")
        path = scope["path"] + (f"?{query}" if query else "")
        return await self._session.request(
            scope["method"],
            URL(self.url + path, encoded=True),
            headers=[(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers],
            data=await _body(receive),
            allow_redirects=False,
        )


async def _body(receive: Receive) -> bytes | AsyncIterator[bytes] | None:
    """What the client sends: all of it where it is there already, else piece by piece."""
    first = await receive()
    if first["type"] == "http.disconnect":
        raise _Left
    body: bytes = first.get("body", b"")
    if not first.get("more_body"):
        return body or None
    return _pieces(body, receive)


async def _pieces(first: bytes, receive: Receive) -> AsyncIterator[bytes]:
    if first:
        yield first
    while True:
        message: Message = await receive()
        if message["type"] == "http.disconnect":
            raise _Left
        if body := message.get("body"):
            yield body
        if not message.get("more_body"):
            return


def passed(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """The headers that go on to the next hop, names in lower case."""
    lowered = [(name.lower(), value) for name, value in headers]
    named = {
        name.strip().lower()
        for key, value in lowered
        if key == b"connection"
        for name in value.split(b",")
    }
    left_out = _OF_ONE_HOP | _OWN | named
    return [(name, value) for name, value in lowered if name not in left_out]


def failure(scope: Scope, error: Exception, url: str) -> Any:
    """The answer where a server could not be asked."""
    if isinstance(error, TimeoutError):
        status, what = 504, f"{url} did not take a connection in time"
    elif isinstance(error, aiohttp.ClientConnectorError):
        status, what = 502, f"cannot reach {url}: {error.os_error.strerror or error}"
    else:
        status, what = (
            502,
            (
                f"the connection to {url} was lost before an answer ({error}), and the request may "
                "have been worked on: it was not sent again"
            ),
        )
    return error_response(scope["path"], status, what)
