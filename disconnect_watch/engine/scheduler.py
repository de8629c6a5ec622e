"""Who computes how many tokens in the next step. Knows queues, counts and blocks; no tensors.

Order is arrival order, everywhere: the running requests in it, then the waiting ones in it, and
every running request arrived before every waiting one. From that follow

- *admission*: only the head of the queue is looked at, and it gets the blocks for all its known
  tokens at once, so that a prefill, once begun, never has to stop for lack of blocks;
- *preemption*: a decode that lacks a block takes those of the youngest running request, which
  goes back to the head of the queue and recomputes when there is room: the order is kept;
- *no starvation*: the oldest request is never preempted for another, is scheduled in each step,
  and fits into the pool when alone (the engine sees to that), so it ends; then the next one is
  the oldest.

The budget of a step is in tokens. Every decode behind a prefill has one token reserved, so that a
long prompt slows nobody's stream down to its own pace; the prefill gets the rest as its chunk.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from disconnect_watch.engine.block_pool import BlockPool
from disconnect_watch.engine.outcome import Phase
from disconnect_watch.engine.request import Request

__all__ = ["Schedule", "ScheduledRow", "Scheduler"]


@dataclass(frozen=True, slots=True)
class ScheduledRow:
    """One request's share of a step: its tokens in the half-open range [start, stop).

    Attributes:
        phase: prefill or decode, as it was when the step was scheduled.
        block_ids: where its keys and values lie, in the order of its tokens.
    """

    request: Request
    start: int
    stop: int
    phase: Phase
    block_ids: list[int]

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start

    @property
    def is_sampled(self) -> bool:
        """Whether the step reaches the last known token, and so yields the next one."""
        return self.stop == len(self.request.token_ids)


@dataclass(frozen=True, slots=True)
class Schedule:
    """The plan of one step.

    Attributes:
        rows: who takes part, in arrival order.
        preempted: who was sent back to the queue to make room, and the blocks that freed.
    """

    rows: list[ScheduledRow]
    preempted: list[tuple[Request, list[int]]]


class Scheduler:
    """The queues, and the plan of each step.

    Args:
        pool: where the blocks come from; it must be able to hold any one request alone.
        max_num_seqs: requests that run at the same time.
        max_num_batched_tokens: budget of one step, at least ``max_num_seqs``.
    """

    def __init__(self, pool: BlockPool, *, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self._pool = pool
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        # An ordered dict as a queue: any member can leave in constant time, which is what a
        # thousand clients that leave at once come down to.
        self._waiting: OrderedDict[str, Request] = OrderedDict()
        self._running: list[Request] = []

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def live_requests(self) -> Iterator[Request]:
        """Yield all that have not ended, in arrival order."""
        yield from self._running
        yield from self._waiting.values()

    def add(self, request: Request) -> None:
        """Put a new request at the end of the queue."""
        self._waiting[request.request_id] = request

    def remove(self, request: Request) -> list[int]:
        """Take a request out, wherever it is, and free its blocks; no forward may use them.

        Returns:
            The freed blocks.
        """
        if request.status == "running":
            self._running.remove(request)
        else:
            del self._waiting[request.request_id]
        return self._pool.free(request.request_id)

    def schedule(self) -> Schedule:
        """Plan the next step: grow or preempt what runs, then admit what waits.

        Every planned token has its slot in the cache.
        """
        plan = Schedule([], [])
        budget = self._plan_running(plan)
        self._plan_waiting(plan, budget)
        return plan

    def _plan_running(self, plan: Schedule) -> int:
        """Plan the running requests; returns what is left of the budget."""
        budget = self._max_num_batched_tokens
        num_decodes_behind = sum(r.num_uncomputed_tokens == 1 for r in self._running)
        # Preemption shortens the list at its end, while this walks up from its start.
        index = 0
        while index < len(self._running):
            request = self._running[index]
            index += 1
            if request.num_uncomputed_tokens == 1:
                num_decodes_behind -= 1
            if not self._make_room(request, plan):
                break
            budget -= self._plan_row(request, budget - num_decodes_behind, plan)
        return budget

    def _plan_waiting(self, plan: Schedule, budget: int) -> None:
        while self._waiting and budget > 0 and self.num_running < self._max_num_seqs:
            request = next(iter(self._waiting.values()))
            # Each running request may soon need one more block. Admitting into that reserve
            # would only get the newcomer preempted, and its prefill computed twice. It also
            # keeps out whom this very step preempted: what that freed has gone to another.
            num_needed = self._pool.num_blocks_for(len(request.token_ids)) + self.num_running
            if num_needed > self._pool.num_free:
                break
            self._pool.allocate(request.request_id, len(request.token_ids))
            del self._waiting[request.request_id]
            request.status = "running"
            self._running.append(request)
            budget -= self._plan_row(request, budget, plan)

    def _plan_row(self, request: Request, limit: int, plan: Schedule) -> int:
        """Plan as many of the request's tokens as the limit allows; returns how many."""
        num_tokens = min(request.num_uncomputed_tokens, limit)
        if num_tokens > 0:
            start = request.num_computed_tokens
            blocks = self._pool.block_ids(request.request_id)
            plan.rows.append(
                ScheduledRow(request, start, start + num_tokens, request.phase, blocks)
            )
        return num_tokens

    def _make_room(self, request: Request, plan: Schedule) -> bool:
        """Find a slot for each of the request's tokens, at the cost of the youngest if need be.

        Returns:
            False if the request is the youngest itself, and went back to the queue.
        """
        while not self._pool.allocate(request.request_id, len(request.token_ids)):
            victim = self._running.pop()
            victim.status = "waiting"
            victim.num_computed_tokens = 0
            self._waiting[victim.request_id] = victim
            self._waiting.move_to_end(victim.request_id, last=False)
            plan.preempted.append((victim, self._pool.free(victim.request_id)))
            if victim is request:
                return False
        return True
