"""Models that take tensors behind the real server: a client that leaves ends its request."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from disconnect_watch.backends.infer import Code, InferError, InferRequest
from disconnect_watch.server import Frontend, FrontendOptions
from disconnect_watch.testing import LeavingClient, Way
from disconnect_watch.token import Reason
from tests.support.function_models import Arrays, FunctionModel, ModelTable, identity, tensor_config
from tests.support.net import wait_until
from tests.support.serve import Client, ThreadedServer, request_bytes, serving_frontend

DECOUPLED = "model_transaction_policy { decoupled: true }"


async def until_cancelled(request: InferRequest) -> None:
    """Wait as a model does that looks at its token; ends as it is to."""
    loop, told = asyncio.get_running_loop(), asyncio.Event()
    request.cancel.add_callback(lambda *_: loop.call_soon_threadsafe(told.set))
    await told.wait()
    raise InferError(Code.CANCELLED, "cancelled")


async def wait(request: InferRequest) -> AsyncIterator[Arrays | InferError]:
    """As many responses as the input says, then none until the request is cancelled."""
    for index in range(int(request.inputs[0].to_numpy().ravel()[0])):
        yield {"OUTPUT0": np.array([index], "<f4")}
    await until_cancelled(request)


@dataclass
class Served:
    http: ThreadedServer
    frontend: Frontend
    waiting: FunctionModel
    stream: FunctionModel

    def is_idle(self) -> bool:
        return not (self.waiting.num_open or self.stream.num_open or self.frontend.stats().num_live)


@contextmanager
def serving_models(**options: Any) -> Iterator[Served]:
    waiting = FunctionModel(tensor_config("waiting", "FP32"), wait)
    stream = FunctionModel(tensor_config("stream", "FP32", "1", more=DECOUPLED), wait)
    models = ModelTable(waiting, stream, identity())
    frontend = Frontend(models=models, options=FrontendOptions(**options))
    with serving_frontend(frontend, grace=0.2) as http:
        yield Served(http, frontend, waiting, stream)


def infer_body(value: float = 0) -> dict[str, Any]:
    return {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1], "data": [value]}]}


REQUESTS = {
    "infer": ("waiting", infer_body()),
    "generate": ("waiting", {"INPUT0": 0}),
    "generate_stream": ("stream", {"INPUT0": 0}),
}


@pytest.mark.parametrize("way", [Way.FIN, Way.RST, Way.BEHIND_REQUEST])
@pytest.mark.parametrize("action", REQUESTS)
def test_a_client_that_leaves_ends_its_request(action: str, way: Way) -> None:
    name, body = REQUESTS[action]
    request = request_bytes(f"/v2/models/{name}/{action}", body)
    with serving_models() as served:
        model = getattr(served, name)
        with LeavingClient(served.http) as client:
            client.send(request)
            wait_until(lambda: model.num_open == 1)
            client.leave(way, request=request)
            wait_until(served.is_idle)
        assert model.requests[0].cancel.reason in (Reason.FIN, Reason.RESET)
        # What was sent behind it never began.
        assert len(model.requests) == 1


def test_a_client_that_leaves_between_two_events_ends_its_stream() -> None:
    with serving_models() as served, Client(served.http.port) as client:
        client.post("/v2/models/stream/generate_stream", {"INPUT0": 2})
        client.read_until(b'"OUTPUT0":1')
        client.sock.close()
        wait_until(served.is_idle)
        assert served.stream.requests[0].cancel.cancelled


@pytest.mark.parametrize("action", REQUESTS)
def test_each_request_is_counted_by_its_one_outcome(action: str) -> None:
    name, body = REQUESTS[action]
    path = f"/v2/models/{name}/{action}"
    with serving_models() as served:
        model = getattr(served, name)
        with Client(served.http.port) as client:
            client.post("/v2/models/identity/infer", infer_body(1))
            client.post("/v2/models/identity/infer", {"inputs": []})
            assert [client.read_response()[0] for _ in range(2)] == [200, 400]
            client.post(path, body, X_Request_Timeout="0.01")
            client.read_until(b"504" if action != "generate_stream" else b"time that the request")
        with LeavingClient(served.http) as client:
            client.send(request_bytes(path, body))
            wait_until(lambda: model.num_open == 1)
            client.leave(Way.FIN)
            wait_until(served.is_idle)
        assert served.frontend.outcomes == {("finished", None): 1, ("cancelled", "decode"): 2}
        assert served.frontend.ledger.signals == {Reason.DEADLINE: 1}
        wait_until(lambda: served.frontend.ledger.live() == [])
        records = list(served.frontend.ledger._ended.values())
    assert [record.outcome and record.outcome.reason for record in records] == [
        None,
        None,
        Reason.DEADLINE,
        records[-1].token.reason,
    ]
    assert [record.outcome is None for record in records] == [False, True, False, False]


def test_requests_that_are_answered_cancel_nothing() -> None:
    with serving_models() as served, Client(served.http.port) as client:
        for _ in range(3):
            client.post("/v2/models/identity/infer", infer_body(1))
            status, _, body = client.read_response()
            assert (status, json.loads(body)["outputs"][0]["data"]) == (200, [1.0])


def test_two_pipelined_requests_are_both_answered() -> None:
    with serving_models() as served, Client(served.http.port) as client:
        request = request_bytes("/v2/models/identity/infer", infer_body(1))
        client.sock.sendall(request + request)
        assert [client.read_response()[0] for _ in range(2)] == [200, 200]


def test_a_large_binary_tensor_passes_both_ways() -> None:
    data = np.arange(1 << 20, dtype="<f4").tobytes()
    tensor = {
        "name": "INPUT0",
        "datatype": "FP32",
        "shape": [1 << 20],
        "parameters": {"binary_data_size": len(data)},
    }
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    with serving_models() as served, Client(served.http.port) as client:
        client.post(
            "/v2/models/identity/infer",
            head + data,
            **{"Inference-Header-Content-Length": str(len(head))},
        )
        status, headers, body = client.read_response()
    assert status == 200
    assert body[int(headers["inference-header-content-length"]) :] == data


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("action", ["infer", "generate"])
def test_who_is_cancelled_by_somebody_else_is_told(action: str, strict: bool) -> None:
    name, body = REQUESTS[action]
    with serving_models(strict=strict) as served, Client(served.http.port) as client:
        client.post(f"/v2/models/{name}/{action}", body)
        wait_until(lambda: served.waiting.num_open == 1)
        served.waiting.requests[0].cancel.cancel()
        status, headers, answer = client.read_response()
    assert (status, json.loads(answer)) == (400 if strict else 499, {"error": "cancelled"})
    assert headers.get("x-should-retry") == (None if strict else "false")


def test_a_shutdown_ends_what_outlives_its_grace() -> None:
    with serving_models() as served, Client(served.http.port) as client:
        client.post("/v2/models/waiting/infer", infer_body())
        wait_until(lambda: served.waiting.num_open == 1)
        served.http.server.should_exit = True
        status, _, answer = client.read_response()
        assert status == 503
        assert "shutting down" in json.loads(answer)["error"]
    assert served.waiting.requests[0].cancel.reason is Reason.SHUTDOWN
