"""Text models that take tensors, behind ``/v1/completions``: of a repository, or of a gateway.

A text model has an input ``text_input`` and an output ``text_output``, as those of Triton's own
backends for language models. Each of its responses is a piece of the one answer. A field of the
request goes to the input of its name, or to the model as a request parameter, as by ``generate``.
"""

import asyncio
import codecs
from collections.abc import AsyncGenerator
from contextlib import aclosing, nullcontext
from typing import Any
from urllib.parse import quote, unquote

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from disconnect_watch.backends.infer import Code, InferError, InferRequest, ServedModel
from disconnect_watch.server.access import RequestRecord
from disconnect_watch.server.errors import MalformedJSONError, ProtocolError
from disconnect_watch.server.events import EventStream, frame
from disconnect_watch.server.frontend import Frontend
from disconnect_watch.server.openai.common import DONE, json_response, now, with_errors
from disconnect_watch.server.openai.errors import InvalidFieldError
from disconnect_watch.server.openai.sampling import prompts_of
from disconnect_watch.server.openai.schema import CompletionRequest
from disconnect_watch.server.v2.accounts import outcome_of
from disconnect_watch.server.v2.failures import STATUS, ModelError, failure_of
from disconnect_watch.server.v2.generate import parse_generate

__all__ = ["complete", "text_model", "text_model_names"]

#: What a model may be told of how to generate.
_FIELDS = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "presence_penalty",
    "frequency_penalty",
)
#: What one text cannot be the answer to, and the values that change nothing.
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "best_of": (None, 1),
    "logprobs": (None,),
    "logit_bias": (None, {}),
    "response_format": (None, {"type": "text"}),
    "suffix": (None, ""),
}


async def text_model(frontend: Frontend, name: str) -> ServedModel | None:
    """The text model of that name; None if there is none.

    Raises:
        ModelError: it is not served now, or nobody can be asked.
    """
    if frontend.models is None:
        return None
    written = quote(name, safe="")
    try:
        if frontend.remote is not None:
            await frontend.remote.refresh("inference", written, None)
        model = frontend.models.find(written)
    except InferError as error:
        if error.code is Code.NOT_FOUND:
            return None
        raise ModelError(error.message, STATUS[error.code]) from error
    is_text = _has(model.inputs, "text_input") and _has(model.outputs, "text_output")
    return model if is_text else None


async def text_model_names(frontend: Frontend) -> list[str]:
    """The names of all text models that are served.

    Raises:
        ModelError: nobody can be asked.
    """
    if frontend.models is None:
        return []
    try:
        if frontend.remote is not None:
            await frontend.remote.refresh("model-repository", None, None)
    except InferError as error:
        raise ModelError(error.message, STATUS[error.code]) from error
    names = dict.fromkeys(unquote(entry.name) for entry in frontend.models.index(ready=True))
    are_text = await asyncio.gather(*(_is_text_model(frontend, name) for name in names))
    return [name for name, is_text in zip(names, are_text, strict=True) if is_text]


async def _is_text_model(frontend: Frontend, name: str) -> bool:
    try:
        return await text_model(frontend, name) is not None
    except ModelError:
        return False  # it has just been unloaded


async def complete(
    frontend: Frontend,
    record: RequestRecord,
    model: ServedModel,
    asked: CompletionRequest,
    headers: list[tuple[bytes, bytes]],
) -> Response:
    """Go on with a prompt, at once or as a stream whose head waits for the first piece.

    Raises:
        RequestError: it asks for what a text model cannot do, or came to no answer.
    """
    request = _request_of(model, asked, record)
    request.headers = headers
    pieces = _pieces(frontend, record, model, request, asked.timeout)
    head = {
        "id": f"cmpl-{record.request_id}",
        "object": "text_completion",
        "created": now(),
        "model": asked.model,
    }
    echo = _prompt_of(asked) if asked.echo else ""
    if not asked.stream:
        async with aclosing(pieces):
            text = "".join([echo, *[piece async for piece in pieces]])
        return json_response({**head, "choices": [_choice(text, "stop")]})
    first = await anext(pieces, "")
    return _Stream(with_errors(_frames(head, echo + first, pieces)), pieces)


class _Stream(EventStream):
    """A stream that ends its source however far it was told."""

    def __init__(
        self, frames: AsyncGenerator[bytes, None], pieces: AsyncGenerator[str, None]
    ) -> None:
        super().__init__(frames, source=nullcontext())
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._pieces):
            await super().__call__(scope, receive, send)


async def _frames(
    head: dict[str, Any], first: str, pieces: AsyncGenerator[str, None]
) -> AsyncGenerator[bytes, None]:
    if first:
        yield frame({**head, "choices": [_choice(first, None)]})
    async for piece in pieces:
        if piece:
            yield frame({**head, "choices": [_choice(piece, None)]})
    yield frame({**head, "choices": [_choice("", "stop")]})
    yield DONE


async def _pieces(
    frontend: Frontend,
    record: RequestRecord,
    model: ServedModel,
    request: InferRequest,
    seconds: float | None,
) -> AsyncGenerator[str, None]:
    """What the model says, as it says it.

    Args:
        seconds: that it may take, beside the limit that the record has.

    Raises:
        RequestError: it failed, or was cancelled.
    """
    ended_with: BaseException | None = None
    # A model that works on bytes may part a character between two of its responses.
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    frontend.begin(record)
    try:
        with frontend.ledger.deadline(record, seconds):
            async with aclosing(model.infer(request)) as responses:
                async for response in responses:
                    if response.error is not None:
                        raise response.error
                    for tensor in response.outputs:
                        if tensor.name == "text_output":
                            record.first_output()
                            elements = tensor.to_numpy().reshape(-1).tolist()
                            yield decoder.decode(b"".join(elements))
            if rest := decoder.decode(b"", final=True):
                yield rest
    except InferError as error:
        ended_with = error
        raise failure_of(error, record.token, strict=False) from error
    except BaseException as error:
        ended_with = error
        raise
    finally:
        frontend.end(record, outcome_of(request, ended_with))


def _prompt_of(asked: CompletionRequest) -> str:
    """The one text that a text model goes on with.

    Raises:
        InvalidFieldError: it is several, or tokens.
    """
    prompts = prompts_of("prompt", asked.prompt)
    if len(prompts) != 1 or not isinstance(prompts[0], str):
        raise InvalidFieldError(
            "prompt", f"the model '{asked.model}' takes one text a request as prompt"
        )
    return prompts[0]


def _request_of(
    model: ServedModel, asked: CompletionRequest, record: RequestRecord
) -> InferRequest:
    for name, values in _HARMLESS.items():
        if getattr(asked, name) not in values:
            raise InvalidFieldError(
                name, f"{name} is not for the model '{asked.model}', which gives one text"
            )
    if asked.includes_usage:
        raise InvalidFieldError(
            "stream_options", f"the tokens of the model '{asked.model}' are not known here"
        )
    document: dict[str, Any] = {"text_input": _prompt_of(asked)}
    for name in _FIELDS:
        if (value := getattr(asked, name)) is not None:
            document[name] = value
    if _has(model.inputs, "stream"):
        document["stream"] = bool(asked.stream)
    try:
        request = parse_generate(document, model, record.token)
    except MalformedJSONError as error:
        # Triton's 500 for a value that the model has another type for.
        raise ProtocolError(str(error)) from error
    request.id = record.request_id
    request.priority = max(0, asked.priority or 0)
    return request


def _choice(text: str, finish_reason: str | None) -> dict[str, Any]:
    return {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}


def _has(tensors: Any, name: str) -> bool:
    return any(tensor.name == name and tensor.datatype == "BYTES" for tensor in tensors)
