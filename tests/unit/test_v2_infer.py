"""``infer``: what a request may be, what its answer is, byte for byte where that is promised."""

import gzip
import json
import math
import re
import zlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import numpy as np
import pytest

from disconnect_watch.backends.infer import Code, InferError, InferRequest
from disconnect_watch.server.v2.compression import accepted_coding
from tests.support.function_models import (
    Arrays,
    FunctionModel,
    echo,
    identity,
    post_models,
    tensor_config,
)

FLOATS = [1.5, -2.0, 0.25]
BYTES_OF_FLOATS = np.array(FLOATS, "<f4").tobytes()
LENGTH = "inference-header-content-length"


def tensor(**more: Any) -> dict[str, Any]:
    return {"name": "INPUT0", "datatype": "FP32", "shape": [3], **more}


def document(**more: Any) -> dict[str, Any]:
    return {"inputs": [tensor(data=FLOATS)], **more}


async def post(
    body: dict[str, Any] | bytes,
    model: FunctionModel | None = None,
    headers: dict[str, str] | None = None,
    **options: Any,
) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    model = model or identity()
    return await post_models([model], f"/v2/models/{model.name}/infer", content, headers, **options)


def binary(body: dict[str, Any], data: bytes) -> tuple[bytes, dict[str, str]]:
    head = json.dumps(body).encode()
    return head + data, {LENGTH: str(len(head))}


def split(response: httpx.Response) -> tuple[dict[str, Any], bytes]:
    at = int(response.headers[LENGTH])
    head: dict[str, Any] = json.loads(response.content[:at])
    return head, response.content[at:]


@pytest.mark.asyncio
async def test_json_comes_back_as_json() -> None:
    response = await post(document(id="7"))
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    assert response.json() == {
        "id": "7",
        "model_name": "identity",
        "model_version": "1",
        "outputs": [{"name": "OUTPUT0", "datatype": "FP32", "shape": [3], "data": FLOATS}],
    }


@pytest.mark.asyncio
async def test_binary_comes_back_as_binary() -> None:
    content, headers = binary(
        {
            "inputs": [tensor(parameters={"binary_data_size": 12})],
            "parameters": {"binary_data_output": True},
        },
        BYTES_OF_FLOATS,
    )
    response = await post(content, headers=headers)
    assert response.headers["content-type"] == "application/octet-stream"
    head, data = split(response)
    assert head["outputs"] == [
        {
            "name": "OUTPUT0",
            "datatype": "FP32",
            "shape": [3],
            "parameters": {"binary_data_size": 12},
        }
    ]
    assert data == BYTES_OF_FLOATS


@pytest.mark.asyncio
@pytest.mark.parametrize("datatype", ["FP16", "BF16", "BOOL", "INT8", "UINT64", "FP64"])
async def test_every_datatype_passes_in_binary(datatype: str) -> None:
    data = bytes(range(16)) if datatype != "BOOL" else b"\0\1\1\0"
    size = {"FP16": 2, "BF16": 2, "BOOL": 1, "INT8": 1, "UINT64": 8, "FP64": 8}[datatype]

    async def view(request: InferRequest) -> AsyncIterator[Arrays | InferError]:
        # The memory of the body itself: nothing was copied on the way.
        assert isinstance(request.inputs[0].data, memoryview)
        yield {"OUTPUT0": np.frombuffer(request.inputs[0].data, "u1")}

    content, headers = binary(
        {
            "inputs": [
                {
                    "name": "INPUT0",
                    "datatype": datatype,
                    "shape": [len(data) // size],
                    "parameters": {"binary_data_size": len(data)},
                }
            ],
            "outputs": [{"name": "OUTPUT0", "parameters": {"binary_data": True}}],
        },
        data,
    )
    response = await post(
        content, FunctionModel(tensor_config("view", datatype), view), headers=headers
    )
    assert split(response)[1] == data


@pytest.mark.asyncio
async def test_a_large_tensor_is_sent_as_it_lies() -> None:
    data = np.arange(1 << 16, dtype="<f4")
    content, headers = binary(
        {
            "inputs": [
                {
                    "name": "INPUT0",
                    "datatype": "FP32",
                    "shape": [1 << 16],
                    "parameters": {"binary_data_size": data.nbytes},
                }
            ],
            "parameters": {"binary_data_output": True},
        },
        data.tobytes(),
    )
    response = await post(content, headers={**headers, "accept-encoding": "identity"})
    assert int(response.headers["content-length"]) == len(response.content)
    assert split(response)[1] == data.tobytes()


@pytest.mark.asyncio
async def test_a_body_without_json_is_the_only_input() -> None:
    response = await post(BYTES_OF_FLOATS, headers={LENGTH: "0"})
    head, data = split(response)
    assert head["outputs"][0]["shape"] == [3]
    assert data == BYTES_OF_FLOATS


@pytest.mark.asyncio
async def test_raw_text_gets_its_length() -> None:
    model = identity(datatype="STRING", dims="1", more="max_batch_size: 4")
    head, data = split(await post("é".encode(), model, headers={LENGTH: "0"}))
    assert head["outputs"][0]["shape"] == [1, 1]
    assert data == b"\2\0\0\0\xc3\xa9"


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("dims", "message"), [("-1, -1", "one dimension may be of any size"), ("2", "Expected 8")]
)
async def test_a_raw_request_must_fit_the_model(dims: str, message: str) -> None:
    response = await post(BYTES_OF_FLOATS, identity(dims=dims), headers={LENGTH: "0"})
    assert response.status_code == 400
    assert message in response.json()["error"]


@pytest.mark.asyncio
async def test_outputs_come_as_they_are_wanted() -> None:
    async def both(request: InferRequest) -> AsyncIterator[Arrays | InferError]:
        yield {name: np.array([1, 2], "<i4") for name in ("A", "B", "C")}

    outputs = " ".join(f'output {{ name: "{n}" data_type: TYPE_INT32 dims: 2 }}' for n in "ABC")
    model = FunctionModel(
        f'name: "abc" input {{ name: "INPUT0" data_type: TYPE_FP32 dims: -1 }} {outputs}', both
    )
    wanted = [{"name": "C", "parameters": {"binary_data": True}}, {"name": "A"}]
    head, data = split(await post(document(outputs=wanted), model))
    assert head["outputs"] == [
        {"name": "A", "datatype": "INT32", "shape": [2], "data": [1, 2]},
        {
            "name": "C",
            "datatype": "INT32",
            "shape": [2],
            "parameters": {"binary_data_size": 8},
        },
    ]
    assert data == np.array([1, 2], "<i4").tobytes()
    assert model.requests[0].requested_outputs == ["C", "A"]


@pytest.mark.asyncio
async def test_the_best_classes_instead_of_the_values() -> None:
    config = tensor_config("classes", "FP32", "4", more="max_batch_size: 4")
    model = FunctionModel(config, echo, OUTPUT0=["cat", "dog"])
    body = {
        "inputs": [
            {
                "name": "INPUT0",
                "datatype": "FP32",
                "shape": [2, 4],
                "data": [0.5, 0.9, 0.9, 0.1, 3, 2, 1, 0],
            }
        ],
        "outputs": [{"name": "OUTPUT0", "parameters": {"classification": 3}}],
    }
    (output,) = (await post(body, model)).json()["outputs"]
    assert (output["datatype"], output["shape"]) == ("BYTES", [2, 3])
    assert output["data"] == [
        "0.900000:1:dog",
        "0.900000:2",
        "0.500000:0:cat",
        "3.000000:0:cat",
        "2.000000:1:dog",
        "1.000000:2",
    ]


@pytest.mark.asyncio
async def test_what_has_no_order_has_no_best_class() -> None:
    body = {
        "inputs": [{"name": "INPUT0", "datatype": "BYTES", "shape": [1], "data": ["a"]}],
        "outputs": [{"name": "OUTPUT0", "parameters": {"classification": 1}}],
    }
    response = await post(body, identity(datatype="STRING"))
    assert response.status_code == 400
    assert "unsupported type 'BYTES'" in response.json()["error"]


@pytest.mark.asyncio
async def test_parameters_reach_the_model() -> None:
    model = identity()
    parameters = {
        "sequence_id": 9,
        "sequence_start": True,
        "sequence_end": True,
        "priority": 2,
        "timeout": 9_000_000,
        "x": 1,
        "y": "z",
        "f": 1.5,
        "b": False,
    }
    assert (await post(document(parameters=parameters), model)).status_code == 200
    (request,) = model.requests
    assert (request.sequence_id, request.sequence_start, request.sequence_end) == (9, True, True)
    assert (request.priority, request.timeout_us) == (2, 9_000_000)
    assert request.parameters == {"x": 1, "y": "z", "f": 1.5, "b": False}


@pytest.mark.asyncio
async def test_headers_reach_the_model_if_their_names_match() -> None:
    model = identity()
    pattern = re.compile("my-.*|priority", re.IGNORECASE)
    headers = {"My-Header": "v", "Other": "w"}
    response = await post(document(), model, headers, header_forward_pattern=pattern)
    assert response.status_code == 200
    assert model.requests[0].parameters == {"my-header": "v"}
    refused = await post(document(), model, {"Priority": "1"}, header_forward_pattern=pattern)
    assert (refused.status_code, refused.json()["error"]) == (
        400,
        "Header 'priority' is reserved for Triton usage and cannot be forwarded.",
    )


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({}, 500, "Unable to parse 'inputs': attempt to access non-existing object member"),
        (document(id=5), 500, "Unable to parse 'id': attempt to access JSON non-string"),
        (document(parameters=[]), 500, "Unable to parse 'parameters': .* non-object as object"),
        (document(parameters={"triton_x": 1}), 400, "parameter keys starting with 'triton_'"),
        (document(parameters={"x": [1]}), 400, "parameter 'x' has invalid type"),
        (document(parameters={"priority": -1}), 500, "Unable to parse 'priority'"),
        ({"inputs": [5]}, 500, "Unable to parse 'inputs': .* non-object as object"),
        ({"inputs": [tensor()]}, 400, "But no field is set"),
        (
            {"inputs": [tensor(data=FLOATS, parameters={"binary_data_size": 1})]},
            400,
            "But set 'data' 'binary_data_size' in 'parameters'",
        ),
        ({"inputs": [tensor(shape=[-1])]}, 500, "Unable to parse 'shape': .*non-unsigned"),
        ({"inputs": [tensor(shape=[1 << 40, 1 << 40], data=[])]}, 400, "exceed maximum size of"),
        ({"inputs": [tensor(datatype="FP8", data=[])]}, 400, "it must be one of BOOL, UINT8"),
        ({"inputs": [tensor(datatype="FP16", data=[1])]}, 400, "receiving FP16 data via JSON"),
        (document(outputs=[{"name": "NOPE"}]), 400, "unexpected inference output 'NOPE'"),
        (document(outputs=[{}]), 500, "Unable to parse 'name'"),
        (
            document(outputs=[{"name": "OUTPUT0", "parameters": {"shared_memory_region": "r"}}]),
            500,
            "Unable to parse 'shared_memory_byte_size'",
        ),
        (b"{", 500, "failed to parse the request JSON buffer: Missing a name"),
        (b"[]", 400, "must be an object"),
    ],
)
async def test_what_is_wrong_with_a_request_is_said(body: Any, status: int, message: str) -> None:
    response = await post(body)
    assert response.status_code == status, response.text
    assert re.search(message, response.json()["error"])


@pytest.mark.asyncio
@pytest.mark.parametrize("value", ["-5", "99999", "x", "1" * 40])
async def test_a_length_of_json_that_cannot_be_is_refused(value: str) -> None:
    response = await post(document(), headers={LENGTH: value})
    assert response.status_code == 400
    assert "inference header size should be in range (0, " in response.json()["error"]


@pytest.mark.asyncio
async def test_binary_that_is_too_short_or_too_long_is_refused() -> None:
    body = {"inputs": [tensor(parameters={"binary_data_size": 12})]}
    for data, message in (
        (BYTES_OF_FLOATS[:-4], "unexpected size for input 'INPUT0', expecting 4 additional bytes"),
        (BYTES_OF_FLOATS + b"x", "unexpected additional input data for model 'identity'"),
    ):
        content, headers = binary(body, data)
        response = await post(content, headers=headers)
        assert response.status_code == 400
        assert message in response.json()["error"]


@pytest.mark.asyncio
@pytest.mark.parametrize("coding", ["gzip", "deflate", "GZIP"])
async def test_a_compressed_request_is_read(coding: str) -> None:
    plain = json.dumps(document()).encode()
    content = zlib.compress(plain) if coding == "deflate" else gzip.compress(plain)
    response = await post(content, headers={"content-encoding": coding})
    assert response.json()["outputs"][0]["data"] == FLOATS


@pytest.mark.asyncio
async def test_what_cannot_be_decompressed_is_refused() -> None:
    whole = gzip.compress(json.dumps(document()).encode())
    for content, message in (
        (b"notgzip" * 9, "cannot decompress the request as gzip"),
        (whole[:-9], "not all of it"),
        (whole + b"x", "1 too many"),
        (gzip.compress(bytes(10_000)), "more than 1000 bytes when it is decompressed"),
    ):
        response = await post(content, headers={"content-encoding": "gzip"}, max_body_bytes=1000)
        assert response.status_code == 400
        assert message in response.json()["error"]


@pytest.mark.asyncio
async def test_a_coding_that_nobody_knows_is_refused_with_those_that_are_known() -> None:
    response = await post(document(), headers={"content-encoding": "br"})
    assert (response.status_code, response.json()) == (
        501,
        {"error": "Unsupported compression type"},
    )
    assert response.headers["accept-encoding"] == "gzip, deflate"


@pytest.mark.asyncio
@pytest.mark.parametrize("coding", ["gzip", "deflate"])
async def test_an_answer_is_compressed_for_who_asks(coding: str) -> None:
    # httpx undoes it.
    response = await post(document(), headers={"accept-encoding": coding})
    assert response.headers["content-encoding"] == coding
    assert response.json()["outputs"][0]["data"] == FLOATS


@pytest.mark.parametrize(
    ("accepts", "coding"),
    [
        ("gzip, deflate", "gzip"),
        ("gzip;q=0", "identity"),
        ("gzip;q=0.1, deflate;q=0.5", "deflate"),
        ("identity;q=1, gzip;q=0.5", "identity"),
        ("*", "identity"),
        ("br", "identity"),
    ],
)
def test_the_highest_weight_wins(accepts: str, coding: str) -> None:
    assert accepted_coding(accepts) == coding


@pytest.mark.asyncio
async def test_a_number_that_is_none_is_null_but_in_strict_mode() -> None:
    async def odd(request: InferRequest) -> AsyncIterator[Arrays | InferError]:
        yield {"OUTPUT0": np.array([math.nan, math.inf], "<f4")}

    model = FunctionModel(tensor_config("odd", "FP32"), odd)
    assert (await post(document(), model)).json()["outputs"][0]["data"] == [None, None]
    assert '"data":[NaN,Infinity]' in (await post(document(), model, strict=True)).text


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("code", "status", "strict_status"),
    [
        (Code.UNKNOWN, 400, 400),
        (Code.INTERNAL, 500, 500),
        (Code.NOT_FOUND, 404, 404),
        (Code.INVALID_ARG, 400, 400),
        (Code.UNAVAILABLE, 503, 503),
        (Code.UNSUPPORTED, 501, 501),
        (Code.ALREADY_EXISTS, 400, 400),
        (Code.CANCELLED, 499, 400),
    ],
)
async def test_a_models_error_is_answered_by_its_code(
    code: Code, status: int, strict_status: int
) -> None:
    async def fail(request: InferRequest) -> AsyncIterator[Arrays | InferError]:
        yield InferError(code, "says no")

    model = FunctionModel(tensor_config("fail", "FP32"), fail)
    for strict, expected in ((False, status), (True, strict_status)):
        response = await post(document(), model, strict=strict)
        assert (response.status_code, response.json()) == (expected, {"error": "says no"})
        assert response.headers.get("x-should-retry") == ("false" if expected == 499 else None)
    assert model.num_open == 0


@pytest.mark.asyncio
async def test_a_model_with_many_responses_is_not_for_infer() -> None:
    model = identity(more="model_transaction_policy { decoupled: true }")
    response = await post(document(), model)
    assert response.status_code == 501
    assert "decoupled transaction policy" in response.json()["error"]


@pytest.mark.asyncio
async def test_more_than_one_response_is_the_models_fault() -> None:
    async def twice(request: InferRequest) -> AsyncIterator[Arrays | InferError]:
        for _ in range(2):
            yield {"OUTPUT0": np.array([1], "<f4")}

    response = await post(document(), FunctionModel(tensor_config("twice", "FP32"), twice))
    assert (response.status_code, response.json()["error"]) == (
        500,
        "expected a single response, got 2",
    )


@pytest.mark.asyncio
async def test_a_crash_is_left_to_the_server_to_log() -> None:
    async def crash(request: InferRequest) -> AsyncIterator[Arrays | InferError]:
        yield {"OUTPUT0": np.array([1 // len(request.parameters)])}

    model = FunctionModel(tensor_config("crash", "FP32"), crash)
    with pytest.raises(ZeroDivisionError):
        await post(document(), model)
