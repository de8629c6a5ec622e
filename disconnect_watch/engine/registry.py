"""Which requests are alive, and the one place where any of them ends.

Everything that ends a request goes through ``drop``, ``_retire`` and ``_conclude``, whatever the
race: out of its queue, blocks given up; then dead; then outcome counted, remembered and told. The
first two happen once for each sibling, since the request's state machine has no second way in, and
the last once for all of them, when none is left: those that a cancel or an error finds alive end
with the one that it was found at.
"""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Literal

from disconnect_watch.engine.cancel_scan import CancelScan
from disconnect_watch.engine.errors import DuplicateRequestError
from disconnect_watch.engine.outbox import Outbox
from disconnect_watch.engine.outcome import AbortResult, Outcome, Phase, RequestOutput, Sampled
from disconnect_watch.engine.records import Counts
from disconnect_watch.engine.request import Request
from disconnect_watch.engine.scheduler import Scheduler
from disconnect_watch.engine.tokenizer import Tokenizer
from disconnect_watch.token import Reason

__all__ = ["RequestRegistry"]

logger = logging.getLogger(__name__)

#: Ended requests whose outcome an abort still learns; older ones were never heard of.
MAX_ENDED_REMEMBERED = 4096

#: In the order of a request's life.
PHASES: tuple[Phase, ...] = ("waiting", "prefill", "decode")


class RequestRegistry:
    """Live requests by id, and how those that are not alive any more have ended.

    Attributes:
        on_outcome: called with id and outcome when a request has ended.
        freed_block_ids: of the requests that ended; whoever logs them clears the list.
    """

    def __init__(self, scheduler: Scheduler, tokenizer: Tokenizer, *, scan: CancelScan) -> None:
        self.on_outcome: Callable[[str, Outcome], None] | None = None
        self.counts = Counts()
        self.freed_block_ids: list[int] = []
        self._scheduler = scheduler
        self._scan = scan
        self._outbox = Outbox(tokenizer)
        # By key, which each sibling has of its own, and by id, which finds the first of them.
        self._live: dict[str, Request] = {}
        self._first: dict[str, Request] = {}
        self._ended: OrderedDict[str, Outcome] = OrderedDict()

    @property
    def has_work(self) -> bool:
        """Whether a request is alive, or something is yet to be told."""
        return bool(self._live or self._outbox)

    def __contains__(self, key: str) -> bool:
        return key in self._live

    def __iter__(self) -> Iterator[Request]:
        """Iterate over a copy, so that requests may end meanwhile."""
        return iter(list(self._live.values()))

    def find(self, request_id: str) -> Request | None:
        """Return the live request of that id. Threads: any."""
        return self._first.get(request_id)

    def add(self, *requests: Request) -> None:
        """Take requests and queue them, all with all their siblings, or none.

        Raises:
            DuplicateRequestError: an id is in use, or that of two of them.
        """
        request_ids: set[str] = set()
        for request in requests:
            # Not the live ones alone: a key that has ended still has its text, until all have.
            is_open = any(self._outbox.is_open(sibling.key) for sibling in request.siblings)
            if is_open or request.request_id in request_ids:
                raise DuplicateRequestError(request.request_id)
            request_ids.add(request.request_id)
        for request in requests:
            self._add(request)

    def _add(self, request: Request) -> None:
        self._first[request.request_id] = request
        self._outbox.open(request)
        for sibling in request.siblings:
            self._live[sibling.key] = sibling
            self._scheduler.add(sibling)
        self._scan.add(request)
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
        request.token_ids.append(sampled.token_id)
        self.counts.num_generated_tokens += 1
        has_ended = self._outbox.tell(
            request, sampled, finish_reason=finish_reason, stop_token_id=stop_token_id
        )
        if not has_ended:
            return False
        self.drop(request)
        self._retire(request)
        if all(sibling.status == "ended" for sibling in request.siblings):
            self._conclude(request, Outcome("finished"))
        return True

    def hand_over(self, request: Request, transfer: object | None) -> None:
        """End a request whose first token was just told: the others are another engine's."""
        self.drop(request)
        self._retire(request)
        self._conclude(request, Outcome("finished", transfer=transfer))

    def cancel(self, request: Request, *, seen_at_ns: int, num_wasted_tokens: int = 0) -> None:
        """End a request whose flag was seen, and its siblings."""
        flag_at_ns, reason = request.read_cancel()
        for sibling in request.siblings:
            self.drop(sibling)
            self._retire(sibling)
        outcome = Outcome(
            "cancelled",
            reason=reason,
            phase=_furthest_phase(request),
            num_wasted_tokens=num_wasted_tokens,
            flag_at_ns=flag_at_ns,
            seen_at_ns=min(
                (s.seen_at_ns for s in request.siblings if s.seen_at_ns), default=seen_at_ns
            ),
            dropped_at_ns=max(sibling.dropped_at_ns for sibling in request.siblings),
            freed_at_ns=time.monotonic_ns(),
        )
        self.counts.num_wasted_tokens += num_wasted_tokens
        self._conclude(request, outcome)

    def fail(self, request: Request, error: BaseException) -> None:
        """End a request that the engine could not compute, and its siblings.

        What it has computed is not kept.
        """
        for sibling in request.siblings:
            self.drop(sibling, forget=True)
            self._retire(sibling)
        outcome = Outcome(
            "failed", phase=_furthest_phase(request), error=f"{type(error).__name__}: {error}"
        )
        self._conclude(request, outcome)

    def drop(self, request: Request, *, forget: bool = False) -> None:
        """Take a request out of queue and batch; once that has been done, nothing more happens.

        Args:
            forget: keep none of its blocks as prefix.
        """
        if request.is_live:
            self.freed_block_ids += self._scheduler.drop(request, forget=forget)
            if request.index == 0:
                self.counts.num_cached_tokens += request.num_cached_tokens

    def ignore(self, drawn: Iterable[Sampled | Exception | None]) -> None:
        """Count what came of a request that had ended already; nothing else is done with it."""
        for result in drawn:
            if result is not None:
                self.counts.stale_events["token" if isinstance(result, Sampled) else "error"] += 1

    def take_outputs(self) -> list[RequestOutput]:
        """Return what is to be told and was not yet."""
        return self._outbox.take()

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
        self.counts.stale_events["abort"] += 1
        is_cancelled = outcome.kind == "cancelled"
        return AbortResult("already_cancelled" if is_cancelled else "already_finished")

    def _retire(self, request: Request) -> None:
        """Let a dropped request be dead; one that is dead already stays so."""
        if request.status != "ended":
            request.end()
            del self._live[request.key]

    def _conclude(self, request: Request, outcome: Outcome) -> None:
        """Fill in what all siblings have come to, and tell it."""
        siblings = request.siblings
        outcome = replace(
            outcome,
            num_prompt_tokens=request.num_prompt_tokens,
            num_cached_tokens=siblings[0].num_cached_tokens,
            num_generated_tokens=sum(sibling.num_generated_tokens for sibling in siblings),
            num_blocks_freed=sum(sibling.num_blocks_freed for sibling in siblings),
            block_ns=sum(sibling.block_ns for sibling in siblings),
        )
        outcome = self._outbox.close(request, outcome)
        for sibling in siblings:
            sibling.outcome = outcome
        self._scan.remove(request)
        request_id = request.request_id
        del self._first[request_id]
        self._ended[request_id] = outcome
        self._ended.move_to_end(request_id)
        if len(self._ended) > MAX_ENDED_REMEMBERED:
            self._ended.popitem(last=False)
        self.counts.outcomes[outcome.kind, outcome.phase] += 1
        if self.on_outcome is not None:
            try:
                self.on_outcome(request_id, outcome)
            except Exception:
                # It only counts; other requests must not pay for its mistakes.
                logger.exception("on_outcome raised for request %s", request_id)


def _furthest_phase(request: Request) -> Phase:
    return max((sibling.phase for sibling in request.siblings), key=PHASES.index)
