"""The work on ASGI frameworks, each as it is and inside ``CancelOnDisconnect``.

A path begins as in ``asgi_app``: ``/own/0`` or ``/ours/0``.
"""

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any

from disconnect_watch.adapters.asgi import TOKEN_KEY, CancelOnDisconnect
from disconnect_watch.token import CancelToken
from tests.servers.work import chunks, work

ROUTES = ("/wait/{name}", "/quick/{name}", "/zombie/{name}")
STREAM = "/stream/{name}"
PERIOD = 0.1


class RouteExchange:
    """One request, which its framework answers."""

    def __init__(self, scope: Any) -> None:
        self.path: str = scope["path"]
        self.token: CancelToken = scope["state"].get(TOKEN_KEY) or CancelToken()

    async def begin(self, *, length: int | None = None) -> None:
        raise NotImplementedError("the framework sends the head")

    async def write(self, data: bytes) -> None:
        raise NotImplementedError("the framework sends the body")

    async def end(self) -> None:
        raise NotImplementedError("the framework ends the body")


async def body_of(scope: Any) -> bytes:
    """Do the work, and return the body of its answer."""
    return await work(RouteExchange(scope)) or b""


async def beside(work: Awaitable[bytes], listen: Callable[[], Awaitable[None]]) -> bytes:
    """The body of an answer, the work for which is cancelled when ``listen`` returns before."""
    task = asyncio.ensure_future(work)
    listener = asyncio.ensure_future(listen())
    await asyncio.wait([task, listener], return_when=asyncio.FIRST_COMPLETED)
    listener.cancel()
    if not task.done():
        task.cancel()
    return await task


def is_ours(scope: Any) -> bool:
    return TOKEN_KEY in scope["state"]


def heard(receive: Any) -> Callable[[], Awaitable[None]]:
    """Until the server says ``http.disconnect``."""

    async def listen() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    return listen


def both(app: Any) -> Any:
    """The application as it is, and inside ``CancelOnDisconnect``."""
    ours = CancelOnDisconnect(app)

    async def run(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        _, mode, _, path = scope["path"].split("/", 3)
        inner = {**scope, "path": f"/{path}", "raw_path": f"/{path}".encode()}
        inner.setdefault("state", {})
        await (app if mode == "own" else ours)(inner, receive, send)

    return run


def make_fastapi() -> Any:
    from fastapi import FastAPI, Request, Response
    from starlette.responses import StreamingResponse

    app = FastAPI()

    async def answer(request: Request, name: str) -> Response:
        running = body_of(request.scope)
        if is_ours(request.scope):
            return Response(await running)
        return Response(await beside(running, heard(request.receive)))

    async def stream(request: Request, name: str) -> Response:
        return StreamingResponse(chunks(name, RouteExchange(request.scope).token))

    for route in ROUTES:
        app.add_api_route(route, answer, methods=["GET", "POST"])
    app.add_api_route(STREAM, stream, methods=["GET", "POST"])
    return app


def make_quart() -> Any:
    from quart import Quart, request

    app = Quart("tests")
    methods = ["GET", "POST"]

    async def answer(name: str) -> Any:
        return await body_of(request.scope)

    async def stream(name: str) -> Any:
        return chunks(name, RouteExchange(request.scope).token)

    for route in ROUTES:
        path = route.replace("{", "<").replace("}", ">")
        app.add_url_rule(path, route, answer, methods=methods)
    app.add_url_rule("/stream/<name>", "stream", stream, methods=methods)
    return app


def make_litestar() -> Any:
    from litestar import HttpMethod, Litestar, Request, Response, route
    from litestar.response import Stream

    methods = [HttpMethod.GET, HttpMethod.POST]
    paths = [path.replace("{name}", "{name:str}") for path in ROUTES]

    @route(paths, http_method=methods, status_code=200)
    async def answer(request: Request[Any, Any, Any], name: str) -> Response[bytes]:
        running = body_of(request.scope)
        if is_ours(request.scope):
            return Response(await running)
        return Response(await beside(running, heard(request.receive)))

    @route("/stream/{name:str}", http_method=methods, status_code=200)
    async def stream(request: Request[Any, Any, Any], name: str) -> Stream:
        return Stream(chunks(name, RouteExchange(request.scope).token))

    return Litestar([answer, stream], logging_config=None)


def make_blacksheep() -> Any:
    from blacksheep import Application, Content, Request, Response, Router, StreamedContent

    app = Application(router=Router())

    async def answer(request: Request) -> Response:
        async def poll() -> None:
            while not await request.is_disconnected():  # noqa: ASYNC110  # all that it offers
                await asyncio.sleep(PERIOD)

        running = body_of(request.scope)
        body = await running if is_ours(request.scope) else await beside(running, poll)
        return Response(200, content=Content(b"text/plain", body))

    async def stream(request: Request) -> Response:
        token = RouteExchange(request.scope).token
        name = request.scope["path"].rpartition("/")[2]
        content = StreamedContent(b"text/plain", functools.partial(chunks, name, token))
        return Response(200, content=content)

    for route in ROUTES:
        app.router.add_get(route, answer)
        app.router.add_post(route, answer)
    app.router.add_get(STREAM, stream)
    app.router.add_post(STREAM, stream)
    return app


def __getattr__(name: str) -> Any:
    # Each process loads the one framework that it serves.
    makers = {
        "fastapi": make_fastapi,
        "quart": make_quart,
        "litestar": make_litestar,
        "blacksheep": make_blacksheep,
    }
    if name in makers:
        app = globals()[name] = both(makers[name]())
        return app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
