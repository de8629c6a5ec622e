"""Elements of tensors: JSON to the wire layout and back."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from disconnect_watch.backends.infer import InferTensor
from disconnect_watch.server.errors import MalformedJSONError, ProtocolError
from disconnect_watch.server.v2.elements import from_json, to_json

DTYPES = {
    "BOOL": "?",
    "UINT8": "<u1",
    "UINT16": "<u2",
    "UINT32": "<u4",
    "UINT64": "<u8",
    "INT8": "<i1",
    "INT16": "<i2",
    "INT32": "<i4",
    "INT64": "<i8",
    "FP32": "<f4",
    "FP64": "<f8",
}


def tensor(datatype: str, data: bytes, *shape: int) -> InferTensor:
    return InferTensor("OUT", datatype, shape, data)


@pytest.mark.parametrize("datatype", DTYPES)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_what_goes_in_as_json_is_what_numpy_lays_out(datatype: str, data: st.DataObject) -> None:
    shapes = array_shapes(min_dims=1, max_dims=3, max_side=4)
    elements = {"allow_nan": False, "allow_infinity": False} if "FP" in datatype else None
    array = data.draw(arrays(DTYPES[datatype], shapes, elements=elements))
    wire = from_json(datatype, array.tolist(), array.size)
    assert wire == array.tobytes()
    assert from_json(datatype, array.ravel().tolist(), array.size) == wire
    assert to_json(tensor(datatype, wire, *array.shape)) == array.ravel().tolist()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=5), max_size=5))
def test_text_goes_both_ways(texts: list[str]) -> None:
    wire = from_json("BYTES", texts, len(texts))
    assert to_json(tensor("BYTES", wire, len(texts))) == texts


def test_bytes_lie_behind_their_lengths() -> None:
    assert from_json("BYTES", ["é", ""], 2) == b"\x02\0\0\0\xc3\xa9\0\0\0\0"


@pytest.mark.parametrize(
    ("datatype", "data", "message"),
    [
        ("INT32", [1.0], "non-signed-integer as signed-integer"),
        ("INT32", [True], "non-signed-integer as signed-integer"),
        ("INT64", [1 << 63], "non-signed-integer as signed-integer"),
        ("UINT8", [-1], "non-unsigned-integer as unsigned-integer"),
        ("UINT64", [1 << 64], "non-unsigned-integer as unsigned-integer"),
        ("FP32", ["1"], "non-number as double"),
        ("FP64", [None], "non-number as double"),
        ("BOOL", [1], "non-boolean as boolean"),
        ("INT32", None, "non-array as array"),
        ("INT32", {"0": 1}, "non-array as array"),
        ("BYTES", [5], "Unable to parse JSON bytes array: .* non-string as string"),
        ("INT32", [1, 2], "Unable to parse 'data': Shape does not match true shape"),
        ("INT32", [[], [1, 2]], "Unable to parse 'data': Shape does not match true shape"),
        ("INT32", [], "Failed to parse 'data' field: shape does not match true shape"),
    ],
)
def test_what_is_no_element_is_named_as_triton_names_it(
    datatype: str, data: Any, message: str
) -> None:
    with pytest.raises(MalformedJSONError, match=message):
        from_json(datatype, data, 1)


def test_an_integer_that_is_too_large_wraps() -> None:
    assert from_json("INT32", [1 << 40], 1) == b"\0\0\0\0"
    assert from_json("UINT8", [257], 1) == b"\x01"
    assert from_json("INT8", [-129], 1) == b"\x7f"


def test_a_number_that_is_too_large_is_infinite() -> None:
    assert np.frombuffer(from_json("FP32", [1e300], 1), "<f4")[0] == math.inf
    assert np.frombuffer(from_json("FP64", [-(10**400)], 1), "<f8")[0] == -math.inf


def test_arrays_may_be_nested_unevenly_but_not_without_end() -> None:
    assert from_json("UINT8", [1, [2, [3]], []], 3) == b"\1\2\3"
    deep: Any = [1]
    for _ in range(100):
        deep = [deep]
    with pytest.raises(ProtocolError, match=r"maximum allowed limit \(100\)"):
        from_json("UINT8", deep, 1)


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_halves_are_not_sent_as_json(datatype: str) -> None:
    with pytest.raises(ProtocolError, match=f"sending {datatype} data via JSON"):
        to_json(tensor(datatype, b"\0\0", 1))


def test_bytes_that_are_no_text_are_not_sent_as_json() -> None:
    with pytest.raises(ProtocolError, match="ask for it with 'binary_data'"):
        to_json(tensor("BYTES", b"\x01\0\0\0\xff", 1))
