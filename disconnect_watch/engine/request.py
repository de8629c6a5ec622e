"""One generation, from its prompt to its one outcome.

::

    waiting ──► running ──┐
       ▲──preempted─┘     ├──► dropped ──► ended
       └──────────────────┘

*Waiting*: in the queue, new or preempted. *Running*: it has blocks, and is scheduled in each
step. *Dropped*: out of queue and batch, its blocks given up; nothing is computed for it any more.
*Ended*: its outcome is known. There is no way back from the last two, and each is entered once.

One request may want several answers. It is then so many ``Request`` objects, siblings, with one id
and one outcome, which are cancelled together; each has its tokens, its state and its blocks.

A request is cancelled by its token, which others set and may share, or by a mark, a flag of its
own for aborts and deadlines; both may be set by any thread at any time. All else belongs to the
thread that steps the engine.
"""

import time
from typing import Literal

from disconnect_watch.engine.outcome import Outcome, Phase
from disconnect_watch.engine.params import SamplingParams
from disconnect_watch.engine.remote import KVLoad, RemotePrefill
from disconnect_watch.token import CancelToken, Reason

__all__ = ["Request", "Status"]

Status = Literal["waiting", "running", "dropped", "ended"]

#: From which states each may be entered.
COMES_FROM: dict[Status, tuple[Status, ...]] = {
    "waiting": ("running",),
    "running": ("waiting",),
    "dropped": ("waiting", "running"),
    "ended": ("dropped",),
}


class Request:
    """The state of one generation.

    Attributes:
        request_id: by which clients and their streams know it.
        index: which of the siblings it is, from 0.
        priority: the lowest number runs first.
        arrival: place in the order of arrival, given by the scheduler.
        deadline_ns: from when on nobody wants the answer, by the engine's clock; None for never.
        token_ids: prompt, then what was generated.
        block_hashes: digests of its full blocks, as far as they were needed; see ``prefix_cache``.
        num_computed_tokens: how many of the tokens have their keys and values in the cache.
        num_cached_tokens: how many of the prompt did when it was first admitted.
        seed: of the random numbers; survives preemption, so that a recomputed request goes on
            with the tokens it would have had.
        outcome: None until it and its siblings have ended.
        seen_at_ns, dropped_at_ns: set when the cancel was noticed, and when the request was
            dropped; 0 before.
        num_blocks_freed: of a dropped request: blocks that only it held.
        block_ns: for how long it held blocks that it has given up, summed over these.
        prefill_only: end with the first token, and leave the blocks of the prompt to a transfer.
        remote: what another engine has computed of it, until that is loaded or not needed.
        load: what fills its blocks just now; until it has ended nothing is scheduled.
    """

    __slots__ = (
        "_dropped_in",
        "_mark",
        "_siblings",
        "_status",
        "arrival",
        "block_hashes",
        "block_ns",
        "cancel",
        "deadline_ns",
        "dropped_at_ns",
        "index",
        "load",
        "num_blocks_freed",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_prompt_tokens",
        "outcome",
        "params",
        "prefill_only",
        "priority",
        "remote",
        "request_id",
        "seed",
        "seen_at_ns",
        "token_ids",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        *,
        params: SamplingParams,
        seed: int,
        cancel: CancelToken | None = None,
        priority: int = 0,
        deadline_ns: int | None = None,
        prefill_only: bool = False,
        remote: RemotePrefill | None = None,
    ) -> None:
        self.request_id = request_id
        self.index = 0
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(prompt_token_ids)
        self.params = params
        self.seed = seed
        self.cancel = cancel
        self.priority = priority
        self.arrival = 0
        self.deadline_ns = deadline_ns
        self.block_hashes: list[bytes] = []
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self.outcome: Outcome | None = None
        self.seen_at_ns = 0
        self.dropped_at_ns = 0
        self.num_blocks_freed = 0
        self.block_ns = 0
        self.prefill_only = prefill_only
        self.remote = remote
        self.load: KVLoad | None = None
        self._status: Status = "waiting"
        self._dropped_in: Phase | None = None
        self._mark = CancelToken()
        # A request without others does not refer to itself, so that it is freed at once.
        self._siblings: list[Request] | None = None

    def __repr__(self) -> str:
        return f"<Request {self.key!r} {self._status} {len(self.token_ids)} tokens>"

    def fan_out(self, num_requests: int) -> None:
        """Become the first of so many siblings, before anything else happens.

        Each has a seed of its own, and the first keeps the one it had.
        """
        siblings = [self]
        for index in range(1, num_requests):
            other = Request(
                self.request_id,
                self.token_ids,
                params=self.params,
                seed=self.seed + index,
                cancel=self.cancel,
                priority=self.priority,
                deadline_ns=self.deadline_ns,
            )
            other.index = index
            other._mark = self._mark
            siblings.append(other)
        if num_requests > 1:
            for request in siblings:
                request._siblings = siblings

    @property
    def siblings(self) -> "list[Request]":
        """All answers to the same request, this one included, by index."""
        return [self] if self._siblings is None else self._siblings

    @property
    def key(self) -> str:
        """What queue, pool and runner know it by: unlike the id, it is this sibling's alone."""
        return f"{self.request_id}#{self.index}" if self.index else self.request_id

    @property
    def status(self) -> Status:
        return self._status

    @property
    def is_live(self) -> bool:
        """Whether anything is still to be computed for it."""
        return self._status in ("waiting", "running")

    @property
    def num_generated_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """How many known tokens lack keys and values: 1 in decode, the rest of it in prefill."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def phase(self) -> Phase:
        """What the request is doing, or was when it was dropped.

        One that recomputes after a preemption is in prefill again.
        """
        if self._dropped_in is not None:
            return self._dropped_in
        if self._status == "waiting":
            return "waiting"
        if self.num_generated_tokens and self.num_uncomputed_tokens == 1:
            return "decode"
        return "prefill"

    @property
    def flags(self) -> tuple[CancelToken, ...]:
        """All that ends it when set; the same for all siblings."""
        return (self._mark,) if self.cancel is None else (self._mark, self.cancel)

    @property
    def is_cancelled(self) -> bool:
        """Whether its token fired or it was marked. Threads: any."""
        return self._mark.cancelled or (self.cancel is not None and self.cancel.cancelled)

    def mark_cancelled(self, reason: Reason) -> bool:
        """Ask for the end of this request alone; its token, which others may share, stays as it is.

        Returns:
            True if this was the first mark.

        Threads: any.
        """
        return self._mark.cancel(reason)

    def read_cancel(self) -> tuple[int, Reason]:
        """Return when and why, the earlier of token and mark; only for a cancelled request."""
        return min(
            # Between a flag and its timestamp the time reads as 0: it was set just now.
            (
                (flag.cancelled_at_ns or time.monotonic_ns(), reason)
                for flag in self.flags
                if (reason := flag.reason) is not None
            ),
            key=lambda cause: cause[0],
        )

    def acknowledge(self, step: int) -> None:
        """Tell the token, if it has fired, that nothing of this request is left; step from 1."""
        if self.cancel is not None and self.cancel.cancelled:
            self.cancel.ack(step)

    def run(self) -> None:
        """Leave the queue for the batch."""
        self._move("running")

    def preempt(self) -> None:
        """Go back to the queue, with nothing computed; what was being loaded is computed here."""
        self._move("waiting")
        self._end_load()
        self.num_computed_tokens = 0

    def drop(self, *, num_blocks_freed: int) -> None:
        """Leave queue or batch for good."""
        self._dropped_in = self.phase
        self._move("dropped")
        self._end_load()
        self.decline_remote()
        self.dropped_at_ns = time.monotonic_ns()
        self.num_blocks_freed = num_blocks_freed

    def begin_load(self, block_ids: tuple[int, ...], *, first_block: int) -> KVLoad:
        """Have the blocks of the prompt filled from elsewhere; there must be a ``remote``."""
        assert self.remote is not None
        assert self.remote.pull is not None
        self.load = KVLoad(self, self.remote.pull, block_ids, first_block)
        self.remote = None
        return self.load

    def decline_remote(self) -> None:
        """Let go of what another engine keeps for this request, if it does."""
        if self.remote is not None:
            self.remote.release()
            self.remote = None

    def end(self) -> None:
        """Make the one terminal move; the outcome is set when all siblings have made it."""
        self._move("ended")

    def _end_load(self) -> None:
        if self.load is not None:
            self.load.cancel.cancel(Reason.ABORTED)
            self.load = None

    def _move(self, status: Status) -> None:
        assert self._status in COMES_FROM[status], f"{self!r} can't become {status}"
        self._status = status
