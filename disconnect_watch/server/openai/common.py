"""What the endpoints that generate share: who is asked, and how an answer comes together."""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TypeVar
from urllib.parse import quote

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from disconnect_watch.backends import Backend
from disconnect_watch.engine import RequestOutput, TokenLogprobs
from disconnect_watch.errors import cut
from disconnect_watch.server.access import RECORD_KEY, RequestRecord
from disconnect_watch.server.documents import encode
from disconnect_watch.server.errors import CancelledByPeer, RequestError
from disconnect_watch.server.events import frame
from disconnect_watch.server.frontend import Frontend
from disconnect_watch.server.limits import read_body
from disconnect_watch.server.openai.batch import Batch
from disconnect_watch.server.openai.errors import UnknownModelError, error_document
from disconnect_watch.server.openai.schema import decode_request

__all__ = ["DONE", "Answer", "answers_of", "find", "json_response", "read", "with_errors"]

T = TypeVar("T", bound=msgspec.Struct)

#: The last event of a stream that came to its end.
DONE = b"data: [DONE]\n\n"


@dataclass(slots=True)
class Answer:
    """One choice, as far as it is known."""

    pieces: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None

    def add(self, output: RequestOutput) -> None:
        """Take what a step brought of it."""
        self.pieces.append(output.text_delta)
        self.logprobs += output.logprobs
        self.finish_reason = output.finish_reason or self.finish_reason

    @property
    def text(self) -> str:
        return "".join(self.pieces)


async def read(request: Request, kind: type[T]) -> tuple[Frontend, RequestRecord, T]:
    """Take a request whole.

    Raises:
        RequestError: it makes no sense, or its client left before it was complete.
    """
    frontend: Frontend = request.app.state.frontend
    record: RequestRecord = request.scope["state"][RECORD_KEY]
    body = await read_body(request, frontend.options.max_body_bytes)
    return frontend, record, decode_request(kind, body)


def find(frontend: Frontend, model: str) -> Backend:
    """The backend that generates by a model; here names are written as they are.

    Raises:
        UnknownModelError: there is none, though one of tensors may have the name.
    """
    backend = frontend.backends.get(quote(model, safe=""))
    if backend is None:
        raise UnknownModelError(
            f"the model '{cut(model)}' does not exist, or cannot do this: see /v1/models"
        )
    return backend


async def answers_of(batch: Batch, num_choices: int) -> list[list[Answer]]:
    """All answers, by prompt and then by index.

    Raises:
        RequestError: what the request is answered instead; of a part nothing is told.
    """
    answers: dict[int, list[Answer]] = {}
    async with aclosing(batch.outputs()) as outputs:
        async for part, output in outputs:
            choices = answers.setdefault(part, [Answer() for _ in range(num_choices)])
            choices[output.index].add(output)
    return [answers[part] for part in sorted(answers)]


async def with_errors(frames: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """The frames of a stream, and the error that ended it, if one did; then there is no DONE."""
    try:
        async with aclosing(frames):
            async for data in frames:
                yield data
    except CancelledByPeer:
        raise
    except RequestError as error:
        yield frame(error_document(error.status, str(error), error))


def json_response(value: object) -> Response:
    """An answer that is there as a whole."""
    return Response(encode(value), media_type="application/json")


def now() -> int:
    """Seconds since the epoch, as the API tells when something was made."""
    return int(time.time())
