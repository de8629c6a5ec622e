"""SageMaker's multi-model endpoints: models come and go by ``/models``."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from disconnect_watch.backends.repository import ModelRepository
from disconnect_watch.server import Frontend, create_app
from disconnect_watch.server.multi_model import MultiModel
from tests.support.command import running
from tests.support.http import Client
from tests.support.models import TIME_LIMIT, write_model
from tests.support.serve import metrics_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(TIME_LIMIT)]

ECHO = """
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor(
            "y", pb_utils.get_input_tensor_by_name(r, "x").as_numpy())]) for r in requests]
"""
CONFIG = """
name: "echo"
input { name: "x" data_type: TYPE_FP32 dims: 1 }
output { name: "y" data_type: TYPE_FP32 dims: 1 }
"""
DOCUMENT = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [1.5]}]}


@pytest.mark.asyncio
@pytest.mark.parametrize("inner", ["", "echo"])
async def test_models_come_and_go(tmp_path: Path, inner: str) -> None:
    # As SageMaker unpacks them: the model itself, or a directory that holds it alone.
    write_model(tmp_path / "digest" / "model" / inner / "..", inner or "model", ECHO, CONFIG)
    url = str(tmp_path / "digest" / "model")
    cloud = MultiModel(root=tmp_path)
    async with ModelRepository(mode="explicit") as repository:
        cloud.places = repository
        frontend = Frontend(models=repository)
        transport = httpx.ASGITransport(create_app(frontend, metrics_of(frontend), cloud=cloud))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:

            async def ask(method: str, path: str, body: Any = None) -> tuple[int, Any]:
                answer = await client.request(method, path, json=body)
                return answer.status_code, answer.json() if answer.content else None

            told = {"modelName": "abc", "modelUrl": url}
            assert await ask("GET", "/ping") == (200, None)
            assert await ask("GET", "/models") == (200, {"models": []})
            assert (await ask("POST", "/models/abc/invoke", DOCUMENT))[0] == 404
            load = {"model_name": "abc", "url": url}
            # A second load that comes before the first has ended is one too many.
            both = await asyncio.gather(*(ask("POST", "/models", load) for _ in range(2)))
            assert sorted(status for status, _ in both) == [200, 409]
            assert await ask("GET", "/models") == (200, {"models": [told]})
            assert await ask("GET", "/models/abc") == (200, told)
            status, answer = await ask("POST", "/models/abc/invoke", DOCUMENT)
            assert (status, answer["outputs"][0]["data"]) == (200, [1.5])
            assert await ask("DELETE", "/models/abc") == (200, {})
            for method, path in (
                ("GET", "/models/abc"),
                ("DELETE", "/models/abc"),
                ("POST", "/models/abc/invoke"),
            ):
                assert (await ask(method, path, DOCUMENT))[0] == 404
            assert (await ask("PUT", "/models/abc"))[0] == 405
            assert (await ask("GET", "/v2"))[0] == 400


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "give a model_name"),
        ({"model_name": "a/b", "url": "/x"}, "give a model_name"),
        ({"model_name": "a", "url": "/etc"}, "no model can lie at '/etc'"),
        ({"model_name": "a", "url": "{root}/digest/model/../../../x"}, "no model can lie at"),
        ({"model_name": "a", "url": "{root}/link/model"}, "no model can lie at"),
        ({"model_name": "a", "url": "{root}/digest/model"}, "at least one version"),
    ],
)
async def test_what_can_not_be_loaded_is_refused(
    body: dict[str, str], message: str, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    (root / "digest" / "model").mkdir(parents=True)
    (tmp_path / "elsewhere" / "model").mkdir(parents=True)
    (root / "link").symlink_to(tmp_path / "elsewhere")
    cloud = MultiModel(root=root)
    async with ModelRepository(mode="explicit") as repository:
        cloud.places = repository
        frontend = Frontend(models=repository)
        transport = httpx.ASGITransport(create_app(frontend, metrics_of(frontend), cloud=cloud))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            asked = {key: value.format(root=root) for key, value in body.items()}
            answer = await client.post("/models", json=asked)
            assert (answer.status_code, message in answer.json()["error"]) == (400, True)
            assert (await client.get("/models")).json() == {"models": []}


def test_the_environment_says_what_is_wanted() -> None:
    cloud = MultiModel.from_environment({"SAGEMAKER_BIND_TO_PORT": "9000"})
    assert cloud.port == 9000
    assert cloud.target({"path": "/ping", "method": "GET"}) == ("GET", "/v2/health/live")
    with pytest.raises(ValueError, match="must be one of infer"):
        MultiModel.from_environment({"SAGEMAKER_TRITON_INFERENCE_TYPE": "x"})


def test_serve_has_models_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAGEMAKER_MULTI_MODEL", "true")
    with running("--allow-sagemaker") as server, Client(server.port) as client:
        client.post("/models", {"model_name": "a", "url": "/etc"})
        status, _, body = client.read_response()
        assert status == 400
        assert b"only below /opt/ml/models/*/model" in body
