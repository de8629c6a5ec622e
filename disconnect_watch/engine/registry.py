"""Which requests are alive, and the one place where any of them ends.

Everything that ends a request goes through ``drop`` and ``_end``, whatever the race: out of its
queue, blocks given up; outcome counted, remembered and told. Each happens once: the request's state
machine has no second way in.
"""

import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from disconnect_watch.engine.errors import DuplicateRequestError
from disconnect_watch.engine.outcome import AbortResult, Outcome, Phase, RequestOutput, Sampled
from disconnect_watch.engine.request import Request
from disconnect_watch.engine.scheduler import Scheduler
from disconnect_watch.engine.text_stream import TextStream
from disconnect_watch.engine.tokenizer import Tokenizer
from disconnect_watch.token import Reason

__all__ = ["Counts", "RequestRegistry"]

logger = logging.getLogger(__name__)

#: Ended requests whose outcome an abort still learns; older ones were never heard of.
MAX_ENDED_REMEMBERED = 4096


@dataclass(slots=True)
class Counts:
    """Totals since the start; ``EngineStats`` explains them."""

    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    num_wasted_tokens: int = 0
    num_stale_events: int = 0
    outcomes: Counter[tuple[str, Phase | None]] = field(default_factory=Counter)


class RequestRegistry:
    """Live requests by id, their text so far, and what is to be told of them.

    Attributes:
        on_outcome: called with id and outcome when a request has ended.
        freed_block_ids: of the requests that ended; whoever logs them clears the list.
    """

    def __init__(self, scheduler: Scheduler, tokenizer: Tokenizer) -> None:
        self.on_outcome: Callable[[str, Outcome], None] | None = None
        self.counts = Counts()
        self.freed_block_ids: list[int] = []
        self._scheduler = scheduler
        self._tokenizer = tokenizer
        self._live: dict[str, tuple[Request, TextStream]] = {}
        self._ended: OrderedDict[str, Outcome] = OrderedDict()
        self._outputs: list[RequestOutput] = []

    @property
    def has_work(self) -> bool:
        """Whether a request is alive, or something is yet to be told."""
        return bool(self._live or self._outputs)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._live

    def __iter__(self) -> Iterator[Request]:
        """Iterate over a copy, so that requests may end meanwhile."""
        return iter([request for request, _ in self._live.values()])

    def find(self, request_id: str) -> Request | None:
        """Return the live request of that id. Threads: any."""
        entry = self._live.get(request_id)
        return None if entry is None else entry[0]

    def add(self, request: Request) -> None:
        """Take a request and queue it.

        Raises:
            DuplicateRequestError: its id is in use.
        """
        if request.request_id in self._live:
            raise DuplicateRequestError(request.request_id)
        text = TextStream(self._tokenizer, stop=request.params.stop)
        self._live[request.request_id] = (request, text)
        self._scheduler.add(request)
        self.counts.num_requests += 1
        self.counts.num_prompt_tokens += request.num_prompt_tokens

    def emit(
        self,
        request: Request,
        sampled: Sampled,
        *,
        finish_reason: Literal["stop", "length"] | None = None,
        stop_token_id: int | None = None,
    ) -> bool:
        """Append a token and tell it; end the request if it is the last.

        Args:
            finish_reason: why there will be no other; None lets the stop strings decide.
            stop_token_id: the token, if it is one at which the request wanted to stop.

        Returns:
            Whether the request has ended.
        """
        text_stream = self._live[request.request_id][1]
        request.token_ids.append(sampled.token_id)
        self.counts.num_generated_tokens += 1
        text = "" if stop_token_id is not None else text_stream.feed(sampled.token_id)
        if finish_reason is not None:
            text += text_stream.flush()
        if text_stream.stopped_by is not None:
            finish_reason = "stop"
        if finish_reason is None:
            self._tell(request, text, sampled)
            return False
        self.drop(request)
        outcome = Outcome(
            "finished",
            finish_reason=finish_reason,
            stop_reason=text_stream.stopped_by or stop_token_id,
            num_prompt_tokens=request.num_prompt_tokens,
            num_generated_tokens=request.num_generated_tokens,
            num_cached_tokens=request.num_cached_tokens,
            num_blocks_freed=request.num_blocks_freed,
        )
        self._end(request, outcome, text=text, sampled=sampled)
        return True

    def cancel(self, request: Request, *, seen_at_ns: int, num_wasted_tokens: int = 0) -> None:
        """End a request whose flag was seen. Text that was held back is not told any more."""
        flag_at_ns, reason = request.read_cancel()
        self.drop(request)
        outcome = Outcome(
            "cancelled",
            reason=reason,
            phase=request.phase,
            num_prompt_tokens=request.num_prompt_tokens,
            num_generated_tokens=request.num_generated_tokens,
            num_wasted_tokens=num_wasted_tokens,
            flag_at_ns=flag_at_ns,
            seen_at_ns=request.seen_at_ns or seen_at_ns,
            dropped_at_ns=request.dropped_at_ns,
            freed_at_ns=time.monotonic_ns(),
            num_cached_tokens=request.num_cached_tokens,
            num_blocks_freed=request.num_blocks_freed,
        )
        self.counts.num_wasted_tokens += num_wasted_tokens
        self._end(request, outcome)

    def fail(self, request: Request, error: BaseException) -> None:
        """End a request that the engine could not compute; what it has computed is not kept."""
        self.drop(request, forget=True)
        outcome = Outcome(
            "failed",
            phase=request.phase,
            num_prompt_tokens=request.num_prompt_tokens,
            num_generated_tokens=request.num_generated_tokens,
            num_cached_tokens=request.num_cached_tokens,
            num_blocks_freed=request.num_blocks_freed,
            error=f"{type(error).__name__}: {error}",
        )
        self._end(request, outcome)

    def drop(self, request: Request, *, forget: bool = False) -> None:
        """Take a request out of queue and batch; once that has been done, nothing more happens.

        Args:
            forget: keep none of its blocks as prefix.
        """
        if request.is_live:
            self.freed_block_ids += self._scheduler.drop(request, forget=forget)
            self.counts.num_cached_tokens += request.num_cached_tokens

    def take_outputs(self) -> list[RequestOutput]:
        """Return what is to be told and was not yet."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def ended_as(self, request_id: str) -> Outcome | None:
        """Return how the last request of that id ended, as long as it is remembered."""
        return self._ended.get(request_id)

    def abort_result(self, outcome: Outcome | None, *, is_first: bool) -> AbortResult:
        """Tell what an abort came to, given how the request ended (None: never heard of).

        Counts the aborts that came too late.
        """
        if outcome is None:
            return AbortResult("not_found")
        if is_first and outcome.kind == "cancelled" and outcome.reason is Reason.ABORTED:
            return AbortResult(
                "cancelled",
                phase=outcome.phase,
                num_blocks_freed=outcome.num_blocks_freed,
                latency_ns=outcome.freed_at_ns - outcome.flag_at_ns,
            )
        self.counts.num_stale_events += 1
        is_cancelled = outcome.kind == "cancelled"
        return AbortResult("already_cancelled" if is_cancelled else "already_finished")

    def _end(
        self,
        request: Request,
        outcome: Outcome,
        *,
        text: str = "",
        sampled: Sampled | None = None,
    ) -> None:
        request.end(outcome)
        del self._live[request.request_id]
        self._ended[request.request_id] = outcome
        self._ended.move_to_end(request.request_id)
        if len(self._ended) > MAX_ENDED_REMEMBERED:
            self._ended.popitem(last=False)
        self.counts.outcomes[outcome.kind, outcome.phase] += 1
        self._tell(request, text, sampled)
        if self.on_outcome is not None:
            try:
                self.on_outcome(request.request_id, outcome)
            except Exception:
                # It only counts; other requests must not pay for its mistakes.
                logger.exception("on_outcome raised for request %s", request.request_id)

    def _tell(self, request: Request, text: str, sampled: Sampled | None) -> None:
        logprobs = None if sampled is None else sampled.logprobs
        self._outputs.append(
            RequestOutput(
                request_id=request.request_id,
                text_delta=text,
                token_ids=() if sampled is None else (sampled.token_id,),
                outcome=request.outcome,
                num_prompt_tokens=request.num_prompt_tokens,
                num_generated_tokens=request.num_generated_tokens,
                logprobs=() if logprobs is None else (logprobs,),
            )
        )
