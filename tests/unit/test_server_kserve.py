"""Health, metadata, and the paths and methods that do not exist."""

import pytest

from disconnect_watch.server import Frontend
from tests.support.backends import ScriptedBackend
from tests.support.serve import request_app

METADATA = {
    "name": "script",
    "versions": ["1"],
    "platform": "script",
    "inputs": [
        {"name": "text_input", "datatype": "BYTES", "shape": [1]},
        {"name": "max_tokens", "datatype": "INT32", "shape": [1]},
        {"name": "temperature", "datatype": "FP32", "shape": [1]},
        {"name": "top_p", "datatype": "FP32", "shape": [1]},
        {"name": "top_k", "datatype": "INT32", "shape": [1]},
        {"name": "seed", "datatype": "UINT64", "shape": [1]},
        {"name": "ignore_eos", "datatype": "BOOL", "shape": [1]},
        {"name": "stop", "datatype": "BYTES", "shape": [-1]},
        {"name": "stop_token_ids", "datatype": "INT32", "shape": [-1]},
        {"name": "logprobs", "datatype": "INT32", "shape": [1]},
        {"name": "n", "datatype": "INT32", "shape": [1]},
        {"name": "best_of", "datatype": "INT32", "shape": [1]},
        {"name": "priority", "datatype": "INT32", "shape": [1]},
        {"name": "time_limit", "datatype": "FP32", "shape": [1]},
    ],
    "outputs": [
        {"name": "text_output", "datatype": "BYTES", "shape": [-1]},
        {"name": "logprobs", "datatype": "BYTES", "shape": [-1]},
        {"name": "index", "datatype": "INT32", "shape": [1]},
    ],
}


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "path",
    [
        "/v2/health/live",
        "/v2/health/ready",
        "/v2/models/script/ready",
        "/v2/models/script/versions/1/ready",
    ],
)
async def test_health_is_200_with_an_empty_body(path: str) -> None:
    response = await request_app(ScriptedBackend(), "GET", path)
    assert (response.status_code, response.content) == (200, b"")
    assert response.headers["content-type"].startswith("text/plain")


@pytest.mark.asyncio
async def test_a_dead_backend_is_alive_but_not_ready() -> None:
    backend = ScriptedBackend()
    backend.is_ready = False
    assert (await request_app(backend, "GET", "/v2/health/live")).status_code == 200
    ready = await request_app(backend, "GET", "/v2/health/ready")
    assert (ready.status_code, ready.content) == (400, b"")
    model = await request_app(backend, "GET", "/v2/models/script/ready")
    assert (model.status_code, model.json()) == (400, {"error": "Model version not ready"})


@pytest.mark.asyncio
async def test_a_draining_server_is_not_ready() -> None:
    frontend = Frontend(ScriptedBackend())
    frontend.begin_drain()
    assert (await request_app(frontend, "GET", "/v2/health/ready")).status_code == 400
    assert (await request_app(frontend, "GET", "/v2/models/script/ready")).status_code == 400
    assert (await request_app(frontend, "GET", "/v2/health/live")).status_code == 200


@pytest.mark.asyncio
@pytest.mark.parametrize("path", ["/v2/models/nope/ready", "/v2/models/script/versions/7/ready"])
async def test_an_unknown_model_is_not_ready(path: str) -> None:
    response = await request_app(ScriptedBackend(), "GET", path)
    assert (response.status_code, response.json()) == (400, {"error": "Model version not ready"})


@pytest.mark.asyncio
@pytest.mark.parametrize("path", ["/v2/models/script", "/v2/models/script/versions/1"])
async def test_metadata_lists_what_a_request_may_give(path: str) -> None:
    response = await request_app(ScriptedBackend(), "GET", path)
    assert (response.status_code, response.json()) == (200, METADATA)


@pytest.mark.asyncio
async def test_the_servers_metadata_names_it() -> None:
    document = (await request_app(ScriptedBackend(), "GET", "/v2")).json()
    assert document["name"] == "disconnect_watch"
    assert "generate" in document["extensions"]


@pytest.mark.asyncio
@pytest.mark.parametrize("path", ["/foo", "/v2/", "/v2/nope", "/v2/models/script/versions/x"])
async def test_an_unknown_path_is_404(path: str) -> None:
    response = await request_app(ScriptedBackend(), "GET", path)
    assert (response.status_code, response.json()) == (404, {"error": "Not Found"})


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("PUT", "/v2/health/live"),
        ("POST", "/v2"),
        ("DELETE", "/v2/models/script"),
        ("GET", "/v2/models/script/generate_stream"),
        ("OPTIONS", "/v2/models/script/generate"),
        ("POST", "/metrics"),
    ],
)
async def test_a_wrong_method_is_405(method: str, path: str) -> None:
    response = await request_app(ScriptedBackend(), method, path)
    assert (response.status_code, response.json()) == (405, {"error": "Method Not Allowed"})


@pytest.mark.asyncio
async def test_head_is_a_wrong_method_too() -> None:
    assert (await request_app(ScriptedBackend(), "HEAD", "/v2/health/live")).status_code == 405
