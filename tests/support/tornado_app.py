"""The handlers of ``frameworks`` under Tornado."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator
from typing import Any

from tornado.httpserver import HTTPServer
from tornado.web import Application, RequestHandler

from disconnect_watch.adapters.tornado import cancel_on_disconnect, client_token, setup
from disconnect_watch.token import CancelToken
from tests.support.frameworks import Answer


class TornadoExchange:
    def __init__(self, handler: RequestHandler, *, is_watched: bool) -> None:
        self.handler = handler
        self.path = handler.request.path
        self.token = client_token(handler) if is_watched else CancelToken()

    async def read(self) -> bytes:
        return self.handler.request.body

    async def begin(self, *, length: int | None = None) -> None:
        if length is not None:
            self.handler.set_header("Content-Length", length)
        await self.handler.flush()

    async def write(self, data: bytes) -> None:
        self.handler.write(data)
        await self.handler.flush()

    async def end(self) -> None:
        await self.handler.finish()


@contextlib.asynccontextmanager
async def tornado_app(
    answer: Answer,
    sock: socket.socket,
    tls: ssl.SSLContext | None,
    *,
    by_route: bool = False,
    is_watched: bool = True,
    **options: Any,
) -> AsyncIterator[None]:
    """Watched as a whole, or method by method; or cancelled by ``on_connection_close``."""

    async def handle(handler: RequestHandler) -> None:
        body = await answer(TornadoExchange(handler, is_watched=is_watched))
        if body is not None:
            handler.write(body)

    class Handler(RequestHandler):
        post = get = cancel_on_disconnect(**options)(handle) if by_route else handle

    class CancelledHandler(RequestHandler):
        task: asyncio.Task[None] | None = None

        async def get(self) -> None:
            self.task = asyncio.current_task()
            await handle(self)

        post = get

        def on_connection_close(self) -> None:
            if self.task is not None:
                self.task.cancel()

    app = Application([("/.*", Handler if is_watched else CancelledHandler)])
    if is_watched and not by_route:
        setup(app, **options)
    async with tornado_server(app, sock, tls):
        yield


@contextlib.asynccontextmanager
async def tornado_server(
    app: Application, sock: socket.socket, tls: ssl.SSLContext | None = None
) -> AsyncIterator[None]:
    """Tornado's own server on this loop."""
    server = HTTPServer(app, ssl_options=tls)
    listening = sock.dup()  # the server closes its own
    listening.setblocking(False)
    listening.listen()
    server.add_socket(listening)
    try:
        yield
    finally:
        server.stop()
        await server.close_all_connections()
