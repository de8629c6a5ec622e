"""The routes below ``/v2`` but those that infer."""

import json
import mmap
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from disconnect_watch.server import Frontend, FrontendOptions
from disconnect_watch.server.v2.restricted import parse_restrictions
from disconnect_watch.server.v2.shared_memory import RESERVED, ROOT
from tests.support.backends import ScriptedBackend
from tests.support.function_models import FunctionModel, ModelTable, identity
from tests.support.serve import request_app


def frontend(*models: FunctionModel, **options: Any) -> Frontend:
    return Frontend(
        ScriptedBackend(),
        models=ModelTable(*models or (identity(),)),
        options=FrontendOptions(**options),
    )


async def get(path: str, served: Frontend | None = None, **options: Any) -> httpx.Response:
    return await request_app(served or frontend(), "GET", path, **options)


async def post(path: str, document: Any, served: Frontend | None = None) -> httpx.Response:
    content = json.dumps(document).encode()
    return await request_app(served or frontend(), "POST", path, content=content)


@pytest.mark.asyncio
@pytest.mark.parametrize("path", ["/v2/models/identity", "/v2/models/identity/versions/1"])
async def test_metadata_of_a_model_is_its_configurations(path: str) -> None:
    model = identity(datatype="STRING", dims="2", more="max_batch_size: 4")
    assert (await get(path, frontend(model))).json() == {
        "name": "identity",
        "versions": ["1"],
        "platform": "python",
        "inputs": [{"name": "INPUT0", "datatype": "BYTES", "shape": [-1, 2]}],
        "outputs": [{"name": "OUTPUT0", "datatype": "BYTES", "shape": [-1, 2]}],
    }


@pytest.mark.asyncio
async def test_the_configuration_has_numbers_for_numbers() -> None:
    document = (await get("/v2/models/identity/config")).json()
    assert document["input"][0]["dims"] == [-1]
    assert document["version_policy"] == {"latest": {"num_versions": 1}}
    engine = (await get("/v2/models/script/config")).json()
    assert engine["input"][0]["name"] == "text_input"


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("path", "status", "message"),
    [
        ("/v2/models/nope", 404, "Request for unknown model: 'nope' is not found"),
        ("/v2/models/s%69mple", 404, "Request for unknown model: 's%69mple' is not found"),
        (
            "/v2/models/identity/versions/7",
            404,
            "Request for unknown model: 'identity' version 7 is not found",
        ),
        ("/v2/models/nope/ready", 400, "Model version not ready"),
        ("/v2/models/nope/stats", 400, "requested model 'nope' is not available"),
        (
            "/v2/models/script/versions/2/stats",
            400,
            "requested model version is not available for model 'script'",
        ),
        ("/v2/models/nope/trace/setting", 400, "Request for unknown model : nope"),
        ("/v2/models/identity/versions/1/trace/setting", 404, "Not Found"),
        ("/v2/models/identity/nope", 404, "Not Found"),
        ("/v2x", 404, "Not Found"),
    ],
)
async def test_what_is_not_there_is_said_in_tritons_words(
    path: str, status: int, message: str
) -> None:
    response = await get(path)
    assert (response.status_code, response.json()) == (status, {"error": message})


@pytest.mark.asyncio
async def test_a_model_that_is_not_ready_makes_the_server_not_ready_if_it_is_strict() -> None:
    model = identity()
    model.is_ready = False
    assert (await get("/v2/models/identity/ready", frontend(model))).status_code == 400
    assert (await get("/v2/health/ready", frontend(model))).status_code == 400
    lenient = frontend(model, strict_readiness=False)
    assert (await get("/v2/health/ready", lenient)).status_code == 200


@pytest.mark.asyncio
async def test_statistics_have_tritons_form() -> None:
    (of_model,) = (await get("/v2/models/identity/stats")).json()["model_stats"]
    assert set(of_model) == {
        "name",
        "version",
        "last_inference",
        "inference_count",
        "execution_count",
        "inference_stats",
        "response_stats",
        "batch_stats",
        "memory_usage",
    }
    assert of_model["inference_stats"]["success"] == {"count": 0, "ns": 0}
    everything = (await get("/v2/models/stats")).json()["model_stats"]
    assert [each["name"] for each in everything] == ["identity", "script"]


@pytest.mark.asyncio
async def test_the_index_lists_every_version() -> None:
    model = identity()
    model.is_ready = False
    served = frontend(model)
    script = {"name": "script", "version": "1", "state": "READY"}
    own = {"name": "identity", "version": "1", "state": "UNAVAILABLE"}
    whole = await request_app(served, "POST", "/v2/repository/index")
    assert whole.json() == [script, own]
    assert (await post("/v2/repository/index", {"ready": True}, served)).json() == [script]
    wrong = await post("/v2/repository/index", {"ready": 1}, served)
    assert (wrong.status_code, wrong.json()["error"]) == (
        400,
        "Invalid value for 'ready': expected a boolean",
    )


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("path", "document", "status", "message"),
    [
        ("models/identity/load", {}, 503, "explicit model load / unload is not allowed"),
        ("models/script/unload", {}, 503, "explicit model load / unload is not allowed"),
        ("x/models/identity/load", {}, 501, "'repository_name' specification is not supported"),
        (
            "models/identity/load",
            {"parameters": {"x": 1}},
            500,
            "unexpected error on creating Triton parameter",
        ),
        (
            "models/identity/unload",
            {"parameters": {"unload_dependents": 1}},
            400,
            "Invalid value for 'unload_dependents': expected a boolean",
        ),
    ],
)
async def test_what_cannot_be_loaded_is_refused(
    path: str, document: Any, status: int, message: str
) -> None:
    response = await post(f"/v2/repository/{path}", document)
    assert response.status_code == status
    assert response.json()["error"].startswith(message)


@pytest.mark.asyncio
async def test_a_restricted_api_asks_for_its_header_first() -> None:
    served = frontend(restrictions=parse_restrictions(["health,inference:Admin-Key=secret"]))
    for path in ("/v2/health/live", "/v2/models/identity/ready", "/v2/models/identity/infer"):
        response = await get(path, served)
        assert (response.status_code, response.json()) == (
            403,
            {"error": "This API is restricted, expecting header 'Admin-Key'"},
        )
        wrong = await get(path, served, headers={"admin-key": "secre"})
        assert wrong.status_code == 403
    assert (await get("/v2/models/identity", served)).status_code == 200
    allowed = await get("/v2/health/live", served, headers={"ADMIN-KEY": "secret"})
    assert allowed.status_code == 200


@pytest.mark.asyncio
async def test_the_text_of_engines_is_restricted_too() -> None:
    served = frontend(restrictions=parse_restrictions(["inference:k=v"]))
    response = await post("/v2/models/script/generate", {"text_input": "x"}, served)
    assert response.status_code == 403


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["health"], "give <category>"),
        (["health:x"], "give <category>"),
        (["nope:a=b"], "cannot restrict 'nope': the categories are health, metadata"),
        (["health:a=b", "health:c=d"], "cannot restrict 'health' twice"),
    ],
)
def test_what_cannot_be_restricted_is_said(texts: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_restrictions(texts)


@pytest.mark.asyncio
async def test_logging_settings_are_given_and_obeyed() -> None:
    import logging

    served = frontend()
    before = (await get("/v2/logging", served)).json()
    assert before == {
        "log_file": "",
        "log_info": True,
        "log_warning": True,
        "log_error": True,
        "log_verbose_level": 0,
        "log_format": "default",
    }
    after = await post("/v2/logging", {"log_info": False, "log_verbose_level": 1}, served)
    assert after.json() == before | {"log_info": False, "log_verbose_level": 1}
    record = logging.LogRecord("x", logging.INFO, "", 0, "", (), None)
    assert not served.log_settings.filter(record)
    record.levelno = logging.WARNING
    assert served.log_settings.filter(record)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("document", "status", "message"),
    [
        ({"log_file": "x"}, 501, "log file location can not be updated"),
        ({"log_format": "x"}, 503, "invalid argument for --log_format, got: x"),
        ({"log_info": 1}, 500, "Unable to parse 'log_info'"),
    ],
)
async def test_logging_settings_that_cannot_be_are_refused(
    document: Any, status: int, message: str
) -> None:
    response = await post("/v2/logging", document)
    assert response.status_code == status
    assert message in response.json()["error"]


@pytest.mark.asyncio
async def test_trace_settings_of_a_model_stand_before_those_for_all() -> None:
    served = frontend()
    for_all = (await get("/v2/trace/setting", served)).json()
    assert for_all == {
        "trace_level": ["OFF"],
        "trace_rate": "1000",
        "trace_count": "-1",
        "log_frequency": "0",
        "trace_file": "",
        "trace_mode": "triton",
    }
    own = "/v2/models/identity/trace/setting"
    change = {"trace_rate": "5", "trace_level": ["TIMESTAMPS"]}
    assert (await post(own, change, served)).json() == for_all | change
    assert (await get("/v2/trace/setting", served)).json() == for_all
    await post("/v2/trace/setting", {"trace_count": 7}, served)
    assert (await post(own, {"trace_rate": None}, served)).json() == for_all | {
        "trace_level": ["TIMESTAMPS"],
        "trace_count": "7",
    }
    assert (await post("/v2/trace/setting", {"trace_count": None}, served)).json() == for_all


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("document", "status", "message"),
    [
        ({"trace_file": "x"}, 501, "trace file location can not be updated"),
        ({"trace_level": ["OFF", "TIMESTAMPS"]}, 400, "Expect only one trace level 'OFF'"),
        ({"trace_level": ["X"]}, 400, "Unable to parse 'trace_level'"),
        ({"trace_rate": "x"}, 400, "Unable to parse 'trace_rate', got: x"),
        ({"trace_count": "-2"}, 400, "Unable to parse 'trace_count', got: -2"),
    ],
)
async def test_trace_settings_that_cannot_be_are_refused(
    document: Any, status: int, message: str
) -> None:
    response = await post("/v2/trace/setting", document)
    assert response.status_code == status
    assert message in response.json()["error"]


class Shared:
    """Shared memory as a client makes it."""

    def __init__(self, size: int) -> None:
        self.key = f"/dw_test_{secrets.token_hex(8)}"
        self.path = ROOT / self.key[1:]
        fd = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        os.ftruncate(fd, size)
        self.memory = mmap.mmap(fd, size)
        os.close(fd)

    def close(self) -> None:
        self.memory.close()
        self.path.unlink()


@pytest.fixture
def shared() -> Iterator[Shared]:
    memory = Shared(4096)
    yield memory
    memory.close()


SYSTEM = "/v2/systemsharedmemory"


def in_memory(region: str = "r", **more: Any) -> dict[str, Any]:
    inputs = {"shared_memory_region": region, "shared_memory_byte_size": 12, **more}
    outputs = {
        "shared_memory_region": region,
        "shared_memory_offset": 64,
        "shared_memory_byte_size": 16,
    }
    return {
        "inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [3], "parameters": inputs}],
        "outputs": [{"name": "OUTPUT0", "parameters": outputs}],
    }


@pytest.mark.asyncio
async def test_tensors_lie_in_shared_memory(shared: Shared) -> None:
    served = frontend(allow_client_shm=True)
    region = {"key": shared.key, "offset": 128, "byte_size": 1024}
    registered = await post(f"{SYSTEM}/region/r/register", region, served)
    assert (registered.status_code, registered.content) == (200, b"")
    status = [{"name": "r", **region}]
    assert (await get(f"{SYSTEM}/status", served)).json() == status
    assert (await get(f"{SYSTEM}/region/r/status", served)).json() == status

    data = np.array([1, 2, 3], "<f4").tobytes()
    shared.memory[128:140] = data
    response = await post("/v2/models/identity/infer", in_memory(), served)
    assert response.json()["outputs"] == [{"name": "OUTPUT0", "datatype": "FP32", "shape": [3]}]
    assert shared.memory[192:204] == data

    for path in (f"{SYSTEM}/region/r/unregister", f"{SYSTEM}/unregister"):
        assert (await post(path, {}, served)).status_code == 200
    assert (await get(f"{SYSTEM}/status", served)).json() == []


@pytest.mark.asyncio
async def test_a_region_stays_until_its_last_request_has_ended(shared: Shared) -> None:
    served = frontend(allow_client_shm=True)
    memory = served.memory
    memory.register("r", shared.key, 0, 4096)
    (region,) = memory.status("r")
    loan = memory.borrow("r", 0, 8)
    memory.unregister("r")
    loan.view[:2] = b"ok"
    assert (shared.memory[:2], region.memory.closed) == (b"ok", False)
    loan.close()
    loan.close()
    assert region.memory.closed


@pytest.mark.asyncio
async def test_a_request_that_fails_gives_its_shared_memory_back(shared: Shared) -> None:
    served = frontend(allow_client_shm=True)
    served.memory.register("r", shared.key, 0, 4096)
    (region,) = served.memory.status("r")
    for document in (in_memory("r"), in_memory("r") | {"outputs": [5]}):
        document["inputs"][0]["shape"] = [4]
        assert (await post("/v2/models/identity/infer", document, served)).status_code >= 400
    served.memory.unregister("r")
    assert region.memory.closed


@pytest.mark.asyncio
async def test_an_output_that_is_too_large_for_its_place_is_refused(shared: Shared) -> None:
    served = frontend(allow_client_shm=True)
    served.memory.register("r", shared.key, 0, 4096)
    document = in_memory("r")
    document["outputs"][0]["parameters"]["shared_memory_byte_size"] = 8
    response = await post("/v2/models/identity/infer", document, served)
    assert response.status_code == 500
    assert "(8 bytes) should be at least 12 bytes" in response.json()["error"]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("parameters", "status", "message"),
    [
        ({"shared_memory_region": "x"}, 400, "Unable to find shared memory region: 'x'"),
        ({"shared_memory_offset": 4096}, 400, "Invalid offset for shared memory region: 'r'"),
        ({"shared_memory_offset": 4090}, 400, "Invalid offset + byte size"),
        ({"shared_memory_offset": -1}, 500, "Unable to parse 'shared_memory_offset'"),
    ],
)
async def test_a_tensor_outside_its_region_is_refused(
    shared: Shared, parameters: dict[str, Any], status: int, message: str
) -> None:
    served = frontend(allow_client_shm=True)
    served.memory.register("r", shared.key, 0, 4096)
    document = in_memory(**{"region": "r"} | {})
    document["inputs"][0]["parameters"] |= parameters
    response = await post("/v2/models/identity/infer", document, served)
    assert response.status_code == status
    assert message in response.json()["error"]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("name", "document", "message"),
    [
        ("r", {"byte_size": 1}, "Shared memory register request has no 'key' field"),
        ("r", {"key": "/x"}, "Shared memory register request has no 'byte_size' field"),
        ("r", {"key": "/dw_test_nothing_there", "byte_size": 1}, "No such file"),
        ("r", {"key": "/../etc/passwd", "byte_size": 1}, "it must be '/' and a name"),
        ("r", {"key": "/..", "byte_size": 1}, "it must be '/' and a name"),
        ("r", {"key": "KEY", "byte_size": 4097}, "make 4097 bytes, it has 4096"),
        ("r", {"key": "KEY", "byte_size": 1, "offset": 1 << 63}, "it has 4096"),
        ("r", {"key": "KEY", "byte_size": 0}, "its 'byte_size' is 0"),
        ("taken", {"key": "KEY", "byte_size": 1}, "region 'taken' already in manager"),
        (RESERVED + "1", {"key": "KEY", "byte_size": 1}, "are reserved"),
    ],
)
async def test_what_cannot_be_registered_is_refused(
    shared: Shared, name: str, document: dict[str, Any], message: str
) -> None:
    served = frontend(allow_client_shm=True)
    served.memory.register("taken", shared.key, 0, 4096)
    if document.get("key") == "KEY":
        document = document | {"key": shared.key}
    response = await post(f"{SYSTEM}/region/{name}/register", document, served)
    assert response.status_code == 400
    assert message in response.json()["error"]
    served.memory.close()


@pytest.mark.asyncio
async def test_a_link_out_of_shared_memory_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "file"
    target.write_bytes(bytes(4096))
    link = ROOT / f"dw_test_{secrets.token_hex(8)}"
    link.symlink_to(target)
    try:
        served = frontend(allow_client_shm=True)
        document = {"key": f"/{link.name}", "byte_size": 8}
        response = await post(f"{SYSTEM}/region/r/register", document, served)
        assert response.status_code == 400
    finally:
        link.unlink()


@pytest.mark.asyncio
async def test_shared_memory_is_refused_unless_it_is_allowed() -> None:
    served = frontend()
    for response in (
        await get(f"{SYSTEM}/status", served),
        await get("/v2/cudasharedmemory/status", served),
        await post(f"{SYSTEM}/region/r/register", {"key": "/x", "byte_size": 1}, served),
        await post("/v2/models/identity/infer", in_memory(), served),
    ):
        assert response.status_code == 501
        assert "--allow-client-shm" in response.json()["error"]


@pytest.mark.asyncio
async def test_a_gpus_memory_is_refused_clearly() -> None:
    served = frontend(allow_client_shm=True)
    path = "/v2/cudasharedmemory/region/r/register"
    response = await post(path, {}, served)
    assert response.status_code == 501
    assert response.json()["error"].startswith("CUDA shared memory is not supported")
    assert (await get("/v2/cudasharedmemory/status", served)).json() == []


@pytest.mark.asyncio
async def test_metrics_have_tritons_names() -> None:
    text = (await get("/metrics")).text
    assert 'nv_inference_request_success{model="identity",version="1"} 0' in text
    assert 'nv_inference_request_failure{model="identity",version="1",reason="CANCELED"} 0' in text
    assert "# TYPE nv_inference_count counter" in text
