"""Large bodies go past the parser to their place: whole, in any pieces, and no further."""

import json
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from disconnect_watch.backends.infer import InferError, InferRequest
from disconnect_watch.server import Frontend, FrontendOptions
from disconnect_watch.server.upload import LARGE
from disconnect_watch.server.v2.routes import V2
from tests.support.function_models import Arrays, FunctionModel, ModelTable, tensor_config
from tests.support.net import wait_until
from tests.support.serve import Client, request_bytes, serving_frontend

PATH = "/v2/models/sum/infer"
NUM = LARGE // 4


async def add(request: InferRequest) -> AsyncIterator[Arrays | InferError]:
    yield {"OUTPUT0": np.array([request.inputs[0].to_numpy().sum()], np.float32)}


def request_of(num: int, value: float) -> bytes:
    """One whose answer is ``num * value``."""
    data = np.full(num, value, "<f4").tobytes()
    tensor = {
        "name": "INPUT0",
        "datatype": "FP32",
        "shape": [num],
        "parameters": {"binary_data_size": len(data)},
    }
    head = json.dumps({"inputs": [tensor]}).encode()
    length = {"Inference-Header-Content-Length": str(len(head))}
    return request_bytes(PATH, head + data, **length)


@pytest.fixture
def model() -> FunctionModel:
    return FunctionModel(tensor_config("sum", "FP32"), add)


@pytest.fixture
def frontend(model: FunctionModel) -> Frontend:
    return Frontend(models=ModelTable(model))


def answer(client: Client) -> float:
    status, _, body = client.read_response()
    assert status == 200, body
    value: float = json.loads(body)["outputs"][0]["data"][0]
    return value


def test_large_and_small_ones_follow_each_other_on_a_connection(frontend: Frontend) -> None:
    with serving_frontend(frontend) as server, Client(server.port) as client:
        # All at once: behind each body lies the head of the next.
        sizes = [NUM, 3, 4 * NUM, NUM, 2]
        client.sock.sendall(b"".join(request_of(num, 1.0) for num in sizes))
        assert [answer(client) for _ in sizes] == sizes


@pytest.mark.parametrize("cut", [1, 150, 40_000, LARGE])
def test_a_body_may_be_cut_anywhere(frontend: Frontend, cut: int) -> None:
    request = request_of(NUM, 2.0)
    with serving_frontend(frontend) as server, Client(server.port) as client:
        for pieces in ((request[:cut], request[cut:]), (request[:-cut], request[-cut:])):
            for piece in pieces:
                client.sock.sendall(piece)
            assert answer(client) == 2 * NUM


def test_the_tensor_is_a_view_of_what_was_filled(model: FunctionModel, frontend: Frontend) -> None:
    with serving_frontend(frontend) as server, Client(server.port) as client:
        client.sock.sendall(request_of(NUM, 1.0))
        answer(client)
    view = model.requests[0].inputs[0].data
    assert isinstance(view, memoryview)
    assert isinstance(view.obj, np.ndarray)
    assert view.obj.nbytes > LARGE


def test_a_small_body_that_is_there_is_taken_at_once(
    frontend: Frontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(_: object) -> None:
        raise AssertionError("asked for what was there")

    monkeypatch.setattr(RequestResponseCycle, "receive", refuse)
    with serving_frontend(frontend) as server, Client(server.port) as client:
        for num in (3, 5):
            client.sock.sendall(request_of(num, 1.0))
            assert answer(client) == num


def test_a_small_body_that_is_not_there_is_waited_for(frontend: Frontend) -> None:
    request = request_of(3, 1.0)
    with serving_frontend(frontend) as server, Client(server.port) as client:
        client.sock.sendall(request[:-5])
        wait_until(
            lambda: any(
                getattr(each, "cycle", None) for each in server.server.server_state.connections
            )
        )
        client.sock.sendall(request[-5:] + request + request)
        assert [answer(client) for _ in range(3)] == [3] * 3


def test_a_small_body_that_is_too_large_is_refused(model: FunctionModel) -> None:
    options = FrontendOptions(max_body_bytes=100)
    served = Frontend(models=ModelTable(model), options=options)
    with serving_frontend(served) as server, Client(server.port) as client:
        client.sock.sendall(request_of(30, 1.0))
        status, _, body = client.read_response()
        assert status == 400
        assert b"exceeds the maximum allowed input size of 100 bytes" in body


def test_who_is_given_another_receive_has_the_body_by_that(
    frontend: Frontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = request_of(2, 4.0).partition(b"\r\n\r\n")[2]
    whole = V2.__call__

    async def replaced(self: V2, scope: Any, receive: Any, send: Any) -> None:
        async def receive_other() -> dict[str, Any]:
            await receive()
            return {"type": "http.request", "body": other, "more_body": False}

        await whole(self, scope, receive_other, send)

    monkeypatch.setattr(V2, "__call__", replaced)
    with serving_frontend(frontend) as server, Client(server.port) as client:
        client.sock.sendall(request_of(2, 1.0))
        assert answer(client) == 8


def test_a_refused_body_is_dropped_and_the_next_request_is_found(frontend: Frontend) -> None:
    request = request_of(NUM, 1.0)
    head = request.index(b"\r\n\r\n") + 4
    with serving_frontend(frontend) as server, Client(server.port) as client:
        nowhere = request.replace(b"/sum/", b"/nix/", 1)
        client.sock.sendall(nowhere[: head + 10])
        assert client.read_response()[0] == 404
        client.sock.sendall(nowhere[head + 10 :] + request)
        assert answer(client) == NUM


def test_who_leaves_in_the_middle_has_asked_for_nothing(
    model: FunctionModel, frontend: Frontend
) -> None:
    request = request_of(4 * NUM, 1.0)
    with serving_frontend(frontend) as server:
        with Client(server.port) as client:
            client.sock.sendall(request[: 2 * LARGE])
        wait_until(lambda: not server.server.server_state.connections)
        with Client(server.port) as client:
            client.sock.sendall(request)
            assert answer(client) == 4 * NUM
    assert len(model.requests) == 1
    assert frontend.stats().num_live == 0


def test_a_large_body_that_does_not_come_loses_its_connection(
    model: FunctionModel, frontend: Frontend
) -> None:
    request = request_of(4 * NUM, 1.0)
    with serving_frontend(frontend, read_timeout=0.3) as server, Client(server.port) as client:
        client.sock.sendall(request[:300])
        try:
            rest = client.read_rest()
        except ConnectionError:
            rest = b""
        assert rest == b""
    assert model.requests == []
