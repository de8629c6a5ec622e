"""The cycle collector while a process serves: rare, and not needed by requests."""

import gc
import json
from collections.abc import AsyncIterator, Iterator

import pytest

from disconnect_watch.backends.infer import Code, InferError, InferRequest
from disconnect_watch.server import Frontend
from disconnect_watch.server.collector import THRESHOLD, rare_collections
from tests.support.function_models import Arrays, FunctionModel, ModelTable, echo, tensor_config
from tests.support.net import wait_until
from tests.support.serve import Client, serving_frontend

TENSOR = {"name": "INPUT0", "datatype": "FP32", "shape": [1], "data": [1.0]}


async def fail(request: InferRequest) -> AsyncIterator[Arrays | InferError]:
    yield InferError(Code.INTERNAL, "no")


@pytest.fixture
def no_collections() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def num_requests() -> int:
    return sum(isinstance(each, InferRequest) for each in gc.get_objects())


def test_collections_are_rare_until_the_end() -> None:
    before = gc.get_threshold()
    with rare_collections():
        assert gc.get_threshold() == (max(THRESHOLD, before[0]), *before[1:])
        assert gc.get_freeze_count()
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0


def test_who_has_turned_it_off_has_it_off(no_collections: None) -> None:
    before = gc.get_threshold()
    gc.set_threshold(0)
    try:
        with rare_collections():
            assert gc.get_threshold()[0] == 0
            assert not gc.isenabled()
    finally:
        gc.set_threshold(*before)


@pytest.mark.parametrize("name", ["works", "fails"])
@pytest.mark.parametrize("path", ["infer", "generate"])
def test_a_request_leaves_nothing_to_collect(no_collections: None, name: str, path: str) -> None:
    model = FunctionModel(tensor_config(name, "FP32"), echo if name == "works" else fail)
    body = {"inputs": [TENSOR]} if path == "infer" else {"INPUT0": [1.0]}
    before = num_requests()
    with serving_frontend(Frontend(models=ModelTable(model))) as server:
        with Client(server.port) as client:
            for _ in range(3):
                client.post(f"/v2/models/{name}/{path}", json.dumps(body).encode())
                status, _, _ = client.read_response()
                assert (status == 200) == (name == "works")
        assert len(model.requests) == 3
        model.requests.clear()
        wait_until(lambda: num_requests() == before)
