"""Tensors as models see them: arrays of numpy, or of whatever speaks DLPack."""

from typing import Any, Self

import numpy as np

from disconnect_watch.backends.datatypes import BY_NAME
from disconnect_watch.backends.infer import InferError, InferTensor
from disconnect_watch.backends.python_model.worker.errors import TritonModelException

__all__ = ["Tensor"]


class Tensor:
    """A named tensor.

    Args:
        name: of the input or output.
        numpy_array: its elements; kept, not copied.
    """

    __slots__ = ("_array", "_name", "_wire")

    def __init__(self, name: str, numpy_array: "np.ndarray[Any, Any]") -> None:
        if not isinstance(numpy_array, np.ndarray):
            raise TritonModelException(
                f"tensor '{name}' must be made of a numpy array, not of "
                f"{type(numpy_array).__name__}; from_dlpack takes others"
            )
        self._name = name
        self._array: np.ndarray[Any, Any] | None = numpy_array
        self._wire: InferTensor | None = None

    @classmethod
    def of_wire(cls, wire: InferTensor) -> Self:
        """A tensor that came in a message; its elements are looked at when they are asked for."""
        tensor = cls.__new__(cls)
        tensor._name = wire.name
        tensor._array = None
        tensor._wire = wire
        return tensor

    def to_wire(self) -> InferTensor:
        """The tensor for a message."""
        if self._wire is not None and self._array is None:
            return self._wire
        assert self._array is not None
        try:
            return InferTensor.from_numpy(self._name, self._array)
        except ValueError as error:
            raise TritonModelException(f"tensor '{self._name}': {error}") from error

    def name(self) -> str:
        """Its name."""
        return self._name

    def renamed(self, name: str) -> "Tensor":
        """The same elements under another name."""
        if self._wire is None:
            return Tensor(name, self.as_numpy())
        wire = self._wire
        return Tensor.of_wire(InferTensor(name, wire.datatype, wire.shape, wire.data))

    def as_numpy(self) -> "np.ndarray[Any, Any]":
        """Its elements; BYTES as bytes objects. BF16 has no numpy type: take ``to_dlpack``."""
        if self._array is None:
            assert self._wire is not None
            if self._wire.datatype == "BF16":
                raise TritonModelException(
                    f"tensor '{self._name}' is of BF16, which numpy does not know, use to_dlpack"
                )
            try:
                self._array = self._wire.to_numpy()
            except InferError as error:
                raise TritonModelException(error.message) from error
        return self._array

    def triton_dtype(self) -> int:
        """The number of its datatype in a model configuration."""
        names = list(BY_NAME)
        datatype = self.to_wire().datatype if self._wire is None else self._wire.datatype
        return names.index(datatype) + 1

    def shape(self) -> list[int]:
        """Its shape."""
        return list(self._wire.shape if self._wire is not None else self.as_numpy().shape)

    def is_cpu(self) -> bool:
        """Whether a CPU reads it: always; a model brings it to its device itself."""
        return True

    def to_dlpack(self) -> Any:
        """A DLPack capsule over the same memory, for ``torch.from_dlpack`` and its like."""
        return self.__dlpack__()

    def __dlpack__(self, **options: Any) -> Any:
        options.pop("stream", None)
        wire = self._wire
        if wire is not None and wire.datatype == "BF16":
            import torch

            words: Any = torch.from_numpy(wire.to_numpy()).view(torch.bfloat16)
            return words.__dlpack__()
        array = self.as_numpy()
        if array.dtype == object:
            raise TritonModelException(
                f"tensor '{self._name}' is of BYTES, which DLPack does not know, use as_numpy"
            )
        return array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0  # kDLCPU

    @staticmethod
    def from_dlpack(name: str, tensor: Any) -> "Tensor":
        """A tensor of an object with ``__dlpack__``, or of a capsule made by ``to_dlpack``.

        Memory that numpy can share is not copied; a device's is brought to the CPU.
        """
        if hasattr(tensor, "detach"):  # torch: no numpy of what needs a gradient, or of BF16
            tensor = tensor.detach().cpu().contiguous()
            if str(tensor.dtype) == "torch.bfloat16":
                import torch

                words = tensor.view(torch.uint16).numpy()
                return Tensor.of_wire(
                    InferTensor(name, "BF16", words.shape, words.reshape(-1).view(np.uint8).data)
                )
        if not hasattr(tensor, "__dlpack__"):
            tensor = _Capsule(tensor)
        try:
            return Tensor(name, np.from_dlpack(tensor))
        except (BufferError, RuntimeError, TypeError) as error:
            raise TritonModelException(
                f"tensor '{name}' can't be made of this DLPack tensor: {error}"
            ) from error


class _Capsule:
    """A bare capsule, as an object that numpy takes."""

    def __init__(self, capsule: object) -> None:
        self._capsule = capsule

    def __dlpack__(self, **_: object) -> object:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0
