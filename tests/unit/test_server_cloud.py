"""The paths of SageMaker and Vertex AI."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import numpy as np
import pytest

from disconnect_watch.backends.infer import InferError, InferRequest
from disconnect_watch.backends.pending import cancelled_error
from disconnect_watch.server import Frontend, create_app
from disconnect_watch.server.cloud import CloudMode, SageMaker, VertexAI
from disconnect_watch.server.guard import AdminDoor
from disconnect_watch.token import CancelToken
from tests.support.function_models import (
    Arrays,
    FunctionModel,
    ModelTable,
    identity,
    tensor_config,
)
from tests.support.net import until
from tests.support.serve import metrics_of

DOCUMENT = {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1], "data": [1.5]}]}
VERTEX = VertexAI("identity", predict="/predict", health="/healthy")
VERTEX_OF_WAITS = VertexAI("waits", predict="/predict", health="/healthy")


async def cancelled(token: CancelToken) -> None:
    """Return when it fires."""
    fired = asyncio.Event()
    token.add_callback(lambda _: fired.set(), loop=asyncio.get_running_loop())
    await fired.wait()


async def ask(cloud: CloudMode, method: str, path: str, **options: Any) -> httpx.Response:
    frontend = Frontend(models=ModelTable(identity()))
    transport = httpx.ASGITransport(create_app(frontend, metrics_of(frontend), cloud=cloud))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        return await client.request(method, path, **options)


def binary(media_type: str) -> dict[str, Any]:
    tensor = DOCUMENT["inputs"][0] | {"parameters": {"binary_data_size": 4}}
    del tensor["data"]
    document = {"inputs": [tensor], "parameters": {"binary_data_output": True}}
    head = json.dumps(document).encode()
    return {
        "content": head + np.array([1.5], "<f4").tobytes(),
        "headers": {"content-type": f"{media_type};json-header-size={len(head)}"},
    }


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("cloud", "health", "predict"),
    [
        (SageMaker("identity"), "/ping", "/invocations"),
        (VERTEX, "/healthy", "/predict"),
    ],
)
async def test_a_cloud_has_its_own_paths_and_no_others(
    cloud: CloudMode, health: str, predict: str
) -> None:
    assert (await ask(cloud, "GET", health)).status_code == 200
    answer = await ask(cloud, "POST", predict, json=DOCUMENT)
    assert answer.json()["outputs"][0]["data"] == [1.5]
    for path in ("/v2", "/v2/models/identity", "/metrics"):
        assert (await ask(cloud, "GET", path)).status_code == 400

    with_binary = await ask(cloud, "POST", predict, **binary(cloud.media_type))
    kind = with_binary.headers["content-type"]
    size = re.fullmatch(rf"{re.escape(cloud.media_type)};json-header-size=(\d+)", kind)
    assert size is not None
    assert with_binary.content[int(size[1]) :] == np.array([1.5], "<f4").tobytes()
    assert "inference-header-content-length" not in with_binary.headers


@pytest.mark.asyncio
@pytest.mark.parametrize("cloud", [SageMaker("waits"), VERTEX_OF_WAITS])
async def test_what_runs_in_a_cloud_is_cancelled_by_the_admins_door(cloud: CloudMode) -> None:
    async def wait(request: InferRequest) -> AsyncIterator[Arrays | InferError]:
        await cancelled(request.cancel)
        yield cancelled_error(request)

    model = FunctionModel(tensor_config("waits", "FP32"), wait)
    frontend = Frontend(models=ModelTable(model))
    app = create_app(frontend, metrics_of(frontend), cloud=cloud)
    predict = "/invocations" if isinstance(cloud, SageMaker) else "/predict"
    everything = {"confirm": True}
    async with (
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as cloud_side,
        httpx.AsyncClient(
            transport=httpx.ASGITransport(AdminDoor(app)), base_url="http://test"
        ) as admin,
    ):
        running = asyncio.create_task(cloud_side.post(predict, json=DOCUMENT))
        await until(lambda: model.num_open == 1)
        refused = await cloud_side.post("/v1/admin/cancel_all", json=everything)
        assert refused.status_code == 400
        answer = await admin.post("/v1/admin/cancel_all", json=everything)
        assert answer.json()["results"][0]["status"] == "cancelled"
        assert (await running).status_code == 499
        assert (await admin.get("/v2/models/waits")).json()["name"] == "waits"


@pytest.mark.asyncio
async def test_sagemaker_may_generate() -> None:
    cloud = SageMaker("identity", action="generate", health="live")
    answer = await ask(cloud, "POST", "/invocations", json={"INPUT0": 1.5})
    assert answer.json()["OUTPUT0"] == 1.5


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("redirect", "status"),
    [
        ("v2", 200),
        ("v2/health/live", 200),
        ("v2/models/identity/config", 200),
        ("v2/models/identity/versions/1", 200),
        ("v2/models/stats", 200),
        ("v2/repository/index", 200),
        ("metrics", 200),
        ("v2/models/identity/infer", 200),
        ("v2/models/identity/generate", 400),
        ("v1/admin/cancel_all", 400),
        ("v2/repository/models/identity/load", 403),
        ("v2/systemsharedmemory/region/r/register", 403),
        ("v2/models/identity/infer?x", 400),
    ],
)
async def test_vertex_redirects_to_what_changes_nothing(redirect: str, status: int) -> None:
    headers = {"x-vertex-ai-triton-redirect": redirect}
    content = json.dumps(DOCUMENT if redirect.endswith("infer") else {}).encode()
    answer = await ask(VERTEX, "POST", "/predict", headers=headers, content=content)
    assert answer.status_code == status
    assert (await ask(VERTEX, "GET", "/predict", headers=headers)).status_code == 405


def test_the_environment_says_what_a_cloud_wants() -> None:
    sagemaker = SageMaker.from_environment(
        {"SAGEMAKER_TRITON_DEFAULT_MODEL_NAME": "m", "SAGEMAKER_BIND_TO_PORT": "9000"}
    )
    assert sagemaker.port == 9000
    assert sagemaker.target({"path": "/invocations", "method": "POST"}) == (
        "POST",
        "/v2/models/m/infer",
    )
    environment = {"AIP_PREDICT_ROUTE": "/p", "AIP_HEALTH_ROUTE": "/h", "AIP_HTTP_PORT": "9001"}
    assert VertexAI.from_environment(environment, model="m").port == 9001


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({}, "SAGEMAKER_TRITON_DEFAULT_MODEL_NAME is not set"),
        ({"SAGEMAKER_TRITON_INFERENCE_TYPE": "x"}, "it must be one of infer, generate"),
        ({"SAGEMAKER_TRITON_PING_MODE": "x"}, "it must be 'ready' or 'live'"),
        ({"SAGEMAKER_BIND_TO_PORT": "x"}, "SAGEMAKER_BIND_TO_PORT is 'x', it must be a port"),
    ],
)
def test_an_environment_that_makes_no_sense_is_refused(
    environment: dict[str, str], message: str
) -> None:
    if environment:
        environment = {"SAGEMAKER_TRITON_DEFAULT_MODEL_NAME": "m", **environment}
    with pytest.raises(ValueError, match=re.escape(message)):
        SageMaker.from_environment(environment)
    with pytest.raises(ValueError, match="AIP_PREDICT_ROUTE and AIP_HEALTH_ROUTE must be set"):
        VertexAI.from_environment({"AIP_PREDICT_ROUTE": "/p"}, model="m")
