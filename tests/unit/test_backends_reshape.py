"""``reshape``: what clients and a model call the same tensor's shape."""

from typing import Any

import numpy as np
import pytest

from disconnect_watch.backends.infer import Code, InferError, InferRequest, InferTensor
from disconnect_watch.backends.model_config import check, complete, from_document
from disconnect_watch.backends.reshape import Reshaper


def reshaper(dims: list[int], shape: list[int], *, max_batch_size: int = 0) -> Reshaper:
    tensor: dict[str, Any] = {"data_type": "TYPE_FP32", "dims": dims, "reshape": {"shape": shape}}
    config = from_document(
        {
            "max_batch_size": max_batch_size,
            "input": [{"name": "x", **tensor}],
            "output": [{"name": "y", **tensor}],
        }
    )
    complete(config, "m")
    check(config, "m")
    return Reshaper(config)


def of_shape(name: str, *shape: int) -> InferTensor:
    return InferTensor.from_numpy(name, np.zeros(shape, np.float32))


@pytest.mark.parametrize(
    ("dims", "shape", "max_batch_size", "outside", "inside"),
    [
        ([4], [2, 2], 0, (4,), (2, 2)),
        ([1], [], 0, (1,), ()),
        ([1], [], 8, (3, 1), (3,)),
        ([-1, 2, -1], [2, -1, 1, -1], 0, (3, 2, 5), (2, 3, 1, 5)),
        ([-1], [1, -1], 8, (2, 7), (2, 1, 7)),
    ],
)
def test_no_element_moves(
    dims: list[int],
    shape: list[int],
    max_batch_size: int,
    outside: tuple[int, ...],
    inside: tuple[int, ...],
) -> None:
    both_ways = reshaper(dims, shape, max_batch_size=max_batch_size)
    asked = InferRequest("r", [of_shape("x", *outside)])
    (seen,) = both_ways.request(asked).inputs
    assert (seen.shape, seen.data) == (inside, asked.inputs[0].data)
    assert both_ways.request(asked).cancel is asked.cancel
    (given,) = both_ways.outputs([of_shape("y", *inside)])
    assert given.shape == outside


@pytest.mark.parametrize("shape", [(4,), (2, 3), (2, 2, 1)])
def test_an_output_of_another_shape_is_the_models_error(shape: tuple[int, ...]) -> None:
    with pytest.raises(InferError, match=r"its configuration says \[2, 2\]") as raised:
        reshaper([4], [2, 2]).outputs([of_shape("y", *shape)])
    assert raised.value.code is Code.INTERNAL


def test_what_is_not_reshaped_is_passed_on() -> None:
    other = of_shape("z", 3)
    assert reshaper([4], [2, 2]).outputs([other]) == [other]
