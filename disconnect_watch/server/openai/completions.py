"""``/v1/completions``: one or several prompts, ``n`` answers to each."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import Response

from disconnect_watch.backends import Backend
from disconnect_watch.engine import RequestOutput, TokenLogprobs
from disconnect_watch.server.events import EventStream, frame
from disconnect_watch.server.openai.batch import Batch
from disconnect_watch.server.openai.common import (
    DONE,
    answers_of,
    find,
    json_response,
    now,
    read,
    with_errors,
)
from disconnect_watch.server.openai.errors import InvalidFieldError
from disconnect_watch.server.openai.logprobs import completion_logprobs
from disconnect_watch.server.openai.sampling import Prompt, generation_of, prompts_of
from disconnect_watch.server.openai.schema import CompletionRequest
from disconnect_watch.server.openai.text_models import complete, text_model

__all__ = ["completions"]


async def completions(request: Request) -> Response:
    """Go on with each prompt, at once or as a stream."""
    frontend, record, asked = await read(request, CompletionRequest)
    if quote(asked.model, safe="") not in frontend.backends:
        model = await text_model(frontend, asked.model)
        if model is not None:
            return await complete(frontend, record, model, asked, request.scope["headers"])
    asked.refuse_unsupported()
    backend = find(frontend, asked.model)
    prompts = prompts_of("prompt", asked.prompt)
    generation = generation_of(asked, *prompts)
    form = Form(backend, asked, prompts, f"cmpl-{record.request_id}")
    batch = await Batch.submit(frontend, backend, generation, record)
    if asked.stream:
        return EventStream(with_errors(form.frames(batch)), source=batch)
    with batch:
        return json_response(await form.document(batch))


class Form:
    """How one request is answered."""

    def __init__(
        self, backend: Backend, asked: CompletionRequest, prompts: list[Prompt], answer_id: str
    ) -> None:
        self._backend = backend
        self._asked = asked
        self._num_choices = asked.n or 1
        self._head = {
            "id": answer_id,
            "object": "text_completion",
            "created": now(),
            "model": asked.model,
        }
        self._echoes = [self._echo(prompt) for prompt in prompts]

    async def document(self, batch: Batch) -> dict[str, Any]:
        """The answer as a whole."""
        answers = await answers_of(batch, self._num_choices)
        return {
            **self._head,
            "choices": [
                self._choice(part, index, echo + answer.text, answer.logprobs, answer.finish_reason)
                for part, (echo, choices) in enumerate(zip(self._echoes, answers, strict=True))
                for index, answer in enumerate(choices)
            ],
            "usage": batch.usage(),
        }

    async def frames(self, batch: Batch) -> AsyncGenerator[bytes, None]:
        """The answer as a stream, which tells of a prompt again before its first piece."""
        # By choice, how many characters of it were told.
        lengths: dict[tuple[int, int], int] = {}
        async with aclosing(batch.outputs()) as outputs:
            async for part, output in outputs:
                place = (part, output.index)
                echo = "" if place in lengths else self._echoes[part]
                text = echo + output.text_delta
                offset = lengths.get(place, 0)
                lengths[place] = offset + len(text)
                if text or output.logprobs or output.finish_reason:
                    yield self._chunk(part, output, text, offset)
        if self._asked.includes_usage:
            yield frame({**self._head, "choices": [], "usage": batch.usage()})
        yield DONE

    def _chunk(self, part: int, output: RequestOutput, text: str, offset: int) -> bytes:
        choice = self._choice(
            part, output.index, text, output.logprobs, output.finish_reason, offset=offset
        )
        usage = {"usage": None} if self._asked.includes_usage else {}
        return frame({**self._head, "choices": [choice], **usage})

    def _choice(
        self,
        part: int,
        index: int,
        text: str,
        logprobs: list[TokenLogprobs] | tuple[TokenLogprobs, ...],
        finish_reason: str | None,
        *,
        offset: int = 0,
    ) -> dict[str, Any]:
        wants_logprobs = self._asked.logprobs is not None
        return {
            "index": part * self._num_choices + index,
            "text": text,
            "logprobs": completion_logprobs(self._backend, logprobs, offset=offset)
            if wants_logprobs
            else None,
            "finish_reason": finish_reason,
        }

    def _echo(self, prompt: Prompt) -> str:
        """What is told of a prompt before the answer to it."""
        if not self._asked.echo:
            return ""
        if self._asked.logprobs is not None:
            raise InvalidFieldError(
                "echo", "echo with logprobs would need those of the prompt, ask for one of them"
            )
        if isinstance(prompt, str):
            return prompt
        return b"".join(map(self._backend.token_bytes, prompt)).decode(errors="replace")
