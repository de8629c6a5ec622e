"""Requests as models see them, those that came and those that they make of other models."""

import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from enum import IntEnum
from typing import Self

from disconnect_watch.backends.infer import InferTensor, Parameter
from disconnect_watch.backends.python_model.worker import calls
from disconnect_watch.backends.python_model.worker.errors import TritonModelException
from disconnect_watch.backends.python_model.worker.responses import (
    InferenceResponse,
    InferenceResponseSender,
)
from disconnect_watch.backends.python_model.worker.tensors import Tensor

__all__ = [
    "TRITONSERVER_MEMORY_CPU",
    "TRITONSERVER_MEMORY_GPU",
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_END",
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_START",
    "InferenceRequest",
    "MemoryType",
    "PreferredMemory",
]

TRITONSERVER_REQUEST_FLAG_SEQUENCE_START = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = 2


class MemoryType(IntEnum):
    """Where a model would like to have the outputs of another."""

    TRITONSERVER_MEMORY_CPU = 0
    TRITONSERVER_MEMORY_GPU = 2


TRITONSERVER_MEMORY_CPU = MemoryType.TRITONSERVER_MEMORY_CPU
TRITONSERVER_MEMORY_GPU = MemoryType.TRITONSERVER_MEMORY_GPU


class PreferredMemory:
    """Where a model would like to have the outputs of another; here they are the CPU's."""

    def __init__(self, preferred_memory_type: int, preferred_device_id: int = 0) -> None:
        self.preferred_memory_type = MemoryType(preferred_memory_type)
        self.preferred_device_id = preferred_device_id


class InferenceRequest:
    """A request: given to ``execute``, or made to ask another model.

    Args:
        model_name, model_version: of the model to ask; version -1 leaves it to the server.
        requested_output_names: of the outputs to have.
        correlation_id: of the sequence it belongs to, 0 or empty for none.
        flags: ``TRITONSERVER_REQUEST_FLAG_...``.
        timeout: microseconds that it may wait in a queue; 0 for ever.
    """

    __slots__ = (
        "_correlation_id",
        "_flags",
        "_inputs",
        "_is_set",
        "_model_name",
        "_model_version",
        "_parameters",
        "_preferred_memory",
        "_request_id",
        "_requested_output_names",
        "_sender",
        "_timeout",
        "_wires",
    )

    def __init__(
        self,
        request_id: str = "",
        correlation_id: int | str = 0,
        inputs: Sequence[Tensor] = (),
        requested_output_names: Sequence[str] = (),
        model_name: str = "",
        model_version: int = -1,
        flags: int = 0,
        timeout: int = 0,
        preferred_memory: PreferredMemory | None = None,
        trace: object = None,
        parameters: dict[str, Parameter] | None = None,
    ) -> None:
        for name, value in (parameters or {}).items():
            if not isinstance(value, str | int | bool | float):
                raise TritonModelException(
                    f"parameter '{name}' is {value!r}, it must be a string, number or bool"
                )
        self._request_id = request_id
        self._correlation_id = correlation_id
        self._inputs: list[Tensor] | None = list(inputs)
        self._wires: list[InferTensor] = []
        self._requested_output_names = list(requested_output_names)
        self._model_name = model_name
        self._model_version = model_version
        self._flags = flags
        self._timeout = timeout
        self._preferred_memory = preferred_memory
        self._parameters = parameters or {}
        self._is_set: Callable[[], bool] | None = None
        self._sender: InferenceResponseSender | None = None

    @classmethod
    def of_wire(
        cls,
        *,
        request_id: str,
        correlation_id: int | str,
        wires: list[InferTensor],
        requested: list[str],
        model_name: str,
        model_version: int,
        flags: int,
        timeout: int,
        parameters: dict[str, Parameter],
        is_set: Callable[[], bool],
        sender: InferenceResponseSender,
    ) -> Self:
        """A request that came in a message."""
        request = cls.__new__(cls)
        request._request_id = request_id
        request._correlation_id = correlation_id
        request._inputs = None
        request._wires = wires
        request._requested_output_names = requested
        request._model_name = model_name
        request._model_version = model_version
        request._flags = flags
        request._timeout = timeout
        request._preferred_memory = None
        request._parameters = parameters
        request._is_set = is_set
        request._sender = sender
        return request

    def inputs(self) -> list[Tensor]:
        """Its tensors."""
        if self._inputs is None:
            self._inputs = [Tensor.of_wire(wire) for wire in self._wires]
        return self._inputs

    def input_by_name(self, name: str) -> Tensor | None:
        """The input with that name; None if there is none."""
        for tensor in self.inputs():
            if tensor.name() == name:
                return tensor
        return None

    def request_id(self) -> str:
        """The client's name for it, empty for none."""
        return self._request_id

    def correlation_id(self) -> int | str:
        """The sequence it belongs to."""
        return self._correlation_id

    def model_name(self) -> str:
        """The model that it is for."""
        return self._model_name

    def model_version(self) -> int:
        """The version that it is for."""
        return self._model_version

    def requested_output_names(self) -> list[str]:
        """The outputs that are asked for; for all, where none was named."""
        return self._requested_output_names

    def flags(self) -> int:
        """``TRITONSERVER_REQUEST_FLAG_...``, each a bit."""
        return self._flags

    def set_flags(self, flags: int) -> None:
        """Set the flags of a request to another model."""
        self._flags = flags

    def timeout(self) -> int:
        """Microseconds that it may wait in a queue; 0 where none was given."""
        return self._timeout

    def preferred_memory(self) -> PreferredMemory | None:
        """Where the outputs are wanted."""
        return self._preferred_memory

    def trace(self) -> None:
        """No trace."""

    def parameters(self) -> str:
        """What else the client said, as a JSON object."""
        return json.dumps(self._parameters, separators=(",", ":"), ensure_ascii=False)

    def is_cancelled(self) -> bool:
        """Whether nobody waits for the answer any more. A load of one word of memory."""
        return self._is_set is not None and self._is_set()

    def get_response_sender(self) -> InferenceResponseSender:
        """What sends responses to it, now and after ``execute`` has returned."""
        if self._sender is None:
            raise TritonModelException("only a request given to execute has a response sender")
        self._sender.is_taken = True
        return self._sender

    def exec(self, decoupled: bool = False) -> InferenceResponse | Iterator[InferenceResponse]:
        """Ask the model, and wait.

        Args:
            decoupled: whether it may answer with any number of responses, which are then
                given one by one.
        """
        return calls.exec_blocking(self._call(), decoupled)

    async def async_exec(
        self, decoupled: bool = False
    ) -> InferenceResponse | AsyncIterator[InferenceResponse]:
        """As ``exec``, while the loop goes on."""
        return await calls.exec_async(self._call(), decoupled)

    def _call(self) -> calls.Call:
        if not self._model_name:
            raise TritonModelException("the request names no model to ask")
        return calls.Call(
            model_name=self._model_name,
            model_version=self._model_version,
            request_id=self._request_id,
            correlation_id=self._correlation_id,
            flags=self._flags,
            timeout=self._timeout,
            parameters=self._parameters,
            requested=self._requested_output_names,
            inputs=[tensor.to_wire() for tensor in self.inputs()],
        )
