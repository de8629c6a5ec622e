"""Who computes how many tokens in the next step. Knows queues, counts and blocks; no tensors.

The order is by priority, and by arrival within one. The running requests are kept in it, the
waiting ones are kept in it, and within one priority every running request is before every waiting
one. From that follow

- *admission*: only the head of the queue is looked at, and it gets the blocks for all its known
  tokens at once, so that a prefill, once begun, never has to stop for lack of blocks; those that
  the prefix cache still has it shares, and their tokens need not be computed;
- *preemption*: a decode that lacks a block takes those of the last running request, which
  goes back to the queue and recomputes when there is room: the order is kept. One that waits takes
  them, or the place, of those with a lesser priority only, and only if that is enough for it;
- *no starvation* within a priority: the first of all is never preempted for another, is scheduled
  in each step, and fits into the pool when alone (the engine sees to that), so it ends; then the
  next one is the first. A lesser priority waits for as long as the greater ones need.

A device that needs no host between steps is given several at once where all rows decode: each
gets blocks beforehand for the tokens that it may draw, if there are any to be had.

The budget of a step is in tokens. Every decode behind a prefill has one token reserved, so that a
long prompt slows nobody's stream down to its own pace; the prefill gets the rest as its chunk.

Who is admitted with a prompt that another engine has computed gets its blocks like all others, and
computes nothing until a *load* has filled them. The load holds them, too: if the request leaves
meanwhile, they stay out of the pool until the load has stopped.
"""

import sys
from bisect import insort
from collections.abc import Iterator
from dataclasses import replace

from disconnect_watch.engine.block_pool import BlockPool
from disconnect_watch.engine.prefix_cache import extend_hashes
from disconnect_watch.engine.remote import KVLoad
from disconnect_watch.engine.request import Request
from disconnect_watch.engine.schedule import Schedule, ScheduledRow
from disconnect_watch.engine.waiting import WaitingQueue
from disconnect_watch.token import FlagSet

__all__ = ["Scheduler"]


class Scheduler:
    """The queues, and the plan of each step.

    Args:
        pool: where the blocks come from; it must be able to hold any one request alone.
        max_num_seqs: requests that run at the same time.
        max_num_batched_tokens: budget of one step, at least ``max_num_seqs``.
        enable_prefix_caching: share the blocks of equal beginnings, also with requests that have
            ended.
        device_steps: tokens that a step in which all decode may give each of them.
        max_model_len: tokens that prompt and answer may have together.

    Attributes:
        running_flags: the cancel flags of the requests that run, and of no others.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        enable_prefix_caching: bool = True,
        device_steps: int = 1,
        max_model_len: int = sys.maxsize,
    ) -> None:
        self.running_flags = FlagSet()
        self._device_steps = device_steps
        self._max_model_len = max_model_len
        self._pool = pool
        self._enable_prefix_caching = enable_prefix_caching
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._waiting = WaitingQueue()
        self._running: list[Request] = []
        self._num_arrived = 0
        # Loads that were told to stop and have not yet: they keep blocks that come back soon.
        self._num_stopping_loads = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def live_requests(self) -> Iterator[Request]:
        """Yield all that have not ended: those that run, then those that wait."""
        yield from self._running
        yield from self._waiting

    def add(self, request: Request) -> None:
        """Put a new request into the queue."""
        self._num_arrived += 1
        request.arrival = self._num_arrived
        self._waiting.add(request)

    def drop(self, request: Request, *, forget: bool = False) -> list[int]:
        """Take a live request out, wherever it is, and give up its blocks.

        Args:
            forget: what it computed is not to be trusted, so none of it is kept as prefix.

        Returns:
            The blocks that nobody holds now.
        """
        if request.status == "running":
            self._running.remove(request)
            self._forget_flags(request)
        else:
            self._waiting.remove(request)
        blocks = self._give_up(request, forget=forget)
        self._num_stopping_loads += request.load is not None
        request.drop(num_blocks_freed=len(blocks))
        return blocks

    def end_load(self, load: KVLoad, *, is_filled: bool) -> None:
        """Take back the blocks of a load that touches them no more.

        Args:
            is_filled: whether they have what they should; if not, the request, should it still be
                there, computes its prompt itself.
        """
        self._pool.unhold(load.block_ids)
        request = load.request
        if request.load is not load:
            self._num_stopping_loads -= 1
            return  # it left or lost its place, and its blocks went on just now
        request.load = None
        if is_filled:
            self.advance(request, request.num_prompt_tokens)

    def advance(self, request: Request, num_tokens: int) -> None:
        """Note that so many tokens are computed now; their full blocks can be found from now on."""
        size = self._pool.block_size
        num_full = num_tokens // size
        has_more = num_full > request.num_computed_tokens // size
        request.num_computed_tokens = num_tokens
        if self._enable_prefix_caching and has_more:
            self._hash(request)
            self._pool.publish(request.key, request.block_hashes[:num_full])

    def schedule(self) -> Schedule:
        """Plan the next step: make way for the urgent, grow what runs, then admit what waits.

        Every planned token has its slot in the cache.
        """
        plan = Schedule([], [])
        self._make_way(plan)
        budget = self._plan_running(plan)
        if not plan.preempted:
            # There was too little room a moment ago; who was sent away has to wait a step.
            self._plan_waiting(plan, budget)
        if self._device_steps > 1 and all(map(_can_loop, plan.rows)):
            plan.rows[:] = map(self._look_ahead, plan.rows)
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
        while self._waiting and budget > 0:
            request = self._waiting.head
            prefix = self._find_prefix(request)
            if self._is_early(request) or not self._fits(request, prefix):
                break
            self._admit(request, prefix, plan)
            budget -= self._plan_row(request, budget, plan)

    def _make_way(self, plan: Schedule) -> None:
        """Let those who wait with a greater priority take the place of those who run with less."""
        while self._waiting and self._running:
            request = self._waiting.head
            if request.priority >= self._running[-1].priority or self._is_early(request):
                break
            prefix = self._find_prefix(request)
            if not self._can_fit_without_lesser(request, prefix):
                break
            while not self._fits(request, prefix):
                if self._pool.num_unacked or self._num_stopping_loads:
                    return
                self._preempt_last(plan)
                prefix = self._find_prefix(request)
            self._admit(request, prefix, plan)

    def _can_fit_without_lesser(self, request: Request, prefix: list[int]) -> bool:
        """Whether there is room once all of lesser priority are gone; if not, none is sent away."""
        lesser = [r.key for r in self._running if r.priority > request.priority]
        num_freed = self._pool.num_freed_by(lesser, keep=prefix)
        reserve = self.num_running - len(lesser)
        return self._pool.has_room(
            request.key,
            len(request.token_ids),
            prefix=prefix,
            reserve=reserve - num_freed,
        )

    def _is_early(self, request: Request) -> bool:
        """Whether a sibling computes the prompt just now, all blocks of which can soon be shared.

        So a prompt is read once for all its answers, and not by all of them at the same time.
        """
        first = request.siblings[0]
        return (
            self._enable_prefix_caching
            and first is not request
            and first.is_live
            and not first.num_generated_tokens
        )

    def _fits(self, request: Request, prefix: list[int]) -> bool:
        # Each running request may soon need one more block. Admitting into that reserve
        # would only get the newcomer preempted, and its prefill computed twice.
        reserve = self.num_running
        return self.num_running < self._max_num_seqs and self._pool.has_room(
            request.key, len(request.token_ids), prefix=prefix, reserve=reserve
        )

    def _admit(self, request: Request, prefix: list[int], plan: Schedule) -> None:
        self._pool.allocate(request.key, len(request.token_ids), prefix=prefix)
        self._waiting.remove(request)
        request.run()
        for flag in request.flags:
            self.running_flags.add(flag)
        request.num_computed_tokens = len(prefix) * self._pool.block_size
        if not request.num_generated_tokens:
            request.num_cached_tokens = request.num_computed_tokens
        self._plan_load(request, len(prefix), plan)
        insort(self._running, request, key=_place)

    def _plan_load(self, request: Request, num_shared: int, plan: Schedule) -> None:
        """Plan to fetch what another engine has computed, unless all of it is here already."""
        remote = request.remote
        if remote is None:
            return
        if remote.pull is None or request.num_computed_tokens >= request.num_prompt_tokens:
            request.decline_remote()
            return
        blocks = self._pool.hold(request.key, request.num_prompt_tokens)
        plan.loads.append(request.begin_load(blocks, first_block=num_shared))

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
        if request.load is not None:
            return 0
        num_tokens = min(request.num_uncomputed_tokens, limit)
        if num_tokens > 0:
            start = request.num_computed_tokens
            blocks = self._pool.block_ids(request.key)
            plan.rows.append(
                ScheduledRow(request, start, start + num_tokens, request.phase, blocks)
            )
        return num_tokens

    def _look_ahead(self, row: ScheduledRow) -> ScheduledRow:
        """Let a row draw as many tokens as it has blocks for; nobody is sent away for that."""
        request, num_known = row.request, len(row.request.token_ids)
        most = min(request.num_prompt_tokens + request.params.max_tokens, self._max_model_len)
        num_draws = min(self._device_steps, most - num_known)
        # The last token that is drawn needs no slot before it is computed.
        if not self._pool.allocate(request.key, num_known + num_draws - 1):
            num_slots = len(row.block_ids) * self._pool.block_size
            num_draws = min(num_draws, num_slots - num_known + 1)
        return replace(row, num_draws=num_draws)

    def _make_room(self, request: Request, plan: Schedule) -> bool:
        """Find a slot for each of the request's tokens, at the cost of the last one if need be.

        Returns:
            False if the request takes no part in this step: it waits for blocks that come back
            with the next ack or load, or it was the last itself and went back to the queue.
        """
        while not self._pool.allocate(request.key, len(request.token_ids)):
            if self._pool.num_unacked or self._num_stopping_loads:
                # To preempt now would give up work for blocks that are as little free as these.
                return False
            if self._preempt_last(plan) is request:
                return False
        return True

    def _preempt_last(self, plan: Schedule) -> Request:
        victim = self._running.pop()
        self._forget_flags(victim)
        self._num_stopping_loads += victim.load is not None
        victim.preempt()
        self._waiting.put_back(victim)
        plan.preempted.append((victim, self._give_up(victim)))
        return victim

    def _forget_flags(self, request: Request) -> None:
        for flag in request.flags:
            self.running_flags.remove(flag)

    def _give_up(self, request: Request, *, forget: bool = False) -> list[int]:
        request.block_ns += self._pool.block_ns(request.key)
        return self._pool.free(request.key, forget=forget)


def _can_loop(row: ScheduledRow) -> bool:
    """Whether the step may go on with the row's next token."""
    return row.num_tokens == 1 and row.is_sampled and not row.request.prefill_only


def _place(request: Request) -> tuple[int, int]:
    return request.priority, request.arrival
