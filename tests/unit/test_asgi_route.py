"""Which functions ``cancel_on_disconnect`` takes for a route."""

import functools
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from disconnect_watch.adapters.asgi import cancel_on_disconnect
from tests.support.http import Client
from tests.support.serve import serving_app


def answer(app: Any, path: str) -> tuple[int, bytes]:
    with serving_app(app, protocol="httptools") as server, Client(server.port) as client:
        client.post(path)
        status, _, body = client.read_response()
        return status, body


def test_annotations_may_name_what_only_type_checkers_import() -> None:
    async def hello(request: "Unknown") -> "Unknown":  # type: ignore[name-defined]  # noqa: F821
        return PlainTextResponse("hello")

    app = Starlette(routes=[Route("/", cancel_on_disconnect(hello), methods=["POST"])])
    assert answer(app, "/") == (200, b"hello")


def test_the_other_annotations_of_such_a_route_are_fastapis_to_read() -> None:
    app = FastAPI()

    @app.post("/", response_model=None)
    @cancel_on_disconnect
    async def double(number: "Number") -> "Unknown":  # type: ignore[name-defined]  # noqa: F821
        return number * 2

    assert answer(app, "/?number=4") == (200, b"8")


Number = int


class Asynchronous:
    async def __call__(self) -> int:
        return 1


async def number(value: int) -> int:
    return value


@pytest.mark.parametrize("route", [Asynchronous(), functools.partial(number, value=1)])
def test_what_is_called_like_a_coroutine_function_is_one(route: Callable[[], Any]) -> None:
    app = FastAPI()
    app.post("/")(cancel_on_disconnect(route))
    assert answer(app, "/") == (200, b"1")


async def asynchronous_numbers() -> AsyncIterator[int]:
    yield 1


def numbers() -> Iterator[int]:
    yield 1


@pytest.mark.parametrize("route", [asynchronous_numbers, numbers])
def test_a_generator_is_refused_since_fastapi_would_not_know_it_for_one(
    route: Callable[[], Any],
) -> None:
    with pytest.raises(TypeError, match="wrap the application in CancelOnDisconnect"):
        cancel_on_disconnect(route)
