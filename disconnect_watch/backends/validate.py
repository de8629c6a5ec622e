"""A request against its model's configuration, in the order and the words of Triton's core.

Source: Triton's captured answers; protocols of KServe v2.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from disconnect_watch.backends._fast import PlainCheck
from disconnect_watch.backends.base import Tensor
from disconnect_watch.backends.datatypes import BY_NAME
from disconnect_watch.backends.infer import Code, InferError, InferRequest, InferTensor
from disconnect_watch.backends.model_config import inputs_of, outputs_of
from disconnect_watch.errors import cut

__all__ = ["Validator", "prefix_of"]

_BATCH_NOTE = (
    ". NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension "
    "to be prepended to each input shape. If you want to specify the full shape including the "
    "batch dim in your input dims config, try setting max_batch_size to zero. See the model "
    "configuration docs for more info on max_batch_size."
)


def prefix_of(request: InferRequest) -> str:
    """What an error about a request begins with."""
    return f"[request id: {cut(request.id) or '<id_unknown>'}] "


@dataclass(frozen=True, slots=True)
class _Input:
    tensor: Tensor
    dims: tuple[int, ...]
    #: The bytes of one element; 0 for BYTES.
    size_bytes: int


class Validator:
    """Checks requests to one model.

    Args:
        config: complete and checked.
    """

    def __init__(self, config: Any) -> None:
        self._model = config.name
        self._max_batch_size = config.max_batch_size
        self._inputs = {
            tensor.name: _Input(
                tensor,
                tensor.shape[1:] if config.max_batch_size else tensor.shape,
                BY_NAME[tensor.datatype].size_bytes,
            )
            for tensor in inputs_of(config)
        }
        self._outputs = {tensor.name for tensor in outputs_of(config)}
        self._ragged = {tensor.name for tensor in config.input if tensor.allow_ragged_batch}
        self._required = [t.tensor.name for t in self._inputs.values() if not t.tensor.is_optional]
        self._plain = PlainCheck(
            (
                (name, one.tensor.datatype, one.dims, one.size_bytes)
                for name, one in self._inputs.items()
            ),
            self._outputs,
            config.max_batch_size,
        )

    def check(self, request: InferRequest) -> int:
        """See that the model can take a request; returns its batch size, 1 without batches.

        Raises:
            InferError: INVALID_ARG; it can't.
        """
        if batch_size := self._plain.batch_size(request):
            return batch_size
        try:
            return self._check(request)
        except InferError as error:
            raise InferError(error.code, prefix_of(request) + error.message) from None

    def _check(self, request: InferRequest) -> int:
        known = self._inputs
        given = set()
        for tensor in request.inputs:
            if tensor.name not in known:
                raise _wrong(
                    f"unexpected inference input '{tensor.name}' for model '{self._model}'"
                )
            if tensor.name in given:
                raise _wrong(f"input '{tensor.name}' already exists in request")
            given.add(tensor.name)
        if len(given) < len(known) and not given.issuperset(self._required):
            self._refuse_missing(request.inputs, given)
        for output in request.requested_outputs:
            if output not in self._outputs:
                raise _wrong(f"unexpected inference output '{output}' for model '{self._model}'")
        batch_size = self._batch_size(request.inputs) if self._max_batch_size else 1
        for tensor in request.inputs:
            self._check_tensor(tensor, known[tensor.name])
        return batch_size

    def _refuse_missing(self, inputs: Sequence[InferTensor], given: set[str]) -> None:
        num_known, num_required = len(self._inputs), len(self._required)
        expected = (
            f"expected {num_known} inputs"
            if num_required == num_known
            else f"expected number of inputs between {num_required} and {num_known}"
        )
        raise _wrong(
            f"{expected} but got {len(given)} inputs for model '{self._model}'. "
            f"Got input(s) {[tensor.name for tensor in inputs]}, but missing required input(s) "
            f"{[name for name in self._required if name not in given]}. "
            "Please provide all required input(s)."
        )

    def _batch_size(self, inputs: Sequence[InferTensor]) -> int:
        batch_size = None
        for tensor in inputs:
            if not tensor.shape:
                raise _wrong(
                    f"input '{tensor.name}' has no shape but model requires batch dimension for "
                    f"'{self._model}'"
                )
            if batch_size is None:
                batch_size = tensor.shape[0]
            elif tensor.shape[0] != batch_size:
                raise _wrong(
                    f"input '{tensor.name}' batch size does not match other inputs for "
                    f"'{self._model}'"
                )
        if batch_size is None or batch_size < 1:
            raise _wrong(f"inference request batch-size must be >= 1 for '{self._model}'")
        if batch_size > self._max_batch_size:
            raise _wrong(
                f"inference request batch-size must be <= {self._max_batch_size} for "
                f"'{self._model}'"
            )
        return batch_size

    def _check_tensor(self, tensor: InferTensor, known: _Input) -> None:
        if tensor.datatype != known.tensor.datatype:
            raise _wrong(
                f"inference input '{tensor.name}' data-type is '{tensor.datatype}', "
                f"but model '{self._model}' expects '{known.tensor.datatype}'"
            )
        dims = known.dims
        shape = tensor.shape[1:] if self._max_batch_size else tensor.shape
        if shape != dims and (
            len(shape) != len(dims)
            or any(want not in (-1, got) for want, got in zip(dims, shape, strict=True))
        ):
            raise _wrong(
                f"unexpected shape for input '{tensor.name}' for model '{self._model}'. "
                f"Expected {_shown(known.tensor.shape)}, got {_shown(tensor.shape)}"
                + (_BATCH_NOTE if self._max_batch_size else "")
            )
        num_elements = 1
        for dim in tensor.shape:
            num_elements *= dim
        got = len(tensor.data)
        if known.size_bytes:
            if got != num_elements * known.size_bytes:
                raise _wrong(
                    f"input byte size mismatch for input '{tensor.name}' for model "
                    f"'{self._model}'. Expected {num_elements * known.size_bytes}, got {got}"
                )
        else:
            self._check_strings(tensor, num_elements)

    def _check_strings(self, tensor: InferTensor, num_elements: int) -> None:
        at, end, found = 0, len(tensor.data), 0
        while at < end and found <= num_elements:
            if end - at < 4:
                raise _wrong(
                    f"incomplete string length indicator for inference input '{tensor.name}' for "
                    f"model '{self._model}', expecting 4 bytes but only {end - at} bytes available"
                )
            (length,) = struct.unpack_from("<I", tensor.data, at)
            at += 4
            if length > end - at:
                raise _wrong(
                    f"incomplete string data for inference input '{tensor.name}' for model "
                    f"'{self._model}', expecting string of length {length} but only {end - at} "
                    "bytes available"
                )
            at += length
            found += 1
        if found != num_elements:
            raise _wrong(
                f"unexpected number of string elements {found} for inference input "
                f"'{tensor.name}', expecting {num_elements} for model '{self._model}'"
            )

    def batch_key(self, request: InferRequest) -> tuple[Any, ...]:
        """What must be the same of requests that share a batch: inputs and their shapes."""
        return tuple(
            sorted(
                (tensor.name, None if tensor.name in self._ragged else tensor.shape[1:])
                for tensor in request.inputs
            )
        )


def _wrong(message: str) -> InferError:
    return InferError(Code.INVALID_ARG, message)


def _shown(shape: tuple[int, ...]) -> str:
    return f"[{','.join(map(str, shape))}]"
