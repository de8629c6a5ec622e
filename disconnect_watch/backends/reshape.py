"""Shapes that clients and a model see differently: ``reshape`` of inputs and outputs.

No element moves; a tensor is told with another shape. The sizes that ``dims`` leaves open
take the places that the other shape leaves open, in their order.

Source: Triton's model configuration, "Reshape".
"""

from collections.abc import Iterable, Sequence
from copy import copy
from math import prod
from typing import Any

from disconnect_watch.backends.infer import Code, InferError, InferRequest, InferTensor

__all__ = ["Reshaper"]


class Reshaper:
    """Turns requests into the model's shapes and its outputs into the clients'.

    Args:
        config: complete and checked.
    """

    def __init__(self, config: Any) -> None:
        self._num_leading = int(config.max_batch_size > 0)
        self._inputs = dict(_shapes(config.input))
        self._outputs = {name: (model, client) for name, (client, model) in _shapes(config.output)}

    def request(self, request: InferRequest) -> InferRequest:
        """The request as the model sees it; its inputs must be those of the configuration."""
        if not self._inputs:
            return request
        told = copy(request)
        told.inputs = [self._told(each, self._inputs) for each in request.inputs]
        return told

    def outputs(self, tensors: list[InferTensor]) -> list[InferTensor]:
        """Outputs of the model as clients see them.

        Raises:
            InferError: INTERNAL, the model gave one another shape than it said.
        """
        if not self._outputs:
            return tensors
        return [self._told(each, self._outputs) for each in tensors]

    def _told(
        self, tensor: InferTensor, shapes: dict[str, tuple[Sequence[int], Sequence[int]]]
    ) -> InferTensor:
        if tensor.name not in shapes:
            return tensor
        before, after = shapes[tensor.name]
        leading, rest = tensor.shape[: self._num_leading], tensor.shape[self._num_leading :]
        if len(rest) == len(before):
            sizes = iter([size for size, dim in zip(rest, before, strict=True) if dim == -1])
            shape = (*leading, *(next(sizes) if dim == -1 else dim for dim in after))
            if prod(shape) == prod(tensor.shape):
                return tensor.told(shape=shape)
        raise InferError(
            Code.INTERNAL,
            f"'{tensor.name}' has the shape {list(rest)}, its configuration says {list(before)}",
        )


def _shapes(tensors: Iterable[Any]) -> Iterable[tuple[str, tuple[Sequence[int], Sequence[int]]]]:
    """By name, the shape of clients and that of the model."""
    for tensor in tensors:
        if tensor.HasField("reshape"):
            yield tensor.name, (tuple(tensor.dims), tuple(tensor.reshape.shape))
