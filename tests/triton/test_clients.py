"""``disconnect-watch serve --model-repository`` with Triton's own client and models."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton  # type: ignore[import-untyped]
from tritonclient.utils import (  # type: ignore[import-untyped]
    InferenceServerException,
    shared_memory,
)

from tests.support.command import Process, running
from tests.support.http import Client
from tests.support.net import wait_until
from tests.triton.conformance import copy_models

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.fixture
def client(server: Process) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(f"127.0.0.1:{server.port}") as client:
        yield client


def events(log: Path, name: str, text: str) -> list[dict[str, Any]]:
    """What the models said of a request, up to the last whole line."""
    lines = log.read_text().rpartition("\n")[0].splitlines() if log.exists() else []
    said = map(json.loads, lines)
    return [line for line in said if (line["ev"], line["text"]) == (name, text)]


def numbers(binary: bool) -> tuple[list[Any], "np.ndarray[Any, Any]", "np.ndarray[Any, Any]"]:
    a = np.arange(16, dtype=np.int32).reshape(1, 16)
    b = np.ones((1, 16), np.int32)
    inputs = [triton.InferInput(f"INPUT{i}", [1, 16], "INT32") for i in range(2)]
    for tensor, array in zip(inputs, (a, b), strict=True):
        tensor.set_data_from_numpy(array, binary_data=binary)
    return inputs, a, b


def text_input(text: str, **more: float) -> list[Any]:
    tensor = triton.InferInput("text_input", [1], "BYTES")
    tensor.set_data_from_numpy(np.array([text.encode()], object))
    inputs = [tensor]
    for name, value in more.items():
        inputs.append(triton.InferInput(name, [1], "FP32"))
        inputs[-1].set_data_from_numpy(np.array([value], np.float32))
    return inputs


@pytest.mark.parametrize("binary", [True, False])
def test_tritons_client_adds_and_subtracts(
    client: triton.InferenceServerClient, binary: bool
) -> None:
    inputs, a, b = numbers(binary)
    outputs = [triton.InferRequestedOutput(f"OUTPUT{i}", binary_data=binary) for i in range(2)]
    result = client.infer("simple", inputs, outputs=outputs, request_id="7")
    assert result.get_response()["id"] == "7"
    assert (result.as_numpy("OUTPUT0") == a + b).all()
    assert (result.as_numpy("OUTPUT1") == a - b).all()


@pytest.mark.parametrize("compression", ["gzip", "deflate"])
def test_tritons_client_compresses(client: triton.InferenceServerClient, compression: str) -> None:
    inputs, a, b = numbers(True)
    result = client.infer(
        "simple",
        inputs,
        request_compression_algorithm=compression,
        response_compression_algorithm=compression,
    )
    assert (result.as_numpy("OUTPUT0") == a + b).all()


def test_tritons_client_sends_text(client: triton.InferenceServerClient) -> None:
    texts = np.array([["a", "é", ""]], object)
    tensor = triton.InferInput("INPUT0", [1, 3], "BYTES")
    tensor.set_data_from_numpy(texts)
    result = client.infer("identity_bytes", [tensor])
    assert [each.decode() for each in result.as_numpy("OUTPUT0")[0]] == ["a", "é", ""]


def test_tritons_client_asks_what_is_served(client: triton.InferenceServerClient) -> None:
    assert client.is_server_live()
    assert not client.is_server_ready()  # one of the models can't be loaded
    assert client.is_model_ready("simple", "1")
    assert client.get_server_metadata()["name"] == "disconnect_watch"
    assert client.get_model_metadata("simple")["inputs"][0]["shape"] == [-1, 16]
    assert client.get_model_config("simple")["max_batch_size"] == 8
    assert {entry["name"] for entry in client.get_model_repository_index()} >= {"simple", "stream"}
    assert client.get_log_settings()["log_info"] is True
    assert client.get_trace_settings("simple")["trace_level"] == ["OFF"]
    client.infer("simple", numbers(True)[0])
    (of_model,) = client.get_inference_statistics("simple")["model_stats"]
    assert of_model["inference_stats"]["success"]["count"] >= 1
    with pytest.raises(InferenceServerException, match="unknown model: 'nope' is not found"):
        client.get_model_metadata("nope")


def test_tritons_client_shares_memory(client: triton.InferenceServerClient) -> None:
    inputs, a, b = numbers(True)
    size = a.nbytes
    region = shared_memory.create_shared_memory_region("dw_in_out", "/dw_test_in_out", 4 * size)
    try:
        shared_memory.set_shared_memory_region(region, [a, b])
        client.register_system_shared_memory("dw_in_out", "/dw_test_in_out", 4 * size)
        assert client.get_system_shared_memory_status()[0]["name"] == "dw_in_out"
        for index, tensor in enumerate(inputs):
            tensor.set_shared_memory("dw_in_out", size, offset=index * size)
        outputs = [triton.InferRequestedOutput(f"OUTPUT{i}") for i in range(2)]
        for index, output in enumerate(outputs, 2):
            output.set_shared_memory("dw_in_out", size, offset=index * size)
        client.infer("simple", inputs, outputs=outputs)
        total = shared_memory.get_contents_as_numpy(region, np.int32, [1, 16], 2 * size)
        assert (total == a + b).all()
        client.unregister_system_shared_memory()
        assert client.get_system_shared_memory_status() == []
    finally:
        shared_memory.destroy_shared_memory_region(region)


def test_parameters_sequences_and_headers_reach_a_model(
    client: triton.InferenceServerClient,
) -> None:
    result = client.infer(
        "params",
        text_input("x"),
        request_id="r",
        sequence_id=42,
        sequence_start=True,
        parameters={"own": 3},
        headers={"X-Tenant": "t"},
    )
    (said,) = result.as_numpy("text_output")
    assert b"corr=42 flags=1" in said
    assert b'"own":3' in said
    assert b'"x-tenant":"t"' in said


def test_a_client_that_times_out_ends_its_model(server: Process, log: Path) -> None:
    address = f"127.0.0.1:{server.port}"
    with (
        triton.InferenceServerClient(address, network_timeout=0.5) as client,
        pytest.raises(Exception, match="timed out"),
    ):
        client.infer("slow_poll", text_input("impatient", delay=100.0))
    wait_until(lambda: bool(events(log, "cancel_seen", "impatient")), 30)


def test_events_come_as_a_model_makes_them_and_end_with_their_client(
    server: Process, log: Path
) -> None:
    path = "/v2/models/stream/generate_stream"
    with Client(server.port) as client:
        client.post(path, {"text_input": "tok", "n": 2, "gap": 0.0})
        status, _, body = client.read_response()
        frames = body.decode().split("\n\n")[:-1]
        assert status == 200
        assert [json.loads(each.removeprefix("data: "))["index"] for each in frames] == [0, 1]
        client.post(path, {"text_input": "endless", "n": 100_000, "gap": 0.01})
        client.read_until(b'"index":1')
    wait_until(lambda: bool(events(log, "cancel_seen", "endless")), 30)


def test_what_was_cancelled_is_counted_as_such(server: Process, log: Path) -> None:
    with Client(server.port) as client:
        client.post("/v2/models/slow_poll/generate", {"text_input": "counted", "delay": 100.0})
        wait_until(lambda: bool(events(log, "start", "counted")), 30)
    wait_until(lambda: bool(events(log, "end", "counted")), 30)
    cancelled = 'nv_inference_request_failure{model="slow_poll",version="1",reason="CANCELED"}'

    def num_cancelled() -> int:
        (line,) = (line for line in server.metrics().splitlines() if line.startswith(cancelled))
        return int(line.split()[-1])

    wait_until(lambda: num_cancelled() >= 1)


def test_models_are_loaded_and_unloaded_by_request(tmp_path: Path) -> None:
    models = copy_models(tmp_path, "simple")
    options = ("--model-control-mode", "explicit")
    with running("--model-repository", str(models), *options, within=60) as server:
        with triton.InferenceServerClient(f"127.0.0.1:{server.port}") as client:
            assert client.get_model_repository_index() == [{"name": "simple"}]
            assert not client.is_model_ready("simple")
            client.load_model("simple")
            assert client.is_model_ready("simple")
            client.infer("simple", numbers(True)[0])
            client.unload_model("simple")
            assert not client.is_model_ready("simple")
            with pytest.raises(InferenceServerException, match="failed to load 'nope'"):
                client.load_model("nope")
        server.process.terminate()
        assert server.wait() == 0
