"""``generate`` and ``generate_stream`` of models that take tensors."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import numpy as np
import pytest

from disconnect_watch.backends.infer import Code, InferError, InferRequest
from tests.support.function_models import (
    Arrays,
    FunctionModel,
    identity,
    post_models,
    tensor_config,
)

DECOUPLED = "model_transaction_policy { decoupled: true }"


async def post(model: FunctionModel, body: Any, action: str = "generate") -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return await post_models([model], f"/v2/models/{model.name}/{action}", content)


def counting(*, more: str = DECOUPLED, error_at: int = -1) -> FunctionModel:
    """Gives as many responses as its input says, one of which may be an error."""

    async def count(request: InferRequest) -> AsyncIterator[Arrays | InferError]:
        for index in range(int(request.inputs[0].to_numpy()[0])):
            if index == error_at:
                yield InferError(Code.INTERNAL, f"chunk {index} failed")
            else:
                yield {"OUTPUT0": np.array([index], "<i4")}

    return FunctionModel(tensor_config("count", "INT32", "1", more=more), count)


def events(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    frames = response.text.split("\n\n")
    assert frames.pop() == ""
    return [json.loads(frame.removeprefix("data: ")) for frame in frames]


@pytest.mark.asyncio
async def test_one_element_is_a_scalar_and_more_are_an_array() -> None:
    model = identity(datatype="STRING")
    one = await post(model, {"INPUT0": "a", "id": "r1"})
    assert (one.status_code, one.headers["content-type"]) == (200, "application/json")
    assert one.text == '{"OUTPUT0":"a","id":"r1","model_name":"identity","model_version":"1"}'
    two = await post(model, {"INPUT0": ["a", "b"]})
    assert two.json()["OUTPUT0"] == ["a", "b"]
    # As Triton, which sends it in chunks.
    assert "content-length" not in one.headers


@pytest.mark.asyncio
async def test_what_is_no_input_is_a_parameter() -> None:
    model = identity()
    body = {"INPUT0": 1, "temperature": 0.5, "parameters": {"deep": 1, "flag": True}}
    assert (await post(model, body)).status_code == 200
    assert model.requests[0].parameters == {"temperature": 0.5, "deep": 1, "flag": True}


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("dims", "more", "num_elements", "shape"),
    [
        ("-1", "", 3, (3,)),
        ("1", "", 1, (1,)),
        ("-1, -1", "", 4, (1, 4)),
        ("-1, 2", "", 4, (2, 2)),
        ("2, -1", "", 4, (2, 2)),
        ("2", "max_batch_size: 8", 6, (3, 2)),
        ("2", "", 3, None),
        ("2", "", 4, None),
        ("1", "", 0, None),
    ],
)
async def test_the_shape_follows_from_the_models(
    dims: str, more: str, num_elements: int, shape: tuple[int, ...] | None
) -> None:
    model = identity(dims=dims, more=more)
    response = await post(model, {"INPUT0": [0.5] * num_elements})
    if shape is None:
        assert response.status_code == 400
        assert "to tensor with proper shape" in response.json()["error"]
    else:
        assert response.status_code == 200
        assert model.requests[0].inputs[0].shape == shape


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"", 500, "The document is empty. at 0"),
        ({"INPUT0": "x"}, 500, "Unable to parse 'data': attempt to access JSON non-number"),
        ({"INPUT0": 1, "bad": {"x": 1}}, 400, "parameter 'bad' has invalid type"),
        ({"INPUT0": 1, "parameters": 5}, 500, "Unable to parse 'parameters'"),
        ({}, 400, "missing required input(s) ['INPUT0']"),
    ],
)
async def test_what_is_wrong_with_a_request_is_said(body: Any, status: int, message: str) -> None:
    for action in ("generate", "generate_stream"):
        response = await post(identity(), body, action)
        assert response.status_code == status
        assert message in response.json()["error"]


@pytest.mark.asyncio
async def test_a_compressed_request_is_refused() -> None:
    model = identity()
    response = await post_models(
        [model], "/v2/models/identity/generate", b"x", {"content-encoding": "gzip"}
    )
    assert (response.status_code, response.json()["error"]) == (
        400,
        "Unsupported content-encoding, only 'identity' is supported.",
    )


@pytest.mark.asyncio
async def test_each_response_is_an_event() -> None:
    response = await post(counting(), {"INPUT0": 3}, "generate_stream")
    assert response.status_code == 200
    assert [event["OUTPUT0"] for event in events(response)] == [0, 1, 2]


@pytest.mark.asyncio
async def test_no_response_is_no_event() -> None:
    response = await post(counting(), {"INPUT0": 0}, "generate_stream")
    assert (response.status_code, events(response)) == (200, [])


@pytest.mark.asyncio
async def test_an_error_among_events_does_not_end_them() -> None:
    response = await post(counting(error_at=1), {"INPUT0": 3}, "generate_stream")
    assert response.status_code == 200
    first, error, last = events(response)
    assert (first["OUTPUT0"], error, last["OUTPUT0"]) == (0, {"error": "chunk 1 failed"}, 2)


@pytest.mark.asyncio
async def test_the_first_response_has_the_status() -> None:
    response = await post(counting(error_at=0), {"INPUT0": 2}, "generate_stream")
    assert response.status_code == 500
    error, last = events(response)
    assert (error, last["OUTPUT0"]) == ({"error": "chunk 0 failed"}, 1)


@pytest.mark.asyncio
@pytest.mark.parametrize("num_responses", [0, 2])
async def test_generate_wants_one_response(num_responses: int) -> None:
    response = await post(counting(), {"INPUT0": num_responses})
    assert response.status_code == 200
    assert response.json()["error"].startswith("generate expects model to produce exactly 1")


@pytest.mark.asyncio
async def test_an_error_raised_amid_a_stream_ends_it_with_an_event() -> None:
    async def breaks(request: InferRequest) -> AsyncIterator[Arrays | InferError]:
        yield {"OUTPUT0": np.array([1], "<i4")}
        raise InferError(Code.INTERNAL, "the worker died")

    model = FunctionModel(tensor_config("breaks", "INT32", more=DECOUPLED), breaks)
    response = await post(model, {"INPUT0": 1}, "generate_stream")
    assert response.status_code == 200
    assert events(response)[1:] == [{"error": "the worker died"}]
    assert model.num_open == 0


@pytest.mark.asyncio
async def test_a_cancel_by_somebody_else_ends_the_stream_with_an_event() -> None:
    async def cancelled(request: InferRequest) -> AsyncIterator[Arrays | InferError]:
        yield {"OUTPUT0": np.array([1], "<i4")}
        request.cancel.cancel()
        raise InferError(Code.CANCELLED, "cancelled")

    model = FunctionModel(tensor_config("cancelled", "INT32", more=DECOUPLED), cancelled)
    response = await post(model, {"INPUT0": 1}, "generate_stream")
    assert events(response)[-1] == {"error": "cancelled"}
