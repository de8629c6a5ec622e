"""Triton's generate extension: ``generate`` and ``generate_stream``.

The body is one flat JSON object: ``text_input``, the sampling parameters, and whatever
else a client sends along, at the top level or under ``parameters``. What is no input of
the model is a request parameter: checked for its type, and not used by this engine.

A stream's head waits for the first output, since its status is that of the first
response; a client that leaves before it has therefore been sent nothing at all.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from disconnect_watch.adapters import LEAVES
from disconnect_watch.backends import Backend
from disconnect_watch.engine import Outcome, RequestOutput, SamplingParams
from disconnect_watch.errors import cut, shown
from disconnect_watch.server.access import RECORD_KEY, RequestRecord
from disconnect_watch.server.documents import decode_object, encode
from disconnect_watch.server.errors import (
    AbortedError,
    CancelledByPeer,
    FailedError,
    MalformedJSONError,
    ProtocolError,
    RequestError,
    ShuttingDownError,
)
from disconnect_watch.server.frontend import Frontend, Generation
from disconnect_watch.server.limits import read_body
from disconnect_watch.token import Reason

__all__ = ["EventStream", "generate", "generate_stream", "parse_generation"]


def parse_generation(document: dict[str, Any], backend: Backend) -> Generation:
    """Understand a request body.

    Raises:
        ProtocolError: a field is missing, unknown in type, out of range, or given twice.
        MalformedJSONError: ``text_input`` is no string, for which Triton answers 500.
    """
    nested = document.get("parameters", {})
    if not isinstance(nested, dict):
        raise ProtocolError(f"'parameters' is {shown(nested)}, it must be a JSON object")
    fields = {key: value for key, value in document.items() if key not in ("parameters", "id")}
    if twice := fields.keys() & nested.keys():
        raise ProtocolError(
            f"'{cut(min(twice))}' is given twice, at the top level and in 'parameters', "
            "give it once"
        )
    fields |= nested
    client_id = document.get("id", "")
    if not isinstance(client_id, str):
        raise ProtocolError(f"'id' is {shown(client_id)}, it must be a string")

    names = [tensor.name for tensor in backend.inputs]
    inputs = {name: _scalar(name, fields.pop(name)) for name in names if name in fields}
    for key, value in fields.items():
        if not isinstance(value, str | int | float):
            raise ProtocolError(
                f"parameter '{cut(key)}' has invalid type. "
                "It should be either 'int', 'bool', or 'string'."
            )
    required = [tensor.name for tensor in backend.inputs if not tensor.is_optional]
    if missing := [name for name in required if name not in inputs]:
        raise ProtocolError(
            f"[request id: {cut(client_id) or '<id_unknown>'}] expected number of inputs between "
            f"{len(required)} and {len(names)} but got {len(inputs)} inputs for model "
            f"'{backend.name}'. Got input(s) {list(inputs)}, but missing required input(s) "
            f"{missing}. Please provide all required input(s)."
        )
    prompt = inputs.pop("text_input")
    if not isinstance(prompt, str):
        raise MalformedJSONError(
            "Unable to parse JSON bytes array: attempt to access JSON non-string as string"
        )
    try:
        params = SamplingParams(**inputs)
    except ValueError as error:
        raise ProtocolError(str(error)) from error
    return Generation(prompt=prompt, params=params, client_id=client_id)


def _scalar(name: str, value: Any) -> Any:
    """A tensor of shape [1], given as its element or as an array of one."""
    if not isinstance(value, list):
        return value
    if len(value) != 1:
        raise ProtocolError(
            f"The schema can not convert input '{name}' to tensor with proper shape"
        )
    return value[0]


async def generate(request: Request) -> Response:
    """Answer with the whole text, or with nothing of it."""
    backend, generation, record = await _accept(request)
    frontend: Frontend = request.app.state.frontend
    pieces: list[str] = []
    async with aclosing(frontend.generate(backend, generation, record)) as outputs:
        async for output in outputs:
            pieces.append(output.text_delta)
            if output.outcome is not None:
                _raise_unless_finished(output.outcome)
    response = Response(
        _document(backend, generation, "".join(pieces)), media_type="application/json"
    )
    if request.scope["http_version"] != "1.0":
        # As Triton, which always sends this response in chunks.
        del response.headers["content-length"]
    return response


async def generate_stream(request: Request) -> Response:
    """Answer with one server-sent event for each step's text."""
    backend, generation, record = await _accept(request)
    frontend: Frontend = request.app.state.frontend
    outputs = frontend.generate(backend, generation, record)
    try:
        first = await anext(outputs)
        status = _status_of(first.outcome)
    except BaseException:
        await outputs.aclose()
        raise
    return EventStream(backend, generation, status=status, first=first, rest=outputs)


async def _accept(request: Request) -> tuple[Backend, Generation, RequestRecord]:
    frontend: Frontend = request.app.state.frontend
    record: RequestRecord = request.scope["state"][RECORD_KEY]
    body = await read_body(request, frontend.max_body_bytes)
    backend = frontend.find(request.path_params["model"], request.path_params.get("version"))
    return backend, parse_generation(decode_object(body), backend), record


class EventStream(Response):
    """A ``text/event-stream`` of outputs, whose last frame tells of an error if there was one.

    When the client has left, the body ends without its last chunk: nothing that was
    cut short may look complete. Starlette's own streaming response runs a second task
    to listen for the disconnect; here the engine's outcome tells of it.

    Args:
        first, rest: the outputs; ``rest`` is closed with the response.
    """

    media_type = "text/event-stream"
    charset = "utf-8"

    def __init__(
        self,
        backend: Backend,
        generation: Generation,
        *,
        status: int,
        first: RequestOutput,
        rest: AsyncGenerator[RequestOutput, None],
    ) -> None:
        # nginx buffers a stream unless it is told not to.
        super().__init__(
            status_code=status, headers={"cache-control": "no-cache", "x-accel-buffering": "no"}
        )
        del self.headers["content-length"]
        self._backend = backend
        self._generation = generation
        self._first = first
        self._rest = rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._rest):
            await send(
                {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.raw_headers,
                }
            )
            try:
                async with aclosing(self._frames()) as frames:
                    async for frame in frames:
                        await send({"type": "http.response.body", "body": frame, "more_body": True})
            except CancelledByPeer:
                return
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _frames(self) -> AsyncGenerator[bytes, None]:
        try:
            output = self._first
            while True:
                if output.text_delta:
                    yield _frame(_document(self._backend, self._generation, output.text_delta))
                if output.outcome is not None:
                    _raise_unless_finished(output.outcome)
                    return
                output = await anext(self._rest)
        except CancelledByPeer:
            raise
        except RequestError as error:
            yield _frame(encode({"error": str(error)}))


def _document(backend: Backend, generation: Generation, text: str) -> bytes:
    document = {
        "model_name": backend.name,
        "model_version": backend.version,
        "text_output": text,
    }
    if generation.client_id:
        document["id"] = generation.client_id
    return encode(document)


def _frame(data: bytes) -> bytes:
    return b"data: %b\n\n" % data


def _raise_unless_finished(outcome: Outcome) -> None:
    if outcome.kind != "finished":
        raise _error_of(outcome)


def _status_of(first: Outcome | None) -> int:
    """The status of a stream whose first output has this outcome.

    A model that failed is told of in the stream, as Triton does; what else ended the
    request before it had an output raises.
    """
    if first is None or first.kind == "finished":
        return 200
    error = _error_of(first)
    if not isinstance(error, FailedError):
        raise error
    return error.status


def _error_of(outcome: Outcome) -> RequestError:
    """What a request that did not finish is answered."""
    if outcome.kind == "failed":
        return FailedError(outcome.error or "the model failed")
    if outcome.reason in LEAVES:
        return CancelledByPeer(f"the client left: {outcome.reason}")
    if outcome.reason is Reason.SHUTDOWN:
        return ShuttingDownError("the server is shutting down, the request was cancelled")
    return AbortedError(f"the request was cancelled: {outcome.reason}")
