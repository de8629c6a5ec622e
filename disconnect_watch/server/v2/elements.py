"""The elements of a tensor: from a JSON array to the wire layout, and back.

The wire layout is that of KServe v2's binary extension: little-endian, row-major, BOOL a
byte, BYTES a 32-bit length before each element. Models see nothing else.

Source: KServe v2 "Tensor Data Representation"; messages are Triton's.
"""

import math
import sys
from array import array
from itertools import chain
from typing import Any

import numpy as np

from disconnect_watch.backends.infer import InferTensor, decode_strings, encode_strings
from disconnect_watch.server.errors import MalformedJSONError, ProtocolError

__all__ = ["from_json", "to_json"]

#: Levels of nested arrays in "data"; Triton's limit.
MAX_DEPTH = 100

#: What ``array`` calls them.
_FLOATS = {"FP32": "f", "FP64": "d"}
_NUMBERS = {int, float}
_SIGNED = ("signed-integer", "<i8", range(-(1 << 63), 1 << 63))
_UNSIGNED = ("unsigned-integer", "<u8", range(1 << 64))


def from_json(datatype: str, data: Any, num_elements: int) -> bytes:
    """Lay out the elements of an input's ``data``, flat or nested, row by row.

    An integer that is too large for its datatype wraps, as in Triton.

    Raises:
        MalformedJSONError: an element of another type, or not ``num_elements`` of them.
        ProtocolError: nested too deeply, or text that no UTF-8 can carry.
    """
    if not isinstance(data, list):
        raise _unparsable("non-array", "array")
    elements = _flatten(data)
    has_more = len(elements) > num_elements
    if has_more:
        elements = elements[:num_elements]
    laid_out = _lay_out(datatype, elements)
    if has_more:
        raise MalformedJSONError(
            "Unable to parse 'data': Shape does not match true shape of 'data' field"
        )
    if len(elements) < num_elements:
        raise MalformedJSONError("Failed to parse 'data' field: shape does not match true shape")
    return laid_out


def to_json(tensor: InferTensor) -> list[Any]:
    """The elements of an output as JSON has them: one flat list.

    Raises:
        ProtocolError: there is no JSON for them.
    """
    if tensor.datatype in ("FP16", "BF16"):
        raise ProtocolError(
            f"sending {tensor.datatype} data via JSON is not supported. "
            f"Please use the binary data format for output {tensor.name}"
        )
    if tensor.datatype != "BYTES":
        elements: list[Any] = tensor.to_numpy().ravel().tolist()
        return elements
    try:
        return [element.decode() for element in decode_strings(tensor.data).tolist()]
    except UnicodeDecodeError:
        raise ProtocolError(
            f"output '{tensor.name}' has elements that are no UTF-8, which JSON can't carry, "
            "ask for it with 'binary_data'"
        ) from None


def _flatten(data: list[Any]) -> list[Any]:
    """Row by row; arrays may lie at any depth, as Triton takes them."""
    for _ in range(MAX_DEPTH):
        kinds = set(map(type, data))
        if list not in kinds:
            return data
        if len(kinds) == 1:
            data = list(chain.from_iterable(data))
        else:
            data = list(chain.from_iterable(e if type(e) is list else (e,) for e in data))
    raise ProtocolError(f"JSON nesting depth exceeds maximum allowed limit ({MAX_DEPTH})")


def _lay_out(datatype: str, elements: list[Any]) -> bytes:
    kinds = set(map(type, elements))
    if datatype == "BYTES":
        if not kinds <= {str}:
            raise MalformedJSONError(
                "Unable to parse JSON bytes array: attempt to access JSON non-string as string"
            )
        return encode_strings(np.array(elements, object))
    if datatype == "BOOL":
        if not kinds <= {bool}:
            raise _unparsable("non-boolean", "boolean")
        return bytes(elements)
    if datatype in _FLOATS:
        if not kinds <= _NUMBERS:
            raise _unparsable("non-number", "double")
        return _numbers(elements, _FLOATS[datatype])
    what, widest, bounds = _UNSIGNED if datatype.startswith("U") else _SIGNED
    if not kinds <= {int} or (elements and not _are_within(elements, bounds)):
        raise _unparsable(f"non-{what}", what)
    size = int(datatype.lstrip("UINT")) // 8
    return np.array(elements, widest).astype(f"{widest[:2]}{size}", copy=False).tobytes()


def _are_within(elements: list[int], bounds: range) -> bool:
    return min(elements) >= bounds.start and max(elements) < bounds.stop


def _numbers(elements: list[Any], code: str) -> bytes:
    try:
        # Through a double, as Triton; what a float is too small for is infinite.
        numbers = array(code, elements)
    except OverflowError:
        numbers = array(code, map(_double, elements))
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()


def _double(number: float) -> float:
    try:
        return float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf


def _unparsable(found: str, wanted: str) -> MalformedJSONError:
    return MalformedJSONError(f"Unable to parse 'data': attempt to access JSON {found} as {wanted}")
