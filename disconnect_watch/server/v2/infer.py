"""``infer``: one request to a model, one response of it."""

from functools import partial

from disconnect_watch.backends.infer import InferResponse, LendsMemory, ServedModel
from disconnect_watch.server.errors import FailedError, UnsupportedError
from disconnect_watch.server.v2.accounts import outcome_of
from disconnect_watch.server.v2.call import Answer, Call
from disconnect_watch.server.v2.compression import accepted_coding, compress, decompress
from disconnect_watch.server.v2.forward import forwarded_headers
from disconnect_watch.server.v2.models import find_model
from disconnect_watch.server.v2.parse import ParsedInfer, header_length_of, parse_infer
from disconnect_watch.server.v2.render import Rendered, render_infer

__all__ = ["infer"]

_LENGTH = b"inference-header-content-length"


async def infer(call: Call) -> Answer:
    """Run one request of a model with one response."""
    frontend = call.frontend
    options = frontend.options
    model = find_model(call)
    if model.is_decoupled:
        raise UnsupportedError(
            "HTTP end point doesn't support models with decoupled transaction policy"
        )
    coding = call.coding()
    body = call.body_at_hand()
    if body is None:
        body = await call.body(None if coding else partial(_room, call, model))
    if coding:
        body = decompress(coding, body, options.max_body_bytes)
    pattern = options.header_forward_pattern
    parsed = parse_infer(
        body,
        header_length_of(call.header(_LENGTH), len(body)),
        model,
        memory=frontend.memory,
        cancel=call.record.token,
        forwarded=None if pattern is None else forwarded_headers(call.scope["headers"], pattern),
    )
    try:
        response = await _run(call, model, parsed)
        rendered = render_infer(parsed, response, model, strict=options.strict)
    finally:
        parsed.close()
    return _answer(rendered, call.header(b"accept-encoding"))


def _room(call: Call, model: ServedModel, size_bytes: int) -> memoryview | None:
    """Memory of the model's for a body."""
    if not isinstance(model, LendsMemory):
        return None
    tensors_at = header_length_of(call.header(_LENGTH), size_bytes)
    return model.room_for(size_bytes, tensors_at % size_bytes)


async def _run(call: Call, model: ServedModel, parsed: ParsedInfer) -> InferResponse:
    found: InferResponse | None = None
    ended_with: BaseException | None = None
    response: InferResponse | None = None
    num_responses = 0
    frontend = call.frontend
    frontend.begin(call.record)
    parsed.request.headers = call.scope["headers"]
    responses = model.infer(parsed.request)
    try:
        async for response in responses:
            if response.error is not None:
                raise response.error
            if response.outputs or not response.is_final or not num_responses:
                found = response
                num_responses += 1
    except BaseException as error:
        ended_with = error
        # One that came to its end by itself has nothing left to close.
        await responses.aclose()
        raise
    finally:
        frontend.end(call.record, outcome_of(parsed.request, ended_with))
        # Their tracebacks have this frame, and with it the request's tensors.
        ended_with = response = None
    if found is None or num_responses != 1:
        raise FailedError(f"expected a single response, got {num_responses}")
    return found


def _answer(rendered: Rendered, accepts: bytes | None) -> Answer:
    answer = Answer(rendered.pieces)
    if rendered.header_length is not None:
        answer.content_type = b"application/octet-stream"
        answer.headers.append((_LENGTH, b"%d" % rendered.header_length))
    coding = accepted_coding(accepts.decode("latin-1")) if accepts else "identity"
    if coding != "identity":
        answer.pieces = [compress(coding, rendered.pieces)]
        answer.headers.append((b"content-encoding", coding.encode()))
    return answer
