"""The same flows by Triton's client for asyncio, which leaves by the cancel of a task."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import tritonclient.http.aio as triton  # type: ignore[import-untyped]
from tritonclient.utils import InferenceServerException  # type: ignore[import-untyped]

from tests.support.command import Process
from tests.support.models import until
from tests.triton.test_clients import events, numbers, text_input

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180), pytest.mark.asyncio]


@pytest_asyncio.fixture
async def client(server: Process) -> AsyncIterator[triton.InferenceServerClient]:
    async with triton.InferenceServerClient(f"127.0.0.1:{server.port}") as client:
        yield client


@pytest.mark.parametrize("binary", [True, False])
async def test_the_aio_client_adds_and_subtracts(
    client: triton.InferenceServerClient, binary: bool
) -> None:
    inputs, a, b = numbers(binary)
    outputs = [triton.InferRequestedOutput(f"OUTPUT{i}", binary_data=binary) for i in range(2)]
    result = await client.infer("simple", inputs, outputs=outputs, request_id="7")
    assert result.get_response()["id"] == "7"
    assert (result.as_numpy("OUTPUT0") == a + b).all()
    assert (result.as_numpy("OUTPUT1") == a - b).all()


@pytest.mark.parametrize("compression", ["gzip", "deflate"])
async def test_the_aio_client_compresses(
    client: triton.InferenceServerClient, compression: str
) -> None:
    inputs, a, b = numbers(True)
    result = await client.infer(
        "simple",
        inputs,
        request_compression_algorithm=compression,
        response_compression_algorithm=compression,
    )
    assert (result.as_numpy("OUTPUT0") == a + b).all()


async def test_the_aio_client_sends_text(client: triton.InferenceServerClient) -> None:
    tensor = triton.InferInput("INPUT0", [1, 3], "BYTES")
    tensor.set_data_from_numpy(np.array([["a", "é", ""]], object))
    result = await client.infer("identity_bytes", [tensor])
    assert [each.decode() for each in result.as_numpy("OUTPUT0")[0]] == ["a", "é", ""]


async def test_the_aio_client_asks_what_is_served(client: triton.InferenceServerClient) -> None:
    assert await client.is_server_live()
    assert await client.is_model_ready("simple", "1")
    assert (await client.get_model_metadata("simple"))["inputs"][0]["shape"] == [-1, 16]
    assert (await client.get_model_config("simple"))["max_batch_size"] == 8
    index = await client.get_model_repository_index()
    assert {entry["name"] for entry in index} >= {"simple", "stream"}
    assert (await client.get_trace_settings("simple"))["trace_level"] == ["OFF"]
    statistics = await client.get_inference_statistics("simple")
    assert statistics["model_stats"][0]["name"] == "simple"
    with pytest.raises(InferenceServerException, match="unknown model: 'nope' is not found"):
        await client.get_model_metadata("nope")


async def test_a_sequence_of_the_aio_client_reaches_its_model(
    client: triton.InferenceServerClient,
) -> None:
    said = []
    for step, (start, end) in enumerate([(True, False), (False, False), (False, True)]):
        result = await client.infer(
            "params",
            text_input(str(step)),
            sequence_id=42,
            sequence_start=start,
            sequence_end=end,
            headers={"X-Tenant": "t"},
        )
        said.append(bytes(result.as_numpy("text_output")[0]))
    for text, flags in zip(said, (1, 0, 2), strict=True):
        assert b"corr=42 flags=%d" % flags in text
        assert b'"x-tenant":"t"' in text


async def test_many_requests_at_once_are_each_answered(
    client: triton.InferenceServerClient,
) -> None:
    async def ask(number: int) -> bool:
        inputs, _, b = numbers(True)
        a = np.full((1, 16), number, np.int32)
        inputs[0].set_data_from_numpy(a)
        result = await client.infer("simple", inputs)
        return bool((result.as_numpy("OUTPUT0") == a + b).all())

    assert all(await asyncio.gather(*map(ask, range(32))))


async def test_a_task_that_is_cancelled_ends_its_model(
    client: triton.InferenceServerClient, log: Path
) -> None:
    asking = asyncio.create_task(client.infer("slow_poll", text_input("dropped", delay=100.0)))
    await until(lambda: events(log, "start", "dropped"))
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await until(lambda: events(log, "cancel_seen", "dropped"))


async def test_an_aio_client_that_times_out_ends_its_model(server: Process, log: Path) -> None:
    address = f"127.0.0.1:{server.port}"
    async with triton.InferenceServerClient(address, conn_timeout=0.5) as client:
        with pytest.raises(asyncio.TimeoutError):
            await client.infer("slow_poll", text_input("hasty", delay=100.0))
    await until(lambda: events(log, "cancel_seen", "hasty"))
