"""Frameworks other than Starlette's family, as applications inside ``CancelOnDisconnect``."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from blacksheep import Application, Response, Router, StreamedContent
from blacksheep import Request as BlackSheepRequest
from litestar import Litestar, Request, post
from litestar.response import Stream
from quart import Quart
from quart import request as quart_request

from disconnect_watch.adapters.asgi import TOKEN_KEY, CancelOnDisconnect
from disconnect_watch.token import CancelToken, Reason
from tests.support.http import Client
from tests.support.net import wait_until
from tests.support.serve import serving_app


class Work:
    """What each framework's routes do, and note.

    Attributes:
        notes: "started", and "cancelled" or "ended".
        tokens: of the requests that began to wait.
    """

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.tokens: list[CancelToken] = []

    async def wait(self, scope: Any) -> None:
        self.tokens.append(scope["state"][TOKEN_KEY])
        self.notes.append("started")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.notes.append("cancelled")
            raise

    async def stream(self) -> AsyncIterator[bytes]:
        try:
            yield b"chunk"
            await asyncio.Event().wait()
        finally:
            self.notes.append("ended")


def on_quart(work: Work) -> Any:
    app = Quart("tests")

    @app.post("/wait")
    async def wait() -> str:
        await work.wait(quart_request.scope)
        return ""

    @app.post("/stream")
    async def stream() -> Any:
        return work.stream()

    @app.post("/echo")
    async def echo() -> Any:
        return await quart_request.get_data()

    return app


def on_litestar(work: Work) -> Any:
    @post("/wait")
    async def wait(request: Request[Any, Any, Any]) -> None:
        await work.wait(request.scope)

    @post("/stream")
    async def stream() -> Stream:
        return Stream(work.stream())

    @post("/echo", status_code=200)
    async def echo(request: Request[Any, Any, Any]) -> bytes:
        return await request.body()

    return Litestar([wait, stream, echo], logging_config=None)  # it would start a thread


def on_blacksheep(work: Work) -> Any:
    app = Application(router=Router())  # its default is shared by all applications

    async def wait(request: BlackSheepRequest) -> None:
        await work.wait(request.scope)

    async def stream(request: BlackSheepRequest) -> Response:
        return Response(200, content=StreamedContent(b"text/plain", work.stream))

    async def echo(request: BlackSheepRequest) -> Response:
        body = await request.read()

        async def once() -> AsyncIterator[bytes]:
            yield body or b""

        return Response(200, content=StreamedContent(b"text/plain", once))

    for path, handler in {"/wait": wait, "/stream": stream, "/echo": echo}.items():
        app.router.add_post(path, handler)
    return app


FRAMEWORKS: dict[str, Callable[[Work], Any]] = {
    "quart": on_quart,
    "litestar": on_litestar,
    "blacksheep": on_blacksheep,
}


@pytest.fixture(params=FRAMEWORKS)
def framework(request: pytest.FixtureRequest) -> Callable[[Work], Any]:
    return FRAMEWORKS[request.param]


@pytest.mark.parametrize("is_pipelined", [False, True])
def test_a_handler_is_cancelled(framework: Callable[[Work], Any], is_pipelined: bool) -> None:
    work = Work()
    app = CancelOnDisconnect(framework(work))
    with serving_app(app, protocol="httptools", lifespan="on") as server:
        with Client(server.port) as client:
            client.post("/wait")
            wait_until(lambda: work.notes == ["started"])
            if is_pipelined:
                client.post("/wait")
        wait_until(lambda: work.notes[1:] == ["cancelled"])
    assert work.tokens[0].reason is Reason.FIN
    assert work.notes == ["started", "cancelled"]


def test_a_stream_is_ended(framework: Callable[[Work], Any]) -> None:
    work = Work()
    app = CancelOnDisconnect(framework(work))
    with serving_app(app, protocol="httptools", lifespan="on") as server:
        with Client(server.port) as client:
            client.post("/stream")
            client.read_until(b"chunk")
        wait_until(lambda: work.notes == ["ended"])


def test_bodies_are_the_applications_to_read(framework: Callable[[Work], Any]) -> None:
    work = Work()
    body = bytes(range(256)) * 1000
    app = CancelOnDisconnect(framework(work))
    with (
        serving_app(app, protocol="httptools", lifespan="on") as server,
        Client(server.port) as client,
    ):
        for _ in range(3):
            client.post("/echo", body)
            assert client.read_response()[2] == body
