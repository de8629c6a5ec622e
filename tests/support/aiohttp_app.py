"""The handlers of ``frameworks`` under aiohttp."""

import contextlib
import socket
import ssl
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import web

from disconnect_watch.adapters.aiohttp import cancel_on_disconnect, client_token, middleware
from disconnect_watch.token import CancelToken
from tests.support.frameworks import Answer


class AiohttpExchange:
    def __init__(self, request: web.Request, *, is_watched: bool) -> None:
        self.request = request
        self.path = request.path
        self.token = client_token(request) if is_watched else CancelToken()
        self.response = web.StreamResponse()

    async def read(self) -> bytes:
        return await self.request.read()

    async def begin(self, *, length: int | None = None) -> None:
        self.response.content_length = length
        await self.response.prepare(self.request)

    async def write(self, data: bytes) -> None:
        await self.response.write(data)

    async def end(self) -> None:
        await self.response.write_eof()


@contextlib.asynccontextmanager
async def aiohttp_app(
    answer: Answer,
    sock: socket.socket,
    tls: ssl.SSLContext | None,
    *,
    by_route: bool = False,
    is_watched: bool = True,
    **options: Any,
) -> AsyncIterator[None]:
    """Watched as a whole, or route by route; or cancelled by aiohttp itself."""

    async def handle(request: web.Request) -> web.StreamResponse:
        exchange = AiohttpExchange(request, is_watched=is_watched)
        body = await answer(exchange)
        return exchange.response if body is None else web.Response(body=body)

    is_whole = is_watched and not by_route
    app = web.Application(middlewares=[middleware(**options)] if is_whole else [])
    handler = cancel_on_disconnect(**options)(handle) if by_route else handle
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, shutdown_timeout=1, handler_cancellation=not is_watched)
    await runner.setup()
    try:
        await web.SockSite(runner, sock, ssl_context=tls).start()
        yield
    finally:
        await runner.cleanup()
