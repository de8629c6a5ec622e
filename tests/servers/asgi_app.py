"""The work as a bare ASGI application, watched or left to itself, behind middleware or not.

The first part of a path says who cuts the work off, the second what is around it:

    /own       the application itself: a task that awaits ``receive()`` beside the work
    /ours      ``CancelOnDisconnect``
    /token     the application itself, by the token of our uvicorn protocol

    /0 /1 /3   so many ``BaseHTTPMiddleware``
"""

import asyncio
from typing import Any

from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import Response

from disconnect_watch.adapters.asgi import TOKEN_KEY, CancelOnDisconnect
from disconnect_watch.token import CancelToken
from tests.servers.stacks import NUMS_MIDDLEWARES
from tests.servers.work import work


class AsgiExchange:
    """One request, and the answer to it."""

    def __init__(self, scope: Any, send: Any) -> None:
        self.path: str = scope["path"]
        self.token: CancelToken = scope.get("state", {}).get(TOKEN_KEY) or CancelToken()
        self.listener: asyncio.Task[None] | None = None
        self._send = send

    async def begin(self, *, length: int | None = None) -> None:
        headers = [(b"content-type", b"text/event-stream")]
        if length is not None:
            headers.append((b"content-length", str(length).encode()))
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def write(self, data: bytes) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        if self.listener is not None:
            self.listener.cancel()  # who has the whole answer may leave
        await self._send({"type": "http.response.body"})


async def run(exchange: AsgiExchange) -> None:
    body = await work(exchange)
    if body is not None:
        await exchange.begin(length=len(body))
        await exchange.write(body)
        await exchange.end()


async def watched(scope: Any, receive: Any, send: Any) -> None:
    """Somebody cancels this task."""
    await run(AsgiExchange(scope, send))


async def listening(scope: Any, receive: Any, send: Any) -> None:
    """Cancel the work when the server says ``http.disconnect``: ASGI's own way."""
    exchange = AsgiExchange(scope, send)
    task = asyncio.ensure_future(run(exchange))

    async def listen() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        task.cancel()

    exchange.listener = asyncio.ensure_future(listen())
    await asyncio.wait([task])
    exchange.listener.cancel()


async def by_token(scope: Any, receive: Any, send: Any) -> None:
    """Cancel the work when its token is set."""
    exchange = AsgiExchange(scope, send)
    task = asyncio.ensure_future(run(exchange))
    exchange.token.add_callback(lambda _: task.cancel(), loop=asyncio.get_running_loop())
    await asyncio.wait([task])


async def pass_on(request: Request, call_next: RequestResponseEndpoint) -> Response:
    return await call_next(request)


def behind(num_middlewares: int, app: Any) -> Any:
    for _ in range(num_middlewares):
        app = BaseHTTPMiddleware(app, dispatch=pass_on)
    return app


APPS: dict[tuple[str, int], Any] = {}
for num in NUMS_MIDDLEWARES:
    APPS["own", num] = behind(num, listening)
    APPS["ours", num] = CancelOnDisconnect(behind(num, watched))
    APPS["token", num] = behind(num, by_token)


async def app(scope: Any, receive: Any, send: Any) -> None:
    """What the servers run."""
    if scope["type"] == "lifespan":
        while True:
            kind = (await receive())["type"]
            await send({"type": f"{kind}.complete"})
            if kind == "lifespan.shutdown":
                return
    _, way_in, num, _ = scope["path"].split("/", 3)
    await APPS[way_in, int(num)](scope, receive, send)
