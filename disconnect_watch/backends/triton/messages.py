"""Requests and responses as messages of KServe v2's gRPC protocol, and back.

A tensor's data is the same on both wires and goes through as it is; protobuf takes ``bytes``
alone, so what is a view of a larger body is copied once.

Source: KServe v2 "GRPC"; Triton's ``grpc_service.proto``, of which ``tritonclient`` has the
published code.
"""

from collections.abc import Mapping
from typing import Any

from tritonclient.grpc import service_pb2  # type: ignore[import-untyped]

from disconnect_watch.backends.infer import (
    Code,
    InferError,
    InferRequest,
    InferResponse,
    InferTensor,
    Parameter,
)

__all__ = ["message_of", "parameters_of", "response_of"]

#: Tells that a response is the last; no parameter of the model's own.
_FINAL = "triton_final_response"
_INT64 = range(-(1 << 63), 1 << 63)


def message_of(request: InferRequest, name: str, version: str) -> Any:
    """A ``ModelInferRequest`` for a version of a model; empty for its newest."""
    message = service_pb2.ModelInferRequest(model_name=name, model_version=version, id=request.id)
    parameters = message.parameters
    for key, value in request.parameters.items():
        _set(parameters[key], value)
    if request.sequence_id:
        _set(parameters["sequence_id"], request.sequence_id)
        parameters["sequence_start"].bool_param = request.sequence_start
        parameters["sequence_end"].bool_param = request.sequence_end
    if request.priority:
        parameters["priority"].uint64_param = request.priority
    if request.timeout_us:
        _set(parameters["timeout"], request.timeout_us)
    for tensor in request.inputs:
        message.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        data = tensor.data
        message.raw_input_contents.append(data if type(data) is bytes else bytes(data))
    for output in request.requested_outputs:
        wanted = message.outputs.add(name=output)
        if num_classes := request.num_classes.get(output):
            _set(wanted.parameters["classification"], num_classes)
    return message


def response_of(message: Any, request: InferRequest) -> InferResponse:
    """The response in a ``ModelInferResponse``.

    Raises:
        InferError: INTERNAL, its tensors are not given as raw bytes, as Triton gives them.
    """
    raw = message.raw_output_contents
    if len(raw) != len(message.outputs):
        raise InferError(
            Code.INTERNAL,
            f"model '{message.model_name}' answered {len(message.outputs)} outputs with "
            f"{len(raw)} raw contents, it must be as many",
        )
    parameters = parameters_of(message.parameters)
    is_final = bool(parameters.pop(_FINAL, False))
    outputs = [
        InferTensor(
            output.name,
            output.datatype,
            tuple(output.shape),
            data,
            is_classified=output.name in request.num_classes,
        )
        for output, data in zip(message.outputs, raw, strict=True)
    ]
    return InferResponse(
        message.model_name,
        message.model_version,
        message.id,
        parameters,
        outputs,
        is_final=is_final,
    )


def parameters_of(parameters: Mapping[str, Any]) -> dict[str, Parameter]:
    """The values of a map of ``InferParameter``; one that is not set is left out."""
    found: dict[str, Parameter] = {}
    for key, value in parameters.items():
        choice = value.WhichOneof("parameter_choice")
        if choice is not None:
            found[key] = getattr(value, choice)
    return found


def _set(parameter: Any, value: Parameter) -> None:
    if isinstance(value, bool):
        parameter.bool_param = value
    elif isinstance(value, int):
        if value in _INT64:
            parameter.int64_param = value
        else:
            parameter.uint64_param = value
    elif isinstance(value, float):
        parameter.double_param = value
    else:
        parameter.string_param = value
