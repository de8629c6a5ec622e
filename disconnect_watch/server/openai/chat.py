"""``/v1/chat/completions``: the next message of a chat, ``n`` times."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from disconnect_watch.backends import Backend
from disconnect_watch.engine import RequestOutput
from disconnect_watch.errors import shown
from disconnect_watch.server.events import EventStream, frame
from disconnect_watch.server.openai.batch import Batch
from disconnect_watch.server.openai.common import (
    DONE,
    Answer,
    answers_of,
    find,
    json_response,
    now,
    read,
    with_errors,
)
from disconnect_watch.server.openai.errors import InvalidFieldError
from disconnect_watch.server.openai.logprobs import chat_logprobs
from disconnect_watch.server.openai.sampling import generation_of
from disconnect_watch.server.openai.schema import ChatRequest

__all__ = ["chat_completions"]

#: Longer prompts than so many characters are tokenized off the loop.
MAX_INLINE_PROMPT = 4096


async def chat_completions(request: Request) -> Response:
    """Say the next message of a chat, at once or as a stream."""
    frontend, record, asked = await read(request, ChatRequest)
    asked.refuse_unsupported()
    backend = find(frontend, asked.model)
    # Before the prompt is made: what is refused anyway is not worth it.
    generation_of(asked, "")
    prompt = await prompt_of(backend, asked)
    generation = generation_of(asked, prompt)
    form = Form(backend, asked, f"chatcmpl-{record.request_id}")
    batch = await Batch.submit(frontend, backend, generation, record)
    if asked.stream:
        return EventStream(with_errors(form.frames(batch)), source=batch)
    with batch:
        return json_response(await form.document(batch))


async def prompt_of(backend: Backend, asked: ChatRequest) -> list[int]:
    """The tokens of a chat, by the model's own template.

    Raises:
        InvalidFieldError: there is no template, or it refuses the messages.
    """
    if backend.chat_template is None:
        raise InvalidFieldError(
            "model",
            f"the model '{asked.model}' has no chat template, use /v1/completions or serve it "
            "with --chat-template",
        )
    messages = [_plain(index, message) for index, message in enumerate(asked.messages)]
    try:
        # The tools are the template's to show; a model that calls one does so in its text.
        text = backend.chat_template.render(
            messages,
            tools=None if asked.tool_choice == "none" else asked.tools,
            variables=asked.chat_template_kwargs,
        )
        if len(text) <= MAX_INLINE_PROMPT:
            return backend.tokenize(text, add_special_tokens=False)
        return await asyncio.to_thread(backend.tokenize, text, add_special_tokens=False)
    except ValueError as error:
        raise InvalidFieldError("messages", str(error)) from error


def _plain(index: int, message: dict[str, Any]) -> dict[str, Any]:
    """A message as templates know it: with a role, and its content as one text."""
    if not isinstance(message.get("role"), str):
        raise InvalidFieldError(
            "messages", f"messages[{index}].role is {shown(message.get('role'))}, give a role"
        )
    content = message.get("content")
    if content is None or isinstance(content, str):
        return message
    if not isinstance(content, list):
        raise InvalidFieldError(
            "messages",
            f"messages[{index}].content is {shown(content)}, it must be a text or a list of parts",
        )
    texts = []
    for number, part in enumerate(content):
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            raise InvalidFieldError(
                "messages",
                f"messages[{index}].content[{number}] is {shown(part)}, only parts of text can "
                "be taken",
            )
        texts.append(part["text"])
    return {**message, "content": "".join(texts)}


class Form:
    """How one request is answered."""

    def __init__(self, backend: Backend, asked: ChatRequest, answer_id: str) -> None:
        self._backend = backend
        self._asked = asked
        self._num_choices = asked.n or 1
        self._head = {"id": answer_id, "created": now(), "model": asked.model}

    async def document(self, batch: Batch) -> dict[str, Any]:
        """The answer as a whole."""
        (answers,) = await answers_of(batch, self._num_choices)
        return {
            **self._head,
            "object": "chat.completion",
            "choices": [self._choice(index, answer) for index, answer in enumerate(answers)],
            "usage": batch.usage(),
        }

    async def frames(self, batch: Batch) -> AsyncGenerator[bytes, None]:
        """The answer as a stream: who speaks, what, why it ends."""
        for index in range(self._num_choices):
            yield self._chunk(index, {"role": "assistant", "content": ""})
        async with aclosing(batch.outputs()) as outputs:
            async for _, output in outputs:
                if output.text_delta or output.logprobs:
                    yield self._chunk(
                        output.index, {"content": output.text_delta}, logprobs=self._told(output)
                    )
                if output.finish_reason is not None:
                    yield self._chunk(output.index, {}, finish_reason=output.finish_reason)
        if self._asked.includes_usage:
            yield self._frame([], batch.usage())
        yield DONE

    def _told(self, output: RequestOutput) -> dict[str, Any] | None:
        if not self._asked.logprobs:
            return None
        return chat_logprobs(self._backend, output.logprobs)

    def _choice(self, index: int, answer: Answer) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": answer.text, "refusal": None},
            "logprobs": chat_logprobs(self._backend, answer.logprobs)
            if self._asked.logprobs
            else None,
            "finish_reason": answer.finish_reason,
        }

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        *,
        logprobs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
    ) -> bytes:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        return self._frame([choice], None)

    def _frame(self, choices: list[dict[str, Any]], usage: dict[str, object] | None) -> bytes:
        document = {**self._head, "object": "chat.completion.chunk", "choices": choices}
        if self._asked.includes_usage:
            document["usage"] = usage
        return frame(document)
