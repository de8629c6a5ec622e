"""Triton's generate extension for any model that takes tensors.

The body is one flat JSON object: what has the name of an input is its tensor, the rest are
request parameters. Each response is one such object again.

A stream's head waits for the first response, whose status it has; a client that leaves
before has been sent nothing at all.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from math import prod
from typing import Any

from disconnect_watch.backends import Tensor
from disconnect_watch.backends.infer import (
    Code,
    InferError,
    InferRequest,
    InferResponse,
    InferTensor,
    ServedModel,
)
from disconnect_watch.errors import cut
from disconnect_watch.server.documents import decode_object, encode
from disconnect_watch.server.errors import CancelledByPeer, ProtocolError, RequestError
from disconnect_watch.server.v2.accounts import outcome_of
from disconnect_watch.server.v2.call import Answer, Call
from disconnect_watch.server.v2.elements import from_json, to_json
from disconnect_watch.server.v2.failures import ModelError, failure_of
from disconnect_watch.server.v2.fields import as_object, as_string, parameter
from disconnect_watch.server.v2.models import find_model
from disconnect_watch.token import CancelToken

__all__ = ["generate", "generate_stream", "parse_generate"]

_ONE_RESPONSE = (
    "generate expects model to produce exactly 1 response, "
    "use generate stream for model that generates various number of responses"
)
_STREAM = b"text/event-stream; charset=utf-8"
# nginx buffers a stream unless it is told not to.
_STREAM_HEADERS = [
    (b"content-type", _STREAM),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


async def generate(call: Call) -> Answer:
    """Answer with the one response of a model."""
    model, request = await _accept(call)
    responses: list[InferResponse] = []
    async with aclosing(_responses(call, model, request)) as answers:
        async for response in answers:
            if response.error is not None:
                failure = _failure(call, response.error)
                return _chunked(failure.status, {"error": str(failure)})
            responses.append(response)
    if len(responses) != 1:
        # The status was decided by the first response, or by none.
        return _chunked(200, {"error": _ONE_RESPONSE})
    return _chunked(200, _document(responses[0]))


async def generate_stream(call: Call) -> None:
    """Answer with one server-sent event for each response of a model."""
    model, request = await _accept(call)
    send = call.send
    has_begun = False
    try:
        async with aclosing(_responses(call, model, request)) as responses:
            async for response in responses:
                status, document = 200, None
                try:
                    if response.error is not None:
                        raise _failure(call, response.error)
                    document = _document(response)
                except CancelledByPeer:
                    raise
                except RequestError as failure:
                    status, document = failure.status, {"error": str(failure)}
                if not has_begun:
                    has_begun = True
                    await _begin(call, status)
                event = b"data: %b\n\n" % encode(document)
                await send({"type": "http.response.body", "body": event, "more_body": True})
    except CancelledByPeer:
        # Nothing that was cut short may look complete: no last chunk.
        raise
    except RequestError as error:
        if not has_begun:
            raise
        event = b"data: %b\n\n" % encode({"error": str(error)})
        await send({"type": "http.response.body", "body": event, "more_body": True})
    if not has_begun:
        await _begin(call, 200)
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def parse_generate(
    document: dict[str, Any], model: ServedModel, cancel: CancelToken
) -> InferRequest:
    """Understand a request body.

    Raises:
        ProtocolError: a field has a type that neither a tensor nor a parameter has, or no
            shape of the model's fits it.
        MalformedJSONError: elements of another type than the tensor's.
    """
    request = InferRequest(cancel=cancel)
    inputs = {tensor.name: tensor for tensor in model.inputs}
    if "parameters" in inputs:
        raise ProtocolError(
            f"model '{model.name}' has an input that is called 'parameters', "
            "which generate can't tell from the parameters of a request"
        )
    if "id" in document:
        request.id = as_string("id", document["id"])
    fields = {key: value for key, value in document.items() if key != "parameters"}
    fields |= as_object("parameters", document.get("parameters", {}))
    for key, value in fields.items():
        tensor = inputs.get(key)
        if tensor is None:
            request.parameters[key] = parameter(key, value)
        else:
            request.inputs.append(_tensor(tensor, value))
    return request


def _tensor(tensor: Tensor, value: Any) -> InferTensor:
    elements = value if isinstance(value, list) else [value]
    if tensor.datatype in ("FP16", "BF16"):
        raise ProtocolError(
            f"receiving {tensor.datatype} data via JSON is not supported. "
            f"Please use the binary data format for input {tensor.name}"
        )
    shape = _shape(tensor, len(elements))
    return InferTensor(
        tensor.name, tensor.datatype, shape, from_json(tensor.datatype, elements, len(elements))
    )


def _shape(tensor: Tensor, num_elements: int) -> tuple[int, ...]:
    """The tensor's shape for so many elements: the last free dimension takes what is left."""
    fixed = prod(dim for dim in tensor.shape if dim >= 0)
    left, remainder = divmod(num_elements, fixed) if fixed else (0, num_elements)
    shape = [*tensor.shape]
    for at in reversed(range(len(shape))):
        if shape[at] < 0:
            shape[at], left = left, 1
    if remainder or left != 1:
        raise ProtocolError(
            f"The schema can not convert input '{cut(tensor.name)}' to tensor with proper shape"
        )
    return tuple(shape)


async def _accept(call: Call) -> tuple[ServedModel, InferRequest]:
    model = find_model(call)
    # As the engine's generate, and as Triton.
    if call.coding() not in ("", "identity"):
        raise ProtocolError("Unsupported content-encoding, only 'identity' is supported.")
    document = decode_object(bytes(await call.body()))
    return model, parse_generate(document, model, call.record.token)


async def _responses(
    call: Call, model: ServedModel, request: InferRequest
) -> AsyncGenerator[InferResponse, None]:
    """The responses that tell the client something."""
    frontend, record = call.frontend, call.record
    ended_with: BaseException | None = None
    frontend.begin(record)
    request.headers = call.scope["headers"]
    try:
        async with aclosing(model.infer(request)) as responses:
            async for response in responses:
                if response.error is not None and not model.is_decoupled:
                    ended_with = response.error
                if response.outputs or response.error is not None:
                    record.first_output()
                    yield response
    except InferError as error:
        ended_with = error
        raise failure_of(error, record.token, strict=frontend.options.strict) from error
    except BaseException as error:
        ended_with = ended_with or error
        raise
    finally:
        frontend.end(record, outcome_of(request, ended_with))
        ended_with = None  # whose traceback has this frame


def _failure(call: Call, error: InferError) -> RequestError:
    failure = failure_of(error, call.record.token, strict=call.frontend.options.strict)
    if isinstance(failure, CancelledByPeer):
        raise failure
    if error.code is Code.NOT_FOUND:
        # What a model says with this code is 400 here (captures gen_fail and
        # stream_nondecoupled_fail).
        return ModelError(error.message, 400)
    return failure


def _document(response: InferResponse) -> dict[str, Any]:
    document: dict[str, Any] = dict(response.parameters)
    document["model_name"] = response.model_name
    document["model_version"] = response.model_version
    if response.id:
        document["id"] = response.id
    for tensor in response.outputs:
        elements = to_json(tensor)
        document[tensor.name] = elements[0] if len(elements) == 1 else elements
    return document


def _chunked(status: int, document: dict[str, Any]) -> Answer:
    return Answer([encode(document)], status, is_chunked=True)


async def _begin(call: Call, status: int) -> None:
    await call.send(
        {"type": "http.response.start", "status": status, "headers": list(_STREAM_HEADERS)}
    )
