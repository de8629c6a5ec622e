"""What goes into a served model and what comes out: tensors, requests, responses.

A tensor's data is what KServe v2's binary extension puts on the wire: little-endian,
row-major, each element of BYTES behind its length (uint32). It is carried as whatever
buffer it lies in, so a tensor on its way through copies nothing.
"""

import struct
from collections.abc import AsyncGenerator, Sequence
from enum import StrEnum
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np

from disconnect_watch.backends._fast import RequestFields, ResponseFields, TensorFields
from disconnect_watch.backends.base import Tensor
from disconnect_watch.backends.datatypes import BY_NAME, of_array
from disconnect_watch.errors import DisconnectWatchError

__all__ = [
    "Buffer",
    "Code",
    "InferError",
    "InferRequest",
    "InferResponse",
    "InferTensor",
    "LendsMemory",
    "Parameter",
    "ServedModel",
    "decode_strings",
    "encode_strings",
]

Buffer = bytes | bytearray | memoryview
Parameter = str | int | bool | float


class Code(StrEnum):
    """Triton's error codes."""

    UNKNOWN = "UNKNOWN"
    INTERNAL = "INTERNAL"
    NOT_FOUND = "NOT_FOUND"
    INVALID_ARG = "INVALID_ARG"
    UNAVAILABLE = "UNAVAILABLE"
    UNSUPPORTED = "UNSUPPORTED"
    ALREADY_EXISTS = "ALREADY_EXISTS"
    CANCELLED = "CANCELLED"


class InferError(DisconnectWatchError):
    """A request, or a response of it, that ended in an error.

    Attributes:
        code: whose fault it is; the HTTP status follows from it.
        message: what the client is told.
    """

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message

    def __reduce__(self) -> "tuple[type[InferError], tuple[Code, str]]":
        return type(self), (self.code, self.message)


class InferTensor(TensorFields):
    """One tensor on its way to a model or from it.

    Attributes:
        datatype: ``FP32``, ... ``BYTES``.
        data: as on the wire; ``parameters`` go with it.
        is_classified: it is not the output itself, but the best classes of it.
    """

    __slots__ = ()

    def told(self, *, name: str | None = None, shape: tuple[int, ...] | None = None) -> Self:
        """The same elements under another name, or with another shape of as many."""
        return type(self)(
            self.name if name is None else name,
            self.datatype,
            self.shape if shape is None else shape,
            self.data,
            self.parameters,
            self.is_classified,
        )

    def to_numpy(self) -> "np.ndarray[Any, Any]":
        """The tensor as an array of ``shape``.

        It shares the memory of ``data``, and is read-only where that is, except for BYTES,
        which become an array of bytes objects. BF16 is given as uint16.

        Raises:
            InferError: INVALID_ARG, the data is not what shape and datatype say.
        """
        kind = BY_NAME[self.datatype]
        try:
            if kind.dtype is None:
                return decode_strings(self.data).reshape(self.shape)
            return np.frombuffer(self.data, kind.dtype).reshape(self.shape)
        except ValueError as error:
            raise InferError(
                Code.INVALID_ARG,
                f"tensor '{self.name}' of {self.datatype}{list(self.shape)} is not what its "
                f"{memoryview(self.data).nbytes} bytes are: {error}",
            ) from error

    @classmethod
    def from_numpy(cls, name: str, array: "np.ndarray[Any, Any]") -> Self:
        """A tensor of an array, whose memory it shares where that is laid out as on the wire.

        Raises:
            ValueError: its dtype has no datatype.
        """
        kind = of_array(array)
        if kind.dtype is None:
            return cls(name, kind.name, array.shape, encode_strings(array))
        flat = np.ascontiguousarray(array, kind.dtype).reshape(-1)
        return cls(name, kind.name, array.shape, flat.view(np.uint8).data)


def decode_strings(data: Buffer) -> "np.ndarray[Any, Any]":
    """The elements of a BYTES tensor, as a flat array of bytes objects.

    Raises:
        ValueError: an element is longer than what is left.
    """
    elements = []
    at, end = 0, len(data)
    while at < end:
        if end - at < 4:
            raise ValueError(f"{end - at} bytes are left for a length of 4 bytes")
        (length,) = struct.unpack_from("<I", data, at)
        at += 4
        if length > end - at:
            raise ValueError(f"an element of {length} bytes, of which {end - at} are there")
        elements.append(bytes(data[at : at + length]))
        at += length
    array = np.empty(len(elements), object)
    array[:] = elements
    return array


def encode_strings(array: "np.ndarray[Any, Any]") -> bytes:
    """The data of a BYTES tensor of an array of bytes, text, or what has a text."""
    pieces: list[bytes] = []
    for element in array.reshape(-1).tolist():
        if not isinstance(element, bytes):
            element = str(element).encode()
        pieces += (struct.pack("<I", len(element)), element)
    return b"".join(pieces)


class InferRequest(RequestFields):
    """One request to a model.

    Attributes:
        id: the client's name for it, empty for none.
        requested_outputs: names; empty for all.
        num_classes: by output, of how many of its best classes the client wants to know. Not
            every model knows of classes: see ``InferTensor.is_classified``.
        headers: of the client's HTTP request, names in lower case, for a model elsewhere.
        sequence_id: 0 or empty for none.
        priority: 0 for the model's default, 1 is the most urgent.
        timeout_us: how long it may wait in a queue; 0 for the model's default.
        cancel: set by whoever wants it to end; held until it has ended.
        phase: where it stands, by whoever serves the model: None until it was taken, then
            ``waiting`` in a queue, and ``decode`` once something works on it.
    """

    __slots__ = ()


class InferResponse(ResponseFields):
    """One response of a model.

    Attributes:
        error: what went wrong with this response; it then has no outputs.
        is_final: whether it is the request's last. A final one may be nothing else: no
            outputs and no error, and then tells the client nothing.
    """

    __slots__ = ()


@runtime_checkable
class LendsMemory(Protocol):
    """A model that has memory in which tensors need not be copied on their way to it."""

    def room_for(self, size_bytes: int, tensors_at: int) -> memoryview | None:
        """Memory for the body of a request, in which its tensors are then to lie; None for none.

        Args:
            tensors_at: where in the body the first tensor begins; it is aligned.
        """


class ServedModel(Protocol):
    """One version of a model that can be asked.

    Threads: the loop's only.
    """

    @property
    def name(self) -> str:
        """The model's name in URLs."""

    @property
    def version(self) -> str:
        """A positive integer in decimal."""

    @property
    def config(self) -> Any:
        """Its configuration, a ``ModelConfig`` message; see ``model_config``."""

    @property
    def is_ready(self) -> bool:
        """Whether a request sent now would be worked on."""

    @property
    def is_decoupled(self) -> bool:
        """Whether a request has any number of responses, rather than one."""

    @property
    def inputs(self) -> Sequence[Tensor]:
        """What a request may give; shapes with the batch's dimension, where there is one."""

    @property
    def outputs(self) -> Sequence[Tensor]:
        """What a response may have; shapes as those of the inputs."""

    def infer(self, request: InferRequest) -> AsyncGenerator[InferResponse, None]:
        """Run one request.

        Closing the generator cancels it, and so does its token, which ends it from any
        thread and wakes it where it waits. A model that fails a request answers it with an
        error; so is told of a request of which some responses were given already.

        Raises:
            InferError: it is not what the model takes (INVALID_ARG), it was cancelled
                (CANCELLED), it can't be taken now or waited too long (UNAVAILABLE), or
                what ran it died (INTERNAL).
        """

    def labels(self, output: str) -> Sequence[str]:
        """The names of the classes of an output, by index; empty where it has none."""
