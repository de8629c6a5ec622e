"""What a frontend and its engine say to each other, as msgpack arrays.

A frontend numbers its requests and its questions; the engine answers by number. What a step made
for all requests of a frontend is one message, with the engine's counters beside it.
"""

from array import array
from collections.abc import Callable, Sequence
from operator import index
from typing import Any, Literal

import msgspec

from disconnect_watch.engine import (
    AbortResult,
    EngineLostError,
    EngineStats,
    EngineView,
    Outcome,
    PromptTooLongError,
    QueueFullError,
    RequestOutput,
    SamplingParams,
    TokenLogprobs,
)

__all__ = [
    "Abort",
    "Aborted",
    "Admitted",
    "Answers",
    "Asked",
    "Close",
    "Ended",
    "Output",
    "Prompt",
    "Refusal",
    "Submit",
    "View",
    "Viewed",
    "error_of",
    "output_of",
    "pack_tokens",
    "refusal_of",
    "unpack_tokens",
]


class Prompt(msgspec.Struct, array_like=True):
    """One request of several that are taken together.

    Attributes:
        token_ids: as ``pack_tokens`` makes them.
    """

    number: int
    request_id: str
    token_ids: bytes


class Submit(msgspec.Struct, array_like=True, tag="submit"):
    """Requests, all of which are taken, or none; answered with ``Admitted``.

    Attributes:
        slot, generation: of the token that cancels them.
        time_limit: seconds from now.
    """

    call: int
    prompts: list[Prompt]
    params: SamplingParams
    slot: int
    generation: int
    priority: int
    time_limit: float | None


class Close(msgspec.Struct, array_like=True, tag="close"):
    """Nobody reads this request's outputs any more; its token may be others' too."""

    number: int


class Abort(msgspec.Struct, array_like=True, tag="abort"):
    """See ``Backend.abort``; answered with ``Aborted``."""

    call: int
    request_id: str


class View(msgspec.Struct, array_like=True, tag="view"):
    """See ``Viewable.view``; answered with ``Viewed``."""

    call: int


Asked = Submit | Close | Abort | View


class Refusal(msgspec.Struct, array_like=True):
    """An error by its class and what that is made from."""

    kind: Literal["queue_full", "too_long", "closed", "value"]
    arguments: list[Any]


class Admitted(msgspec.Struct, array_like=True, tag="admitted"):
    """The answer to ``Submit``; outputs may come before it."""

    call: int
    refusal: Refusal | None


class Output(msgspec.Struct, array_like=True, tag="output"):
    """A ``RequestOutput``, without its request's id."""

    number: int
    text_delta: str
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    num_generated_tokens: int
    logprobs: tuple[TokenLogprobs, ...]
    index: int
    finish_reason: Literal["stop", "length"] | None
    stop_reason: str | int | None
    outcome: Outcome | None


class Ended(msgspec.Struct, array_like=True, tag="ended"):
    """How a request ended, whichever frontend's it was."""

    request_id: str
    outcome: Outcome


class Aborted(msgspec.Struct, array_like=True, tag="aborted"):
    """The answer to ``Abort``."""

    call: int
    result: AbortResult


class Viewed(msgspec.Struct, array_like=True, tag="viewed"):
    """The answer to ``View``."""

    call: int
    view: EngineView


class Answers(msgspec.Struct, array_like=True):
    """What there is to tell a frontend, in the order in which it came about."""

    told: list[Admitted | Output | Ended | Aborted | Viewed]
    stats: EngineStats


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Token ids as machine words: of a long prompt, msgpack would be most of its way.

    Raises:
        ValueError: one is no integer, or none that can be a token.
    """
    try:
        return array("q", map(index, token_ids)).tobytes()
    except TypeError as error:
        raise ValueError(f"prompt has a token id that is no integer: {error}") from error
    except OverflowError as error:
        raise ValueError(f"prompt has a token id that is out of range: {error}") from error


def unpack_tokens(packed: bytes) -> list[int]:
    """The other half of ``pack_tokens``."""
    words = array("q")
    words.frombytes(packed)
    return words.tolist()


def refusal_of(error: BaseException) -> Refusal:
    """An error of ``Engine.make_request`` or ``admit``; any other is the engine's end."""
    if isinstance(error, QueueFullError):
        return Refusal("queue_full", [error.max_queue])
    if isinstance(error, PromptTooLongError):
        return Refusal("too_long", [error.num_prompt_tokens, error.max_model_len])
    return Refusal("value" if isinstance(error, ValueError) else "closed", [str(error)])


#: The engine that refuses as it ends is as good as lost: another takes its place.
_ERRORS: dict[str, Callable[..., Exception]] = {
    "queue_full": QueueFullError,
    "too_long": PromptTooLongError,
    "closed": EngineLostError,
    "value": ValueError,
}


def error_of(refusal: Refusal) -> Exception:
    """The other half of ``refusal_of``."""
    return _ERRORS[refusal.kind](*refusal.arguments)


def output_of(told: Output, request_id: str) -> RequestOutput:
    """The output as its reader wants it."""
    return RequestOutput(
        request_id,
        told.text_delta,
        told.token_ids,
        told.outcome,
        told.num_prompt_tokens,
        told.num_generated_tokens,
        told.logprobs,
        told.index,
        told.finish_reason,
        told.stop_reason,
    )
