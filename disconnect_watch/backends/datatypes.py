"""The datatypes of KServe v2: their names, their sizes, and what numpy calls them.

Source: KServe v2 predict protocol, "Tensor Data Types"; Triton's ``model_config.proto`` for
the names that a model configuration uses.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["BY_CONFIG_NAME", "BY_NAME", "DataType", "of_array"]


@dataclass(frozen=True, slots=True)
class DataType:
    """One datatype.

    Attributes:
        name: in requests and metadata, such as ``FP32``.
        config_name: in a model configuration, such as ``TYPE_FP32``.
        size_bytes: of one element; 0 for BYTES, whose elements have a length each.
        dtype: the dtype whose memory is the wire's, little-endian. BF16, which numpy does
            not know, is given as the words it is made of; None for BYTES.
    """

    name: str
    config_name: str
    size_bytes: int
    dtype: np.dtype[Any] | None


def _fixed(name: str, code: str) -> DataType:
    dtype = np.dtype(code)
    return DataType(name, f"TYPE_{name}", dtype.itemsize, dtype)


ALL = (
    _fixed("BOOL", "?"),
    _fixed("UINT8", "u1"),
    _fixed("UINT16", "<u2"),
    _fixed("UINT32", "<u4"),
    _fixed("UINT64", "<u8"),
    _fixed("INT8", "i1"),
    _fixed("INT16", "<i2"),
    _fixed("INT32", "<i4"),
    _fixed("INT64", "<i8"),
    _fixed("FP16", "<f2"),
    _fixed("FP32", "<f4"),
    _fixed("FP64", "<f8"),
    DataType("BYTES", "TYPE_STRING", 0, None),
    _fixed("BF16", "<u2"),
)

BY_NAME = {kind.name: kind for kind in ALL}
BY_CONFIG_NAME = {kind.config_name: kind for kind in ALL}

#: UINT16 comes before BF16 in ``ALL`` and wins, since an array of words is taken for numbers.
_BY_DTYPE = {kind.dtype: kind for kind in reversed(ALL) if kind.dtype is not None}


def of_array(array: "np.ndarray[Any, Any]") -> DataType:
    """The datatype that an array has on the wire; BYTES for text, bytes and objects.

    Raises:
        ValueError: there is none, as for complex numbers.
    """
    kind = _BY_DTYPE.get(array.dtype.newbyteorder("<"))
    if kind is not None:
        return kind
    if array.dtype.kind in "OSU":
        return BY_NAME["BYTES"]
    raise ValueError(f"an array of {array.dtype} has no datatype on the wire, convert it first")
