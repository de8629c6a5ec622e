"""Who computes how many tokens in the next step. Knows queues, counts and blocks; no tensors.

Order is arrival order, everywhere: the running requests in it, then the waiting ones in it, and
every running request arrived before every waiting one. From that follow

- *admission*: only the head of the queue is looked at, and it gets the blocks for all its known
  tokens at once, so that a prefill, once begun, never has to stop for lack of blocks; those that
  the prefix cache still has it shares, and their tokens need not be computed;
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
from disconnect_watch.engine.prefix_cache import extend_hashes
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
        enable_prefix_caching: share the blocks of equal beginnings, also with requests that have
            ended.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        enable_prefix_caching: bool = True,
    ) -> None:
        self._pool = pool
        self._enable_prefix_caching = enable_prefix_caching
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

    def drop(self, request: Request, *, forget: bool = False) -> list[int]:
        """Take a live request out, wherever it is, and give up its blocks.

        Args:
            forget: what it computed is not to be trusted, so none of it is kept as prefix.

        Returns:
            The blocks that nobody holds now.
        """
        if request.status == "running":
            self._running.remove(request)
        else:
            del self._waiting[request.request_id]
        blocks = self._pool.free(request.request_id, forget=forget)
        request.drop(num_blocks_freed=len(blocks))
        return blocks

    def advance(self, row: ScheduledRow) -> None:
        """Note that a row was computed; its full blocks can be found from now on."""
        request = row.request
        request.num_computed_tokens = row.stop
        if self._enable_prefix_caching:
            num_full = row.stop // self._pool.block_size
            self._hash(request)
            self._pool.publish(request.request_id, request.block_hashes[:num_full])

    def schedule(self) -> Schedule:
        """Plan the next step: grow or preempt what runs, then admit what waits.

        Every planned token has its slot in the cache.
        """
        plan = Schedule([], [])
        budget = self._plan_running(plan)
        if not plan.preempted:
            # There was too little room a moment ago; who was sent away has to wait a step.
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
                continue
            budget -= self._plan_row(request, budget - num_decodes_behind, plan)
        return budget

    def _plan_waiting(self, plan: Schedule, budget: int) -> None:
        while self._waiting and budget > 0 and self.num_running < self._max_num_seqs:
            request = next(iter(self._waiting.values()))
            prefix = self._find_prefix(request)
            # Each running request may soon need one more block. Admitting into that reserve
            # would only get the newcomer preempted, and its prefill computed twice.
            reserve = self.num_running
            num_tokens = len(request.token_ids)
            if not self._pool.has_room(
                request.request_id, num_tokens, prefix=prefix, reserve=reserve
            ):
                break
            self._admit(request, prefix)
            budget -= self._plan_row(request, budget, plan)

    def _admit(self, request: Request, prefix: list[int]) -> None:
        self._pool.allocate(request.request_id, len(request.token_ids), prefix=prefix)
        del self._waiting[request.request_id]
        request.run()
        request.num_computed_tokens = len(prefix) * self._pool.block_size
        if not request.num_generated_tokens:
            request.num_cached_tokens = request.num_computed_tokens
        self._running.append(request)

    def _find_prefix(self, request: Request) -> list[int]:
        """Return the blocks to share; never all of it, since a last token must be computed."""
        if not self._enable_prefix_caching:
            return []
        self._hash(request)
        num_blocks = (len(request.token_ids) - 1) // self._pool.block_size
        return self._pool.lookup(request.block_hashes[:num_blocks])

    def _hash(self, request: Request) -> None:
        extend_hashes(request.block_hashes, request.token_ids, block_size=self._pool.block_size)

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
            False if the request takes no part in this step: it waits for blocks that come back
            with the next ack, or it was the youngest itself and went back to the queue.
        """
        while not self._pool.allocate(request.request_id, len(request.token_ids)):
            if self._pool.num_retained:
                # To preempt now would give up work for blocks that are as little free as these.
                return False
            victim = self._running.pop()
            victim.preempt()
            self._waiting[victim.request_id] = victim
            self._waiting.move_to_end(victim.request_id, last=False)
            plan.preempted.append((victim, self._pool.free(victim.request_id)))
            if victim is request:
                return False
        return True
