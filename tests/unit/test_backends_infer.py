"""Tensors keep their bytes, and arrays of them their memory."""

import copy
import pickle
from typing import Any

import numpy as np
import pytest

from disconnect_watch.backends.datatypes import ALL, BY_CONFIG_NAME, BY_NAME, of_array
from disconnect_watch.backends.infer import (
    Code,
    InferError,
    InferRequest,
    InferResponse,
    InferTensor,
)

FIXED = [kind for kind in ALL if kind.dtype is not None]


@pytest.mark.parametrize("kind", FIXED, ids=lambda kind: kind.name)
def test_array_of_a_tensor_shares_its_memory(kind: Any) -> None:
    data = bytearray(range(6 * kind.size_bytes))
    if kind.name == "BOOL":
        data[:] = b"\0\1\0\1\1\0"
    array = InferTensor("x", kind.name, (2, 3), data).to_numpy()
    assert array.shape == (2, 3)
    assert array.tobytes() == bytes(data)
    data[0] ^= 1
    assert array.tobytes() == bytes(data)


@pytest.mark.parametrize("kind", [k for k in FIXED if k.name != "BF16"], ids=lambda kind: kind.name)
def test_tensor_of_an_array_shares_its_memory(kind: Any) -> None:
    array = np.arange(6).astype(kind.dtype).reshape(2, 3)
    tensor = InferTensor.from_numpy("x", array)
    assert (tensor.datatype, tensor.shape) == (kind.name, (2, 3))
    array[0, 0] = 1
    assert bytes(tensor.data) == array.tobytes()


def test_array_that_is_not_laid_out_as_on_the_wire_is_copied_into_order() -> None:
    array = np.arange(6, dtype=">i4").reshape(2, 3).T
    tensor = InferTensor.from_numpy("x", array)
    assert tensor.datatype == "INT32"
    assert tensor.to_numpy().tolist() == array.tolist()


@pytest.mark.parametrize("datatype", ["FP32", "BYTES"])
def test_tensor_of_no_elements_is_one(datatype: str) -> None:
    array = InferTensor("x", datatype, (0, 2), b"").to_numpy()
    assert array.shape == (0, 2)
    assert InferTensor.from_numpy("x", array) == InferTensor("x", datatype, (0, 2), b"")


@pytest.mark.parametrize("dtype", ["S", "U", "O"])
def test_strings_go_there_and_back(dtype: str) -> None:
    texts = np.array([["a", ""], ["ccc", "dd"]]).astype(dtype)
    tensor = InferTensor.from_numpy("x", texts)
    assert tensor.datatype == "BYTES"
    assert bytes(tensor.data[:9]) == b"\1\0\0\0a\0\0\0\0"
    assert tensor.to_numpy().tolist() == [[b"a", b""], [b"ccc", b"dd"]]


@pytest.mark.parametrize(
    ("datatype", "data"),
    [("FP32", b"12345"), ("FP32", b"1234"), ("BYTES", b"\5\0\0\0ab"), ("BYTES", b"\5\0")],
)
def test_data_that_is_not_what_the_tensor_says_is_refused(datatype: str, data: bytes) -> None:
    with pytest.raises(InferError, match=f"tensor 'x' of {datatype}\\[2\\] is not what") as caught:
        InferTensor("x", datatype, (2,), data).to_numpy()
    assert caught.value.code is Code.INVALID_ARG


def test_array_without_a_datatype_is_refused() -> None:
    with pytest.raises(ValueError, match="complex128 has no datatype on the wire"):
        of_array(np.zeros(1, complex))


def test_names_in_requests_and_in_configurations_are_those_published() -> None:
    assert BY_CONFIG_NAME["TYPE_STRING"] is BY_NAME["BYTES"]
    assert BY_CONFIG_NAME["TYPE_FP32"] is BY_NAME["FP32"]
    assert of_array(np.zeros(1, np.uint16)).name == "UINT16"


def test_requests_tensors_and_responses_are_shown_copied_and_told_otherwise() -> None:
    tensor = InferTensor("x", "INT32", (2,), bytes(8), {"a": 1}, is_classified=True)
    assert copy.copy(tensor) == pickle.loads(pickle.dumps(tensor)) == tensor
    assert tensor != InferTensor("x", "INT32", (2,), bytes(8))
    other = tensor.told(name="y", shape=(1, 2))
    assert (other.name, other.shape) == ("y", (1, 2))
    assert other.told(name="x", shape=(2,)) == tensor
    request = InferRequest("r", [tensor], sequence_end=True, timeout_us=3)
    told = copy.copy(request)
    told.inputs = []
    assert (told.id, told.cancel, told.sequence_end) == ("r", request.cancel, True)
    assert request.inputs == [tensor]
    response = InferResponse("m", "1", outputs=[other], is_final=False)
    assert copy.copy(response).outputs is response.outputs
    assert repr(response) == (
        "InferResponse(model_name='m', model_version='1', id='', parameters={}, "
        f"outputs=[{other!r}], error=None, is_final=False)"
    )
    with pytest.raises(AttributeError):
        response.misspelt = 1  # type: ignore[attr-defined]
