"""A request is held against its model's configuration, in Triton's words."""

import numpy as np
import pytest

from disconnect_watch.backends.infer import Code, InferError, InferRequest, InferTensor
from disconnect_watch.backends.model_config import complete, from_document
from disconnect_watch.backends.validate import Validator


def validator(max_batch_size: int = 8) -> Validator:
    config = from_document(
        {
            "max_batch_size": max_batch_size,
            "input": [
                {"name": "A", "data_type": "TYPE_INT32", "dims": [2]},
                {"name": "B", "data_type": "TYPE_STRING", "dims": [-1], "optional": True},
            ],
            "output": [{"name": "C", "data_type": "TYPE_INT32", "dims": [2]}],
        }
    )
    complete(config, "m")
    return Validator(config)


def a(*shape: int, datatype: str = "INT32", data: bytes | None = None) -> InferTensor:
    size = int(np.prod(shape)) * 4
    return InferTensor("A", datatype, shape, bytes(size) if data is None else data)


def b(*shape: int, data: bytes) -> InferTensor:
    return InferTensor("B", "BYTES", shape, data)


def test_batch_size_is_the_first_dimension_of_all() -> None:
    request = InferRequest(inputs=[a(3, 2), b(3, 1, data=b"\1\0\0\0x" * 3)])
    assert validator().check(request) == 3
    assert validator(0).check(InferRequest(inputs=[a(2)])) == 1


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (
            [],
            "expected number of inputs between 1 and 2 but got 0 inputs for model 'm'. Got "
            "input(s) [], but missing required input(s) ['A']. Please provide all required "
            "input(s).",
        ),
        ([InferTensor("Z", "INT32", (1,), b"")], "unexpected inference input 'Z' for model 'm'"),
        ([a(1, 2), a(1, 2)], "input 'A' already exists in request"),
        ([a()], "input 'A' has no shape but model requires batch dimension for 'm'"),
        (
            [a(1, 2), b(2, 1, data=b"")],
            "input 'B' batch size does not match other inputs for 'm'",
        ),
        ([a(9, 2)], "inference request batch-size must be <= 8 for 'm'"),
        ([a(0, 2)], "inference request batch-size must be >= 1 for 'm'"),
        (
            [a(1, 2, datatype="FP32")],
            "inference input 'A' data-type is 'FP32', but model 'm' expects 'INT32'",
        ),
        (
            [a(1, 2, data=b"1234567")],
            "input byte size mismatch for input 'A' for model 'm'. Expected 8, got 7",
        ),
        (
            [a(1, 2), b(1, 2, data=b"\1\0\0\0x")],
            "unexpected number of string elements 1 for inference input 'B', expecting 2 for "
            "model 'm'",
        ),
        (
            [a(1, 2), b(1, 1, data=b"\1\0\0\0x" * 2)],
            "unexpected number of string elements 2 for inference input 'B', expecting 1 for "
            "model 'm'",
        ),
        (
            [a(1, 2), b(1, 1, data=b"\1\0")],
            "incomplete string length indicator for inference input 'B' for model 'm', expecting "
            "4 bytes but only 2 bytes available",
        ),
        (
            [a(1, 2), b(1, 1, data=b"\5\0\0\0x")],
            "incomplete string data for inference input 'B' for model 'm', expecting string of "
            "length 5 but only 1 bytes available",
        ),
    ],
)
def test_request_that_does_not_fit_is_refused(inputs: list[InferTensor], message: str) -> None:
    with pytest.raises(InferError) as caught:
        validator().check(InferRequest(id="r", inputs=inputs))
    assert caught.value.message == f"[request id: r] {message}"
    assert caught.value.code is Code.INVALID_ARG


@pytest.mark.parametrize("shape", [(1, 3), (1, 2, 1), (1,)])
def test_shape_that_does_not_fit_is_refused_with_a_note(shape: tuple[int, ...]) -> None:
    with pytest.raises(InferError) as caught:
        validator().check(InferRequest(inputs=[a(*shape)]))
    got = ",".join(map(str, shape))
    assert caught.value.message.startswith(
        "[request id: <id_unknown>] unexpected shape for input 'A' for model 'm'. "
        f"Expected [-1,2], got [{got}]. NOTE: Setting a non-zero max_batch_size"
    )


def test_output_that_is_not_there_is_refused() -> None:
    with pytest.raises(InferError, match="unexpected inference output 'D' for model 'm'"):
        validator().check(InferRequest(inputs=[a(1, 2)], requested_outputs=["D"]))


def test_requests_with_other_shapes_or_inputs_share_no_batch() -> None:
    key = validator().batch_key
    one = key(InferRequest(inputs=[a(1, 2), b(1, 1, data=b"")]))
    assert one == key(InferRequest(inputs=[b(3, 1, data=b""), a(3, 2)]))
    assert one != key(InferRequest(inputs=[a(1, 2), b(1, 2, data=b"")]))
    assert one != key(InferRequest(inputs=[a(1, 2)]))
