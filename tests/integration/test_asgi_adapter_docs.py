"""What docs/adapters/asgi.md shows runs as written."""

import json
from functools import partial
from typing import Any

from fastapi import Depends, FastAPI

from disconnect_watch.adapters.asgi import CancelOnDisconnect, client_token, stats
from tests.support.documents import blocks_of
from tests.support.http import Client
from tests.support.net import wait_until
from tests.support.serve import serving_app


def is_left(num_clients: int) -> bool:
    return stats().num_left == num_clients


def test_the_examples_answer_who_stays_and_stop_for_who_leaves() -> None:
    whole, one_route = blocks_of("adapters/asgi.md")
    for source, path, stays in [
        (whole, "/generate?steps=100000", "/generate?steps=2"),
        (one_route, "/solve", None),
    ]:
        names: dict[str, Any] = {"__name__": "example"}
        exec(compile(source, "asgi.md", "exec"), names)
        with serving_app(names["app"], protocol="httptools") as server:
            if stays:
                with Client(server.port) as client:
                    client.post(stays)
                    assert json.loads(client.read_response()[2]) == {"cancelled": False}
            before = stats().num_left
            with Client(server.port) as client:
                client.post(path)
                wait_until(lambda: server.server.server_state.tasks)
            wait_until(partial(is_left, before + 1))


def test_a_token_that_nobody_would_set_is_an_error() -> None:
    app = FastAPI()

    @app.post("/")
    async def route(token: Any = Depends(client_token)) -> None:  # noqa: B008
        raise AssertionError("never reached")

    with serving_app(app, protocol="httptools") as server, Client(server.port) as client:
        client.post("/")
        assert client.read_response()[0] == 500
    with (
        serving_app(CancelOnDisconnect(app), protocol="httptools") as server,
        Client(server.port) as client,
    ):
        client.post("/other")
        assert client.read_response()[0] == 404
