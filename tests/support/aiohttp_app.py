"""The handlers of ``frameworks`` under aiohttp."""

import contextlib
import socket
import ssl
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import web

from disconnect_watch.adapters.aiohttp import cancel_on_disconnect, client_token, middleware
from tests.support.frameworks import Record, behave


class AiohttpExchange:
    def __init__(self, request: web.Request) -> None:
        self.request = request
        self.path = request.path
        self.token = client_token(request)
        self.response = web.StreamResponse()

    async def read(self) -> bytes:
        return await self.request.read()

    async def begin(self) -> None:
        await self.response.prepare(self.request)

    async def write(self, data: bytes) -> None:
        await self.response.write(data)

    async def end(self) -> None:
        await self.response.write_eof()


@contextlib.asynccontextmanager
async def aiohttp_app(
    record: Record,
    sock: socket.socket,
    tls: ssl.SSLContext | None,
    *,
    by_route: bool = False,
    **options: Any,
) -> AsyncIterator[None]:
    """Watched as a whole, or route by route."""

    async def handle(request: web.Request) -> web.StreamResponse:
        exchange = AiohttpExchange(request)
        body = await behave(exchange, record)
        return exchange.response if body is None else web.Response(body=body)

    app = web.Application(middlewares=[] if by_route else [middleware(**options)])
    handler = cancel_on_disconnect(**options)(handle) if by_route else handle
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, shutdown_timeout=1)
    await runner.setup()
    try:
        await web.SockSite(runner, sock, ssl_context=tls).start()
        yield
    finally:
        await runner.cleanup()
