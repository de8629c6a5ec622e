"""The scheduler under random arrivals, leaves and ends, with a step that computes nothing.

The model is the list of requests in their order, and what each has computed.
"""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from disconnect_watch.engine.block_pool import BlockPool
from disconnect_watch.engine.params import SamplingParams
from disconnect_watch.engine.request import Request
from disconnect_watch.engine.schedule import ScheduledRow
from disconnect_watch.engine.scheduler import Scheduler

BLOCK_SIZE = 4
MAX_MODEL_LEN = 24


pytestmark = pytest.mark.slow


class SchedulerMachine(RuleBasedStateMachine):
    """The order holds, the budget holds, the first of all advances, who left is gone."""

    @initialize(
        num_blocks=st.integers(MAX_MODEL_LEN // BLOCK_SIZE, 16),
        max_num_seqs=st.integers(1, 5),
        extra=st.integers(0, 12),
    )
    def make(self, num_blocks: int, max_num_seqs: int, extra: int) -> None:
        self.pool = BlockPool(num_blocks, block_size=BLOCK_SIZE)
        self.max_num_seqs = max_num_seqs
        self.budget = max_num_seqs + extra
        self.scheduler = Scheduler(
            self.pool, max_num_seqs=max_num_seqs, max_num_batched_tokens=self.budget
        )
        self.live: list[Request] = []
        self.gone: set[str] = set()
        self.num_names = 0

    @rule(
        num_tokens=st.integers(1, MAX_MODEL_LEN - 1),
        max_tokens=st.integers(1, MAX_MODEL_LEN),
        priority=st.integers(0, 2),
    )
    def arrive(self, num_tokens: int, max_tokens: int, priority: int) -> None:
        request = Request(
            f"r{self.num_names}",
            [self.num_names % 2] * num_tokens,
            params=SamplingParams(max_tokens=max_tokens),
            seed=0,
            priority=priority,
        )
        self.num_names += 1
        self.scheduler.add(request)
        self.live.append(request)
        self.live.sort(key=lambda request: (request.priority, request.arrival))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        self.remove(data.draw(st.sampled_from(self.live)))

    @rule()
    def step(self) -> None:
        first = self.live[0] if self.live else None
        before = {r.request_id: r.num_computed_tokens for r in self.live}
        plan = self.scheduler.schedule()
        rows = {row.request.request_id: row for row in plan.rows}
        assert len(rows) == len(plan.rows)
        assert not self.gone & set(rows)
        assert sum(row.num_tokens for row in plan.rows) <= self.budget
        preempted = {request.request_id for request, _ in plan.preempted}
        assert not preempted & set(rows)
        if first is not None:
            assert first.request_id in rows
        # Nobody is sent away but for one who is before him.
        for request, _ in plan.preempted:
            assert any(
                (row.request.priority, row.request.arrival) < (request.priority, request.arrival)
                for row in plan.rows
            )
        for name, row in rows.items():
            assert row.start == row.request.num_computed_tokens
            assert row.stop <= len(row.request.token_ids)
            # Every planned token has a slot of its own.
            assert len(row.block_ids) * BLOCK_SIZE >= row.stop
            # Either it goes on where it was, or it was admitted, behind a prefix that is known.
            assert row.start == before[name] or (not before[name] and row.start % BLOCK_SIZE == 0)
        for row in plan.rows:
            self.compute(row)

    def compute(self, row: ScheduledRow) -> None:
        request, is_sampled = row.request, row.is_sampled
        self.scheduler.advance(request, row.stop)
        if not is_sampled:
            return
        request.token_ids.append(0)
        if (
            request.num_generated_tokens >= request.params.max_tokens
            or len(request.token_ids) >= MAX_MODEL_LEN
        ):
            self.remove(request)

    def remove(self, request: Request) -> None:
        blocks = list(self.pool.block_ids(request.request_id))
        held = {
            block
            for other in self.live
            if other is not request
            for block in self.pool.block_ids(other.request_id)
        }
        assert self.scheduler.drop(request) == [block for block in blocks if block not in held]
        assert self.pool.block_ids(request.request_id) == []
        request.end()
        self.live.remove(request)
        self.gone.add(request.request_id)

    @invariant()
    def order_is_by_priority_and_arrival(self) -> None:
        running = [request for request in self.live if request.status == "running"]
        waiting = [request for request in self.live if request.status == "waiting"]
        assert list(self.scheduler.live_requests()) == running + waiting
        assert self.scheduler.num_running == len(running) <= self.max_num_seqs
        assert self.scheduler.num_waiting == len(waiting)
        assert len(running) + len(waiting) == len(self.live)
        # Each has one flag, its own mark.
        assert len(self.scheduler.running_flags) == len(running)
        for request in waiting:
            behind = [r for r in running if r.priority == request.priority]
            assert all(r.arrival < request.arrival for r in behind)

    @invariant()
    def blocks_belong_to_the_running(self) -> None:
        self.pool.check_integrity()
        owners = {name for entry in self.pool.ledger().values() for name in entry.owners}
        assert owners == {r.request_id for r in self.live if r.status == "running"}
        assert self.pool.num_available + self.pool.num_used == self.pool.num_blocks

    def teardown(self) -> None:
        """Nobody starves: with no more arrivals, everyone ends within bounded steps."""
        if not hasattr(self, "live"):
            return
        # At worst one after the other, each computing one token a step, once more for each
        # time that it was preempted; the oldest never is.
        for _ in range(len(self.live) * MAX_MODEL_LEN + 1):
            if not self.live:
                break
            self.step()
        assert not self.live
        assert self.pool.num_available == self.pool.num_blocks


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
