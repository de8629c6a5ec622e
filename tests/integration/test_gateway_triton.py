"""The gateway answers as the Triton behind it: every endpoint, over a real gRPC connection."""

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from disconnect_watch.backends.triton import Connecting, HeaderPassing
from tests.support.net import wait_until
from tests.support.tls import PEM
from tests.support.triton import Gateway, TritonProcess, serving_gateway, shared_triton, triton

#: What goes to a model is a float, but for these.
DATATYPES = {"stream": "INT32", "told": "BYTES"}


@pytest.fixture(scope="module", autouse=True)
def small() -> Iterator[TritonProcess]:
    with shared_triton() as process:
        yield process


@pytest.fixture
def gateway(small: TritonProcess) -> Iterator[Gateway]:
    with serving_gateway(small.port) as gateway:
        yield gateway


@pytest.fixture
def client(gateway: Gateway) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://127.0.0.1:{gateway.port}", timeout=40) as client:
        yield client


def body_for(model: str, *data: Any, **parameters: Any) -> dict[str, Any]:
    """An infer request with one input."""
    tensor = {
        "name": "INPUT0",
        "datatype": DATATYPES.get(model, "FP32"),
        "shape": [len(data)],
        "data": data,
    }
    return {"inputs": [tensor], "parameters": parameters}


def infer(client: httpx.Client, model: str, *data: Any, **parameters: Any) -> httpx.Response:
    return client.post(f"/v2/models/{model}/infer", json=body_for(model, *data, **parameters))


def frames(text: str) -> list[dict[str, Any]]:
    return [json.loads(frame.removeprefix("data: ")) for frame in text.split("\n\n") if frame]


def test_health_and_metadata_are_those_of_the_triton(client: httpx.Client) -> None:
    for path in ("/v2/health/live", "/v2/health/ready", "/v2/models/identity/ready"):
        assert client.get(path).status_code == 200
    # What can't be had through the gateway is not promised.
    expected = {"name": "small", "version": "1", "extensions": ["statistics"]}
    assert client.get("/v2").json() == expected
    assert client.get("/v2/models/identity").json() == {
        "name": "identity",
        "versions": ["1"],
        "platform": "python",
        "inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [-1]}],
        "outputs": [{"name": "OUTPUT0", "datatype": "FP32", "shape": [-1]}],
    }
    config = client.get("/v2/models/stream/config").json()
    assert config["model_transaction_policy"] == {"decoupled": True}


@pytest.mark.parametrize("path", ["", "/config", "/infer", "/generate", "/generate_stream"])
def test_an_unknown_model_is_told_in_tritons_words(client: httpx.Client, path: str) -> None:
    method = "GET" if path in ("", "/config") else "POST"
    answer = client.request(method, f"/v2/models/nope{path}", json={})
    assert answer.status_code == 404
    assert answer.json() == {"error": "Request for unknown model: 'nope' is not found"}
    assert client.get("/v2/models/nope/ready").status_code == 400


def test_a_tensor_in_json_passes_both_ways(client: httpx.Client) -> None:
    answer = infer(client, "identity", 1.5, 2.5)
    assert answer.json()["outputs"] == [
        {"name": "OUTPUT0", "datatype": "FP32", "shape": [2], "data": [1.5, 2.5]}
    ]


def test_a_large_binary_tensor_passes_both_ways(client: httpx.Client) -> None:
    # Larger than gRPC's own limit of 4 MiB.
    data = np.arange(1 << 21, dtype="<f4").tobytes()
    tensor = {
        "name": "INPUT0",
        "datatype": "FP32",
        "shape": [1 << 21],
        "parameters": {"binary_data_size": len(data)},
    }
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    length = {"Inference-Header-Content-Length": str(len(head))}
    answer = client.post("/v2/models/identity/infer", content=head + data, headers=length)
    assert answer.status_code == 200
    assert answer.content[int(answer.headers["inference-header-content-length"]) :] == data


def test_all_that_a_request_says_of_itself_gets_to_the_model(
    client: httpx.Client, small: TritonProcess
) -> None:
    parameters: dict[str, Any] = {"sequence_id": 7, "sequence_start": True, "sequence_end": True}
    parameters |= {"priority": 3, "timeout": 9_000_000, "text": "x", "half": 0.5, "is": True}
    body = body_for("told", "", **parameters) | {"id": "all"}
    body["outputs"] = [{"name": "OUTPUT0"}]
    answer = client.post("/v2/models/told/versions/1/infer", json=body)
    assert answer.json()["id"] == "all"
    (told,) = answer.json()["outputs"][0]["data"]
    assert json.loads(told) == parameters
    begun = small.wait_for("begin", id="all")
    assert begun["version"] == "1"
    assert begun["outputs"] == {"OUTPUT0": {}}


def test_classes_are_the_tritons_to_find(client: httpx.Client, small: TritonProcess) -> None:
    body = body_for("told", "", **{}) | {"id": "classes"}
    body["outputs"] = [{"name": "OUTPUT0", "parameters": {"classification": 2}}]
    answer = client.post("/v2/models/told/infer", json=body)
    # As it came; here they would be found in numbers only, and without their labels.
    assert answer.json()["outputs"][0]["data"] == ["{}"]
    begun = small.wait_for("begin", id="classes")
    assert begun["outputs"] == {"OUTPUT0": {"classification": 2}}


def test_generate_of_a_model_with_one_response(client: httpx.Client) -> None:
    answer = client.post("/v2/models/told/generate", json={"INPUT0": "", "more": 1})
    assert answer.json() == {
        "model_name": "told",
        "model_version": "1",
        "OUTPUT0": '{"more": 1}',
    }


@pytest.mark.parametrize("action", ["generate", "generate_stream"])
def test_a_decoupled_model_streams(client: httpx.Client, action: str) -> None:
    answer = client.post(f"/v2/models/stream/{action}", json={"INPUT0": 3, "id": "s"})
    assert answer.status_code == 200
    if action == "generate":
        assert "exactly 1 response" in answer.json()["error"]
    else:
        assert [frame["OUTPUT0"] for frame in frames(answer.text)] == [0, 1, 2]
        assert {frame["id"] for frame in frames(answer.text)} == {"s"}


def test_infer_of_a_decoupled_model_is_not_supported(client: httpx.Client) -> None:
    assert infer(client, "stream", 1).status_code == 501


def test_a_stream_goes_on_behind_an_error(client: httpx.Client) -> None:
    body = {"INPUT0": 1, "then": "it went wrong"}
    answer = client.post("/v2/models/stream/generate_stream", json=body)
    assert answer.status_code == 200
    first, error, last = frames(answer.text)
    assert (first["OUTPUT0"], error, last["OUTPUT0"]) == (0, {"error": "it went wrong"}, 1)


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("it went wrong", 500),
        ("[request id: x] unexpected shape", 400),
        ("[request id: x] Exceeds maximum queue size", 503),
    ],
)
def test_a_stream_that_begins_with_an_error_has_its_status(
    client: httpx.Client, text: str, status: int
) -> None:
    body = {"INPUT0": 0, "then": text}
    answer = client.post("/v2/models/stream/generate_stream", json=body)
    assert answer.status_code == status
    # Whoever is refused gets plain JSON; what a model said is an event.
    if status == 500:
        assert frames(answer.text)[0] == {"error": text}
    else:
        assert answer.json() == {"error": text}


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("INVALID_ARGUMENT", 400),
        ("NOT_FOUND", 404),
        ("ALREADY_EXISTS", 400),
        ("UNIMPLEMENTED", 501),
        ("UNAVAILABLE", 503),
        ("CANCELLED", 499),
        ("INTERNAL", 500),
        ("UNKNOWN", 400),
        ("PERMISSION_DENIED", 503),
    ],
)
def test_a_status_of_grpc_is_tritons_over_http(
    client: httpx.Client, code: str, status: int
) -> None:
    answer = infer(client, "fails", 1.0, code=code)
    assert answer.status_code == status
    assert f"it says {code}" in answer.json()["error"]


def test_models_are_loaded_and_unloaded_at_the_triton(
    client: httpx.Client, small: TritonProcess
) -> None:
    index = client.post("/v2/repository/index").json()
    assert {"name": "waits", "version": "1", "state": "READY"} in index
    unloading = {"parameters": {"unload_dependents": True}}
    assert client.post("/v2/repository/models/waits/unload", json=unloading).status_code == 200
    assert client.get("/v2/models/waits/ready").status_code == 400
    ready = client.post("/v2/repository/index", json={"ready": True}).json()
    assert "waits" not in {entry["name"] for entry in ready}
    files = {"config": "{}", "file:1/model.py": "cGFzcw=="}
    loading = {"parameters": files}
    assert client.post("/v2/repository/models/waits/load", json=loading).status_code == 200
    assert client.get("/v2/models/waits/ready").status_code == 200
    loaded = small.wait_for("load")
    assert loaded["parameters"] == {"config": "{}", "file:1/model.py": "pass"}
    assert small.wait_for("unload")["parameters"] == {"unload_dependents": True}
    no_base64 = {"parameters": {"file:1/model.py": "no base64!"}}
    answer = client.post("/v2/repository/models/waits/load", json=no_base64)
    assert answer.status_code == 400


def test_statistics_are_added_up_over_the_tritons(small: TritonProcess) -> None:
    with triton() as other, serving_gateway(small.port, other.port) as gateway:
        base = f"http://127.0.0.1:{gateway.port}/v2/models"
        before = httpx.get(f"{base}/identity/stats").json()["model_stats"][0]
        for _ in range(4):
            httpx.post(f"{base}/identity/infer", json=body_for("identity", 1.0))
        (after,) = httpx.get(f"{base}/identity/versions/1/stats").json()["model_stats"]
        assert after["inference_count"] - before["inference_count"] == 4
        assert after["response_stats"]["0"]["cancel"]["count"] == 2
        assert after["batch_stats"][0]["compute_infer"]["count"] == after["inference_count"]
        everything = httpx.get(f"{base}/stats").json()["model_stats"]
        assert {of["name"] for of in everything} >= {"identity", "stream"}
        assert httpx.get(f"{base}/nope/stats").status_code == 404


def test_settings_are_those_of_the_triton(client: httpx.Client) -> None:
    assert client.get("/v2/logging").json() == {"log_info": True}
    changes = {"log_info": False, "log_verbose_level": 2, "log_format": "ISO8601"}
    assert client.post("/v2/logging", json=changes).json() == changes
    assert client.post("/v2/logging", json={"log_info": 1.5}).status_code == 400
    changed = {"trace_level": ["TIMESTAMPS"], "trace_rate": "5"}
    answer = client.post("/v2/trace/setting", json={"trace_level": ["TIMESTAMPS"], "trace_rate": 5})
    assert answer.json() == changed
    answer = client.post("/v2/models/identity/trace/setting", json={"trace_level": None})
    assert answer.json()["trace_level"] == ["OFF"]
    assert client.post("/v2/trace/setting", json={"trace_rate": {}}).status_code == 400


def test_headers_go_along_if_they_are_named(small: TritonProcess) -> None:
    passing = HeaderPassing([("Key", "secret")], "traceparent|x-.*")
    sent: dict[str, Any] = {
        "traceparent": "00-1",
        "X-Kept": "yes",
        "X-Odd": "caf\u00e9".encode("latin-1"),
        "x-data-bin": "AA",
        "Cookie": "private",
    }
    with serving_gateway(small.port, passing=passing) as gateway:
        url = f"http://127.0.0.1:{gateway.port}/v2/models"
        for action, body in (
            ("identity/infer", body_for("identity", 1.0)),
            ("stream/generate_stream", {"INPUT0": 1}),
        ):
            answer = httpx.post(f"{url}/{action}", json=body | {"id": action}, headers=sent)
            assert answer.status_code == 200
            begun = small.wait_for("begin", id=action)
            assert begun["metadata"].items() >= {
                ("key", "secret"),
                ("traceparent", "00-1"),
                ("x-kept", "yes"),
            }
            assert not begun["metadata"].keys() & {"cookie", "x-odd", "x-data-bin"}


def test_a_triton_behind_tls_is_asked_if_its_certificate_is_trusted() -> None:
    body = body_for("identity", 1.0)
    with triton("--tls") as secure:
        trusting = Connecting(probe_seconds=0.2, root_certificates=PEM.read_bytes())
        with serving_gateway(secure.port, is_secure=True, connecting=trusting) as gateway:
            url = f"http://127.0.0.1:{gateway.port}/v2/models/identity/infer"
            assert httpx.post(url, json=body).status_code == 200
        with serving_gateway(secure.port, is_secure=True, ready=0) as gateway:
            url = f"http://127.0.0.1:{gateway.port}/v2/models/identity/infer"
            answer = httpx.post(url, json=body)
            assert answer.status_code == 503
            assert "no Triton can be reached" in answer.json()["error"]


def test_messages_are_no_larger_than_allowed(small: TritonProcess) -> None:
    large = body_for("identity", *[1.0] * 1000)
    limited = Connecting(probe_seconds=0.2, max_message_bytes=2000)
    with serving_gateway(small.port, connecting=limited) as gateway:
        url = f"http://127.0.0.1:{gateway.port}/v2/models/identity/infer"
        answer = httpx.post(url, json=large)
        assert answer.status_code == 400
        assert "--max-message-bytes" in answer.json()["error"]
    with triton("--max-bytes", "2000") as limiting, serving_gateway(limiting.port) as gateway:
        url = f"http://127.0.0.1:{gateway.port}/v2/models/identity/infer"
        answer = httpx.post(url, json=large)
        assert answer.status_code == 400
        assert "does not take the request" in answer.json()["error"]


def test_a_model_that_was_changed_behind_its_back_is_looked_at_again(
    small: TritonProcess,
) -> None:
    with (
        triton() as other,
        serving_gateway(other.port) as first,
        serving_gateway(other.port, max_age=0.0) as second,
    ):
        body = body_for("identity", 1.0)
        url = "http://127.0.0.1:{}/v2/models/identity/infer"
        assert httpx.post(url.format(second.port), json=body).status_code == 200
        httpx.post(f"http://127.0.0.1:{first.port}/v2/repository/models/identity/unload")
        wait_until(lambda: httpx.post(url.format(second.port), json=body).status_code == 404)
        httpx.post(f"http://127.0.0.1:{first.port}/v2/repository/models/identity/load")
        assert httpx.post(url.format(second.port), json=body).status_code == 200


def test_the_metrics_tell_of_each_triton(gateway: Gateway, client: httpx.Client) -> None:
    infer(client, "identity", 1.0)
    infer(client, "fails", 1.0, code="INTERNAL")
    lines = [
        line
        for line in gateway.metrics.render().decode().splitlines()
        if line.startswith("dw_upstream_")
    ]
    assert [re.sub(r',?upstream="[^"]*",?', "", line) for line in lines] == [
        "dw_upstream_ready{} 1.0",
        "dw_upstream_outstanding{} 0.0",
        'dw_upstream_requests_total{outcome="finished"} 1.0',
        'dw_upstream_requests_total{outcome="cancelled"} 0.0',
        'dw_upstream_requests_total{outcome="failed"} 1.0',
    ]
