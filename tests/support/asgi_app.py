"""One application, written for each framework, that says what becomes of its requests.

It runs in a server's own process. What happens goes line by line, as JSON, to the file
that ``DW_EVENTS`` names; ``tests.support.asgi_servers`` reads it. The first part of a path
says what is around it, the rest what it does:

    /plain         CancelOnDisconnect, outermost
    /three         the same, with three BaseHTTPMiddlewares inside
    /inside        the same, with the middlewares outside
    /decorated     @cancel_on_disconnect on each route
    /shared        CancelOnDisconnect, and one namespace for all requests
    /bare          nothing

    /wait/NAME     waits for ever
    /stream/NAME   sends one chunk and waits for ever
    /flood/NAME    sends for ever
    /late/NAME     answers, and then waits in the background for /open/NAME
    /hold/NAME     waits for /open/NAME, then answers with the body of its request
    /read/NAME     answers with the body of its request
    /sorry/NAME    waits for ever, and makes an answer of its cancel
    /sync/NAME     waits for its token in the thread pool
    /open/NAME     see above
    /collect       collects garbage
    /stats         how connections were found
"""

import asyncio
import dataclasses
import gc
import json
import os
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol, TypeVar

from fastapi import Depends, FastAPI, Request
from starlette.background import BackgroundTask
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.responses import JSONResponse, Response, StreamingResponse

from disconnect_watch import CancelToken
from disconnect_watch.adapters.asgi import (
    CancelOnDisconnect,
    cancel_on_disconnect,
    client_token,
    stats,
)

F = TypeVar("F", bound=Callable[..., Any])


class Decorator(Protocol):
    def __call__(self, route: F, /) -> F: ...


def note(event: str, name: str, **more: Any) -> None:
    """Say that something happened."""
    line = json.dumps({"event": event, "name": name, **more}) + "\n"
    with open(os.environ["DW_EVENTS"], "a") as events:
        events.write(line)


gates: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)


class Noted:
    """Say when a body of code begins, whether it was cancelled, and that it ended.

    No generator: one inside an async generator that is garbage may be finalized before it.
    """

    def __init__(self, name: str, token: CancelToken | None = None) -> None:
        self._name = name
        self._token = token

    def __enter__(self) -> None:
        note("started", self._name)

    def __exit__(self, exc_type: type[BaseException] | None, *_: object) -> None:
        if exc_type is asyncio.CancelledError:
            note("cancelled", self._name, reason=self._token.reason if self._token else None)
        elif exc_type is GeneratorExit:
            note("closed", self._name)
        note("ended", self._name)


async def wait(name: str, token: CancelToken | None = None) -> None:
    with Noted(name, token):
        await asyncio.Event().wait()


async def one_chunk(name: str) -> AsyncIterator[bytes]:
    with Noted(name):
        yield b"chunk"
        await asyncio.Event().wait()


async def chunks(name: str) -> AsyncIterator[bytes]:
    with Noted(name):
        while True:
            yield bytes(1 << 16)
            await asyncio.sleep(0)


async def late(name: str) -> None:
    with Noted(name):
        await gates[name].wait()


async def pass_on(request: Request, call_next: RequestResponseEndpoint) -> Response:
    return await call_next(request)


def build(route: Decorator) -> FastAPI:
    """The application on FastAPI, which is Starlette's for all that matters here.

    Args:
        route: applied to every function that answers.
    """
    app = FastAPI()

    @app.post("/wait/{name}")
    @route
    async def _wait(name: str, token: CancelToken = Depends(client_token)) -> None:  # noqa: B008
        await wait(name, token)

    @app.post("/stream/{name}")
    @route
    async def _stream(name: str) -> StreamingResponse:
        return StreamingResponse(
            one_chunk(name), background=BackgroundTask(note, "background", name)
        )

    @app.post("/flood/{name}")
    @route
    async def _flood(name: str) -> StreamingResponse:
        return StreamingResponse(chunks(name))

    @app.post("/late/{name}")
    @route
    async def _late(name: str) -> Response:
        return Response(b"late", background=BackgroundTask(late, name))

    @app.post("/hold/{name}")
    @route
    async def _hold(name: str, request: Request) -> Response:
        with Noted(name):
            await gates[name].wait()
            return Response(await request.body())

    @app.post("/read/{name}")
    @route
    async def _read(name: str, request: Request) -> Response:
        with Noted(name):
            return Response(await request.body())

    @app.post("/sorry/{name}")
    @route
    async def _sorry(name: str) -> Response:
        try:
            await wait(name)
        except asyncio.CancelledError:
            return Response("sorry", status_code=503)
        return Response("never")

    @app.post("/sync/{name}")
    @route
    def _sync(name: str, token: CancelToken = Depends(client_token)) -> None:  # noqa: B008
        note("started", name)
        token.wait(40)
        note("ended", name, reason=token.reason)

    @app.post("/open/{name}")
    async def _open(name: str) -> None:
        gates[name].set()

    @app.post("/collect")
    async def _collect() -> None:
        gc.collect()

    @app.post("/stats")
    async def _stats() -> JSONResponse:
        return JSONResponse(dataclasses.asdict(stats()))

    return app


def as_it_is(route: F, /) -> F:
    return route


def behind_three(app: Any) -> Any:
    for _ in range(3):
        app = BaseHTTPMiddleware(app, dispatch=pass_on)
    return app


def inside_three() -> FastAPI:
    app = build(as_it_is)
    app.add_middleware(CancelOnDisconnect)  # the last that is added is the outermost
    for _ in range(3):
        app.add_middleware(BaseHTTPMiddleware, dispatch=pass_on)
    return app


def in_one_namespace(app: Any) -> Any:
    """Give all requests the same ``scope["state"]``, as hypercorn 0.17 does to a connection's."""
    namespace: dict[str, Any] = {}

    async def called(scope: Any, receive: Any, send: Any) -> None:
        await app({**scope, "state": namespace}, receive, send)

    return called


APPS: dict[str, Any] = {
    "plain": CancelOnDisconnect(build(as_it_is)),
    "three": CancelOnDisconnect(behind_three(build(as_it_is))),
    "inside": inside_three(),
    "decorated": build(cancel_on_disconnect),
    "shared": in_one_namespace(CancelOnDisconnect(build(as_it_is))),
    "bare": build(as_it_is),
}


async def app(scope: Any, receive: Any, send: Any) -> None:
    """What the servers run."""
    if scope["type"] == "lifespan":
        while True:
            kind = (await receive())["type"]
            await send({"type": f"{kind}.complete"})
            if kind == "lifespan.shutdown":
                return
    _, around, path = scope["path"].split("/", 2)
    await APPS[around]({**scope, "path": f"/{path}"}, receive, send)
