"""Triton's generate extension: ``generate`` and ``generate_stream``.

Of one answer the text is a string, of several an array; in a stream each event is about one
answer, and says which if there are several.

A stream's head waits for the first output, since its status is that of the first
response; a client that leaves before it has therefore been sent nothing at all.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response

from disconnect_watch.backends import Backend
from disconnect_watch.engine import Outcome, RequestOutput, TokenLogprobs
from disconnect_watch.server.access import RECORD_KEY, RequestRecord
from disconnect_watch.server.documents import decode_object, encode
from disconnect_watch.server.errors import (
    CancelledByPeer,
    FailedError,
    RequestError,
)
from disconnect_watch.server.events import EventStream, frame
from disconnect_watch.server.generation import Generation, parse_generation
from disconnect_watch.server.limits import read_body
from disconnect_watch.server.load import ASKED_BY, load_headers
from disconnect_watch.server.outcome import error_of, raise_unless_finished
from disconnect_watch.server.running import Running

if TYPE_CHECKING:
    from disconnect_watch.server.frontend import Frontend

__all__ = ["generate", "generate_stream"]


async def generate(request: Request) -> Response:
    """Answer with the whole text, or with nothing of it."""
    backend, generation, record = await _accept(request)
    frontend: Frontend = request.app.state.frontend
    answers = [Answer() for _ in range(generation.params.n)]
    with await frontend.submit(backend, generation, record) as outputs:
        async for output in outputs:
            if output.outcome is not None:
                raise_unless_finished(output.outcome)
            answers[output.index].add(output)
    fields: dict[str, list[str]] = {"text_output": ["".join(answer.pieces) for answer in answers]}
    if generation.params.logprobs is not None:
        fields["logprobs"] = [_logprobs(answer.logprobs) for answer in answers]
    # As Triton, a tensor of one element is written as that element.
    document = {name: e if len(e) > 1 else e[0] for name, e in fields.items()}
    body = encode(_document(backend, generation, document))
    response = Response(body, headers=_load_of(request, backend), media_type="application/json")
    if request.scope["http_version"] != "1.0":
        # As Triton, which always sends this response in chunks.
        del response.headers["content-length"]
    return response


async def generate_stream(request: Request) -> Response:
    """Answer with one server-sent event for each step's text."""
    backend, generation, record = await _accept(request)
    frontend: Frontend = request.app.state.frontend
    outputs = await frontend.submit(backend, generation, record)
    try:
        first = await anext(outputs)
        status = _status_of(first.outcome)
    except BaseException:
        outputs.close()
        raise
    frames = _frames(backend, generation, first, outputs)
    response = EventStream(frames, source=outputs, status=status)
    response.headers.update(_load_of(request, backend))
    return response


def _load_of(request: Request, backend: Backend) -> dict[str, str]:
    return load_headers(request.headers.get(ASKED_BY), backend)


@dataclass(slots=True)
class Answer:
    """One of the answers to a request, as far as it is known."""

    pieces: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    def add(self, output: RequestOutput) -> None:
        """Take what a step brought of it."""
        self.pieces.append(output.text_delta)
        self.logprobs += output.logprobs


async def _accept(request: Request) -> tuple[Backend, Generation, RequestRecord]:
    frontend: Frontend = request.app.state.frontend
    record: RequestRecord = request.scope["state"][RECORD_KEY]
    body = await read_body(request, frontend.options.max_body_bytes)
    backend = frontend.find(request.path_params["model"], request.path_params.get("version"))
    return backend, parse_generation(decode_object(body), backend), record


async def _frames(
    backend: Backend, generation: Generation, first: RequestOutput, rest: Running
) -> AsyncGenerator[bytes, None]:
    output = first
    try:
        while True:
            if output.text_delta or output.logprobs:
                fields: dict[str, object] = {"text_output": output.text_delta}
                if output.logprobs:
                    fields["logprobs"] = _logprobs(output.logprobs)
                if generation.params.n > 1:
                    fields["index"] = output.index
                yield frame(_document(backend, generation, fields))
            if output.outcome is not None:
                raise_unless_finished(output.outcome)
                return
            output = await anext(rest)
    except CancelledByPeer:
        raise
    except RequestError as error:
        yield frame({"error": str(error)})


def _logprobs(logprobs: Sequence[TokenLogprobs]) -> str:
    """One element of a tensor of strings: JSON again."""
    return encode(logprobs).decode()


def _document(
    backend: Backend, generation: Generation, fields: Mapping[str, object]
) -> dict[str, object]:
    document = {"model_name": backend.name, "model_version": backend.version, **fields}
    return document | {"id": generation.client_id} if generation.client_id else document


def _status_of(first: Outcome | None) -> int:
    """The status of a stream whose first output has this outcome.

    A model that failed is told of in the stream, as Triton does; what else ended the
    request before it had an output raises.
    """
    if first is None or first.kind == "finished":
        return 200
    error = error_of(first)
    if not isinstance(error, FailedError):
        raise error
    return error.status
