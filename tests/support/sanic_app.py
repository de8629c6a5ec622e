"""The handlers of ``frameworks`` under Sanic."""

import contextlib
import itertools
import socket
import ssl
from collections.abc import AsyncIterator
from typing import Any

from sanic import HTTPResponse, Request, Sanic, raw

from disconnect_watch.adapters.sanic import cancel_on_disconnect, client_token, setup
from disconnect_watch.token import CancelToken
from tests.support.frameworks import Answer

_numbers = itertools.count()


class SanicExchange:
    def __init__(self, request: Request, *, is_watched: bool) -> None:
        self.request = request
        self.path = request.path
        self.token = client_token(request) if is_watched else CancelToken()
        self.response: HTTPResponse | None = None

    async def read(self) -> bytes:
        return self.request.body

    async def begin(self, *, length: int | None = None) -> None:
        headers = {} if length is None else {"Content-Length": str(length)}
        self.response = await self.request.respond(headers=headers)

    async def write(self, data: bytes) -> None:
        assert self.response is not None
        await self.response.send(data)

    async def end(self) -> None:
        assert self.response is not None
        await self.response.eof()  # type: ignore[no-untyped-call]


@contextlib.asynccontextmanager
async def sanic_app(
    answer: Answer,
    sock: socket.socket,
    tls: ssl.SSLContext | None,
    *,
    by_route: bool = False,
    is_watched: bool = True,
    **options: Any,
) -> AsyncIterator[None]:
    """Watched as a whole, or route by route; or cancelled by Sanic itself."""

    async def handle(request: Request, path: str) -> HTTPResponse | None:
        body = await answer(SanicExchange(request, is_watched=is_watched))
        return None if body is None else raw(body)

    app = Sanic(f"test-{next(_numbers)}", configure_logging=False)
    app.config.TOUCHUP = False  # it rewrites Sanic's own methods, once a process
    if is_watched and not by_route:
        setup(app, **options)
    handler = cancel_on_disconnect(**options)(handle) if by_route else handle
    app.add_route(handler, "/<path:path>", methods=["GET", "POST"])
    async with sanic_server(app, sock, tls):
        yield


@contextlib.asynccontextmanager
async def sanic_server(
    app: Sanic[Any, Any], sock: socket.socket, tls: ssl.SSLContext | None = None
) -> AsyncIterator[None]:
    """Sanic's own server on this loop."""
    try:
        server: Any = await app.create_server(
            sock=sock, ssl=tls, return_asyncio_server=True, access_log=True
        )
        await server.startup()
        await server.before_start()
        await server.after_start()
        try:
            yield
        finally:
            await server.before_stop()
            await server.close()
            for connection in tuple(server.connections):
                connection.abort()
            await server.after_stop()
    finally:
        Sanic.unregister_app(app)
