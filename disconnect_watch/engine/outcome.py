"""What the engine says of a request: outputs as it runs, one outcome at its end."""

from dataclasses import dataclass
from typing import Literal

from disconnect_watch.token import Reason

__all__ = ["AbortResult", "Drawn", "Outcome", "Phase", "RequestOutput", "Sampled", "TokenLogprobs"]

Phase = Literal["waiting", "prefill", "decode"]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """How likely one token was, as natural logarithms.

    Attributes:
        token_id: the token that was sampled.
        logprob: of that token.
        top: id and logarithm of the likeliest, the best first; as many as were asked for.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Sampled:
    """What a runner returns for a row: a token.

    Attributes:
        logprobs: of that token, for a request that wants them.
    """

    token_id: int
    logprobs: TokenLogprobs | None = None


#: What a step made of a row: its next tokens, in order; behind them the error, if there was one.
Drawn = list[Sampled | Exception]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one request ended. Every accepted request gets exactly one.

    Of a request with several answers, numbers of tokens and blocks are those of all of them but
    for the prompt, which is one; finish reason and stop reason are those of the answer that is told
    first, and the phase that of the one that was furthest.

    Times are ``time.monotonic_ns``, and 0 unless the request was cancelled.

    Attributes:
        kind: the three ways to end.
        finish_reason: of ``finished``: an end token, a stop token or a stop string; or no more
            tokens wanted or possible.
        stop_reason: the stop string or the id of the stop token that ended it.
        reason: of ``cancelled``: why the flag was set.
        phase: of ``cancelled`` and ``failed``: what the request was doing.
        num_cached_tokens: of the prompt, those that an earlier request had computed.
        num_generated_tokens: tokens that left the engine.
        num_wasted_tokens: tokens that were sampled and then withheld, as the flag was seen.
        flag_at_ns: the cause of the cancel was seen, as the token tells it.
        seen_at_ns: the engine read the flag.
        dropped_at_ns: the request was out of queue and batch.
        freed_at_ns: its blocks were given up.
        num_blocks_freed: how many those were; blocks that others share are not among them.
        block_ns: how long it held blocks, shared ones too, summed over all of them.
        error: of ``failed``: what went wrong.
        transfer: of a ``finished`` request that was to prefill only: what ``EngineCore.on_retain``
            returned for its blocks. None if its answer ended with the first token, or if nothing
            could be retained; then there is no finish reason either.
    """

    kind: Literal["finished", "cancelled", "failed"]
    finish_reason: Literal["stop", "length"] | None = None
    stop_reason: str | int | None = None
    reason: Reason | None = None
    phase: Phase | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    num_wasted_tokens: int = 0
    flag_at_ns: int = 0
    seen_at_ns: int = 0
    dropped_at_ns: int = 0
    freed_at_ns: int = 0
    num_blocks_freed: int = 0
    block_ns: int = 0
    error: str | None = None
    transfer: object | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What one step produced for one request.

    Attributes:
        text_delta: text that became certain; never half of a character, nor anything that may
            be the beginning of a stop string.
        token_ids: the new tokens, end token included.
        logprobs: of each of these, if the request wants them.
        index: which of several answers this is about, as are the numbers.
        finish_reason, stop_reason: as in the outcome, with the last output of an answer.
        outcome: only with the last output of a request.
        num_generated_tokens: all so far.
    """

    request_id: str
    text_delta: str
    token_ids: tuple[int, ...]
    outcome: Outcome | None
    num_prompt_tokens: int
    num_generated_tokens: int
    logprobs: tuple[TokenLogprobs, ...] = ()
    index: int = 0
    finish_reason: Literal["stop", "length"] | None = None
    stop_reason: str | int | None = None


@dataclass(frozen=True, slots=True)
class AbortResult:
    """What an abort by id brought about; it is returned after the effect, not before.

    Attributes:
        outcome: ``cancelled`` is told to one caller only, the first.
        phase: what the request was doing; None if it had not to be cancelled.
        num_blocks_freed: KV blocks that nobody holds any more.
        latency_ns: from the abort to the free blocks.
    """

    outcome: Literal["cancelled", "already_finished", "already_cancelled", "not_found"]
    phase: Phase | None = None
    num_blocks_freed: int = 0
    latency_ns: int = 0
