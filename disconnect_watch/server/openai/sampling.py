"""From a request's fields to what the engine is asked."""

from collections.abc import Sequence
from typing import Any

from disconnect_watch.engine import SamplingParams
from disconnect_watch.server.generation import Generation
from disconnect_watch.server.openai.errors import InvalidFieldError
from disconnect_watch.server.openai.schema import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
)

__all__ = ["generation_of", "prompts_of"]

#: Tokens of a completion for which nothing was asked, as OpenAI's.
DEFAULT_COMPLETION_TOKENS = 16

#: Of a chat: whatever the context still holds.
UNLIMITED = 1 << 31

#: Prompts of one request; the choices are these times ``n``.
MAX_PROMPTS = 2048

Prompt = str | Sequence[int]


def generation_of(request: GenerationRequest, prompt: Prompt, *others: Prompt) -> Generation:
    """What a request asks for, for all its prompts.

    Raises:
        InvalidFieldError: a field is out of its range.
    """
    asked: dict[str, Any] = {
        "max_tokens": _max_tokens(request),
        # OpenAI's default, where the engine's own is to take the likeliest.
        "temperature": 1.0 if request.temperature is None else request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "seed": request.seed,
        "ignore_eos": request.ignore_eos,
        "stop": _stops(request.stop),
        "stop_token_ids": None if request.stop_token_ids is None else tuple(request.stop_token_ids),
        "logprobs": _num_logprobs(request),
        "n": request.n,
    }
    if isinstance(request, CompletionRequest):
        asked["best_of"] = request.best_of
    try:
        params = SamplingParams(**{k: v for k, v in asked.items() if v is not None})
    except ValueError as error:
        # Each complaint of the parameters begins with the field's name.
        name, _, complaint = str(error).partition(" ")
        name = _told_as(request, name)
        raise InvalidFieldError(name, f"{name} {complaint}") from error
    if request.stream and params.is_best_of:
        raise InvalidFieldError("best_of", "best_of cannot be streamed, ask for n alone")
    return Generation(
        prompt=prompt,
        params=params,
        others=others,
        priority=0 if request.priority is None else request.priority,
        time_limit=request.timeout,
    )


def prompts_of(name: str, given: Any) -> list[Prompt]:
    """The prompts in a field that may be text, texts, tokens, or lists of tokens.

    Raises:
        InvalidFieldError: it is none of these, or empty.
    """
    if isinstance(given, str):
        return [given]
    if not given:
        raise InvalidFieldError(name, f"{name} is empty, send at least one text")
    if _is_tokens(given):
        return [given]
    if len(given) > MAX_PROMPTS:
        raise InvalidFieldError(
            name, f"{name} has {len(given)} entries, send at most {MAX_PROMPTS}"
        )
    for index, entry in enumerate(given):
        if not isinstance(entry, str) and not _is_tokens(entry):
            raise InvalidFieldError(
                name, f"{name}[{index}] is neither a text nor a list of token ids"
            )
    return list(given)


def _is_tokens(value: Any) -> bool:
    # A bool is an int to Python, and none to whoever wrote the request.
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(token, int) and not isinstance(token, bool) for token in value)
    )


def _told_as(request: GenerationRequest, name: str) -> str:
    """The field of a request that a parameter of the engine came from."""
    if isinstance(request, ChatRequest):
        if name == "logprobs":
            return "top_logprobs"
        if name == "max_tokens" and request.max_completion_tokens is not None:
            return "max_completion_tokens"
    return name


def _max_tokens(request: GenerationRequest) -> int:
    if isinstance(request, ChatRequest):
        if request.max_completion_tokens is not None:
            return request.max_completion_tokens
        default = UNLIMITED
    else:
        default = DEFAULT_COMPLETION_TOKENS
    return default if request.max_tokens is None else request.max_tokens


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(stop)


def _num_logprobs(request: GenerationRequest) -> int | None:
    if isinstance(request, ChatRequest):
        if request.top_logprobs is not None and not request.logprobs:
            raise InvalidFieldError("top_logprobs", "top_logprobs needs logprobs to be true")
        return (request.top_logprobs or 0) if request.logprobs else None
    assert isinstance(request, CompletionRequest)
    return request.logprobs
