"""The module that models import as ``triton_python_backend_utils``.

It exists under that name in worker processes only. Names, arguments and values are those
of Triton's Python backend.

Source: Triton Python backend, README, "Python Model Interface" and "Utility Functions".
"""

from typing import Any

import numpy as np

from disconnect_watch.backends.datatypes import ALL, BY_CONFIG_NAME
from disconnect_watch.backends.infer import decode_strings, encode_strings
from disconnect_watch.backends.python_model.worker import calls
from disconnect_watch.backends.python_model.worker.auto_config import ModelConfig
from disconnect_watch.backends.python_model.worker.errors import TritonError, TritonModelException
from disconnect_watch.backends.python_model.worker.logger import Logger
from disconnect_watch.backends.python_model.worker.requests import (
    TRITONSERVER_MEMORY_CPU,
    TRITONSERVER_MEMORY_GPU,
    TRITONSERVER_REQUEST_FLAG_SEQUENCE_END,
    TRITONSERVER_REQUEST_FLAG_SEQUENCE_START,
    InferenceRequest,
    PreferredMemory,
)
from disconnect_watch.backends.python_model.worker.responses import (
    TRITONSERVER_RESPONSE_COMPLETE_FINAL,
    InferenceResponse,
    InferenceResponseSender,
)
from disconnect_watch.backends.python_model.worker.tensors import Tensor

__all__ = [
    "TRITONSERVER_MEMORY_CPU",
    "TRITONSERVER_MEMORY_GPU",
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_END",
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_START",
    "TRITONSERVER_RESPONSE_COMPLETE_FINAL",
    "TRITON_STRING_TO_NUMPY",
    "TRITON_TO_NUMPY_TYPE",
    "InferenceRequest",
    "InferenceResponse",
    "InferenceResponseSender",
    "Logger",
    "ModelConfig",
    "PreferredMemory",
    "Tensor",
    "TritonError",
    "TritonModelException",
    "deserialize_bytes_tensor",
    "get_input_config_by_name",
    "get_input_tensor_by_name",
    "get_model_dir",
    "get_output_config_by_name",
    "get_output_tensor_by_name",
    "is_model_ready",
    "numpy_to_triton_type",
    "serialize_byte_tensor",
    "triton_string_to_numpy",
    "triton_to_numpy_type",
    "using_decoupled_model_transaction_policy",
]

#: By the number that a datatype has in a model configuration.
_NUMBERED = [kind.config_name for kind in ALL if kind.name != "BF16"]  # numpy has none


def _numpy_type(config_name: str) -> Any:
    dtype = BY_CONFIG_NAME[config_name].dtype
    return np.object_ if dtype is None else dtype.type


TRITON_TO_NUMPY_TYPE = {number: _numpy_type(name) for number, name in enumerate(_NUMBERED, 1)}
TRITON_STRING_TO_NUMPY = {name: _numpy_type(name) for name in _NUMBERED}
_NUMPY_TO_TRITON = {kind: number for number, kind in TRITON_TO_NUMPY_TYPE.items()} | {
    np.bytes_: 13,
    np.str_: 13,
}


def get_input_tensor_by_name(inference_request: InferenceRequest, name: str) -> Tensor | None:
    """The input with that name; None if the request has none."""
    return inference_request.input_by_name(name)


def get_output_tensor_by_name(inference_response: InferenceResponse, name: str) -> Tensor | None:
    """The output with that name; None if the response has none."""
    for tensor in inference_response.output_tensors():
        if tensor.name() == name:
            return tensor
    return None


def _config_by_name(entries: list[dict[str, Any]], name: str) -> dict[str, Any] | None:
    for entry in entries:
        if entry["name"] == name:
            return entry
    return None


def get_input_config_by_name(model_config: dict[str, Any], name: str) -> dict[str, Any] | None:
    """What the configuration says of that input; None if it has none."""
    return _config_by_name(model_config.get("input", []), name)


def get_output_config_by_name(model_config: dict[str, Any], name: str) -> dict[str, Any] | None:
    """What the configuration says of that output; None if it has none."""
    return _config_by_name(model_config.get("output", []), name)


def using_decoupled_model_transaction_policy(model_config: dict[str, Any]) -> bool:
    """Whether the model answers a request with any number of responses."""
    return bool(model_config.get("model_transaction_policy", {}).get("decoupled", False))


def triton_to_numpy_type(data_type: int) -> Any:
    """The numpy type of a datatype given by its number in a configuration."""
    return TRITON_TO_NUMPY_TYPE[data_type]


def numpy_to_triton_type(data_type: Any) -> int:
    """The number that a numpy type's datatype has in a configuration."""
    return _NUMPY_TO_TRITON[np.dtype(data_type).type]


def triton_string_to_numpy(triton_type_string: str) -> Any:
    """The numpy type of a datatype given by its name in a configuration, ``TYPE_FP32``."""
    return TRITON_STRING_TO_NUMPY[triton_type_string]


def serialize_byte_tensor(input_tensor: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any] | None":
    """The elements of a BYTES tensor as they are on the wire, in an array of one object."""
    if input_tensor.size == 0:
        return None
    return np.asarray(encode_strings(input_tensor), dtype=np.object_)


def deserialize_bytes_tensor(encoded_tensor: bytes) -> "np.ndarray[Any, Any]":
    """The elements of a BYTES tensor on the wire, as a flat array of bytes objects."""
    return decode_strings(encoded_tensor)


def get_model_dir() -> str:
    """The directory of the version that runs."""
    return calls.model_directory()


def is_model_ready(model_name: str, model_version: str = "") -> bool:
    """Whether another model of the server could be asked now."""
    return calls.is_model_ready(model_name, model_version)
