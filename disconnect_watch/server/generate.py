"""Triton's generate extension: ``generate`` and ``generate_stream``.

Of one answer the text is a string, of several an array; in a stream each event is about one
answer, and says which if there are several.

A stream's head waits for the first output, since its status is that of the first
response; a client that leaves before it has therefore been sent nothing at all.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from disconnect_watch.backends import Backend
from disconnect_watch.engine import Outcome, RequestOutput, TokenLogprobs
from disconnect_watch.server.access import RECORD_KEY, RequestRecord
from disconnect_watch.server.documents import decode_object, encode
from disconnect_watch.server.errors import (
    CancelledByPeer,
    FailedError,
    RequestError,
)
from disconnect_watch.server.generation import Generation, parse_generation
from disconnect_watch.server.limits import read_body
from disconnect_watch.server.outcome import error_of, raise_unless_finished
from disconnect_watch.server.running import Running

if TYPE_CHECKING:
    from disconnect_watch.server.frontend import Frontend

__all__ = ["EventStream", "generate", "generate_stream"]


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
    response = Response(_document(backend, generation, document), media_type="application/json")
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
    return EventStream(backend, generation, status=status, first=first, rest=outputs)


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
        rest: Running,
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
        with self._rest:
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
                if output.text_delta or output.logprobs:
                    yield _frame(_document(self._backend, self._generation, self._fields(output)))
                if output.outcome is not None:
                    raise_unless_finished(output.outcome)
                    return
                output = await anext(self._rest)
        except CancelledByPeer:
            raise
        except RequestError as error:
            yield _frame(encode({"error": str(error)}))

    def _fields(self, output: RequestOutput) -> dict[str, object]:
        fields: dict[str, object] = {"text_output": output.text_delta}
        if output.logprobs:
            fields["logprobs"] = _logprobs(output.logprobs)
        if self._generation.params.n > 1:
            fields["index"] = output.index
        return fields


def _logprobs(logprobs: Sequence[TokenLogprobs]) -> str:
    """One element of a tensor of strings: JSON again."""
    return encode(logprobs).decode()


def _document(backend: Backend, generation: Generation, fields: Mapping[str, object]) -> bytes:
    document = {"model_name": backend.name, "model_version": backend.version, **fields}
    if generation.client_id:
        document["id"] = generation.client_id
    return encode(document)


def _frame(data: bytes) -> bytes:
    return b"data: %b\n\n" % data


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
