"""Triton's classification extension: the best classes of an output instead of its values."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from disconnect_watch.backends.infer import InferTensor, encode_strings
from disconnect_watch.server.errors import ProtocolError

__all__ = ["classify"]

_UNSUPPORTED = ("BYTES", "BOOL", "FP16", "BF16")


def classify(
    tensor: InferTensor, num_classes: int, *, labels: Sequence[str], is_batched: bool
) -> InferTensor:
    """The ``num_classes`` largest values of each row, the largest first.

    Args:
        num_classes: fewer are given if there are no more.
        labels: by index; may be shorter than a row, or empty.
        is_batched: the first dimension counts rows; else all is one row.

    Returns:
        BYTES ``[batch, classes]`` or ``[classes]``, each "value:index" or
        "value:index:label".

    Raises:
        ProtocolError: values of such a datatype have no order.
    """
    if tensor.datatype in _UNSUPPORTED:
        raise ProtocolError(
            f"class result not available for output '{tensor.name}' due to unsupported type "
            f"'{tensor.datatype}'"
        )
    array = tensor.to_numpy()
    num_rows = array.shape[0] if is_batched else 1
    rows = array.reshape(num_rows, -1) if array.size else array.reshape(num_rows, 0)
    count = min(num_classes, rows.shape[1])
    elements = [_entry(row, index, labels) for row in rows for index in _best(row, count)]
    shape = (num_rows, count) if is_batched else (count,)
    data = encode_strings(np.array(elements, object))
    return InferTensor(tensor.name, "BYTES", shape, data)


def _best(row: "np.ndarray[Any, Any]", count: int) -> list[int]:
    """Indices by falling value, the lower one first among equals; NaN comes last."""
    ascending = np.argsort(row[::-1], kind="stable")[::-1]
    indices: list[int] = (len(row) - 1 - ascending).tolist()
    if row.dtype.kind == "f":
        indices.sort(key=lambda index: bool(np.isnan(row[index])))
    return indices[:count]


def _entry(row: "np.ndarray[Any, Any]", index: int, labels: Sequence[str]) -> str:
    value = row[index].item()
    text = f"{value:f}" if isinstance(value, float) else str(value)
    label = f":{labels[index]}" if index < len(labels) else ""
    return f"{text}:{index}{label}"
