"""The handlers of ``frameworks`` under Tornado."""

import contextlib
import socket
import ssl
from collections.abc import AsyncIterator
from typing import Any

from tornado.httpserver import HTTPServer
from tornado.web import Application, RequestHandler

from disconnect_watch.adapters.tornado import cancel_on_disconnect, client_token, setup
from tests.support.frameworks import Record, behave


class TornadoExchange:
    def __init__(self, handler: RequestHandler) -> None:
        self.handler = handler
        self.path = handler.request.path
        self.token = client_token(handler)

    async def read(self) -> bytes:
        return self.handler.request.body

    async def begin(self) -> None:
        await self.handler.flush()

    async def write(self, data: bytes) -> None:
        self.handler.write(data)
        await self.handler.flush()

    async def end(self) -> None:
        await self.handler.finish()


@contextlib.asynccontextmanager
async def tornado_app(
    record: Record,
    sock: socket.socket,
    tls: ssl.SSLContext | None,
    *,
    by_route: bool = False,
    **options: Any,
) -> AsyncIterator[None]:
    """Watched as a whole, or method by method."""

    async def handle(handler: RequestHandler) -> None:
        body = await behave(TornadoExchange(handler), record)
        if body is not None:
            handler.write(body)

    class Handler(RequestHandler):
        post = cancel_on_disconnect(**options)(handle) if by_route else handle

    app = Application([("/.*", Handler)])
    if not by_route:
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
