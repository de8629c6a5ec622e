"""Who is scheduled, for how many tokens, and at whose cost. No tensors here."""

import itertools
from collections.abc import Iterable

from disconnect_watch.engine.block_pool import BlockPool
from disconnect_watch.engine.params import SamplingParams
from disconnect_watch.engine.request import Request
from disconnect_watch.engine.schedule import Schedule
from disconnect_watch.engine.scheduler import Scheduler
from disconnect_watch.token import Reason

_ids = (f"r{number}" for number in itertools.count())


def make_request(num_tokens: int) -> Request:
    return Request(next(_ids), [1] * num_tokens, params=SamplingParams(), seed=0)


def make_scheduler(
    *requests: Request, num_blocks: int = 64, max_num_seqs: int = 8, budget: int = 32
) -> tuple[Scheduler, BlockPool]:
    pool = BlockPool(num_blocks, block_size=4)
    scheduler = Scheduler(pool, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget)
    for request in requests:
        scheduler.add(request)
    return scheduler, pool


def planned(plan: Schedule) -> list[tuple[str, int]]:
    return [(row.request.request_id, row.num_tokens) for row in plan.rows]


def compute(plan: Schedule) -> None:
    """Do to the requests what a step does: advance them, and add a token where one is sampled."""
    for row in plan.rows:
        is_sampled = row.is_sampled
        row.request.num_computed_tokens = row.stop
        if is_sampled:
            row.request.token_ids.append(1)


def ids(requests: Iterable[Request]) -> list[str]:
    return [request.request_id for request in requests]


def test_a_long_prompt_is_cut_into_chunks_of_the_budget() -> None:
    request = make_request(70)
    scheduler, _ = make_scheduler(request)
    seen = []
    for _ in range(4):
        plan = scheduler.schedule()
        seen += [(row.start, row.stop, row.phase, row.is_sampled) for row in plan.rows]
        compute(plan)
    assert seen == [
        (0, 32, "prefill", False),
        (32, 64, "prefill", False),
        (64, 70, "prefill", True),
        (70, 71, "decode", True),
    ]


def test_decodes_go_on_while_a_long_prompt_is_read() -> None:
    long, short = make_request(100), make_request(3)
    scheduler, _ = make_scheduler(short)
    compute(scheduler.schedule())
    scheduler.add(long)
    for _ in range(3):
        plan = scheduler.schedule()
        assert planned(plan) == [(short.request_id, 1), (long.request_id, 31)]
        compute(plan)


def test_an_older_prefill_leaves_a_token_to_each_decode_behind_it() -> None:
    old, young = make_request(30), make_request(4)
    scheduler, _ = make_scheduler(old, young, budget=34)
    compute(scheduler.schedule())
    old.num_computed_tokens = 0
    old.token_ids += [1] * 60
    plan = scheduler.schedule()
    assert planned(plan) == [(old.request_id, 33), (young.request_id, 1)]


def test_no_more_run_than_max_num_seqs() -> None:
    requests = [make_request(2) for _ in range(5)]
    scheduler, _ = make_scheduler(*requests, max_num_seqs=3)
    compute(scheduler.schedule())
    assert (scheduler.num_running, scheduler.num_waiting) == (3, 2)
    scheduler.drop(requests[0])
    assert ids([row.request for row in scheduler.schedule().rows]) == ids(requests[1:4])


def test_admission_keeps_one_block_in_reserve_for_each_that_runs() -> None:
    first, second = make_request(8), make_request(4)
    scheduler, pool = make_scheduler(first, num_blocks=4)
    compute(scheduler.schedule())
    scheduler.add(second)
    assert planned(scheduler.schedule()) == [(first.request_id, 1)]
    assert second.status == "waiting"
    assert pool.num_free == 1


def test_a_lone_request_may_use_every_block() -> None:
    request = make_request(12)
    scheduler, pool = make_scheduler(request, num_blocks=3)
    assert planned(scheduler.schedule()) == [(request.request_id, 12)]
    assert pool.num_free == 0


def test_the_youngest_is_preempted_and_comes_back_first() -> None:
    old, young, late = make_request(8), make_request(4), make_request(1)
    scheduler, pool = make_scheduler(old, young, num_blocks=5, max_num_seqs=2)
    compute(scheduler.schedule())
    compute(scheduler.schedule())
    scheduler.add(late)
    # Each has taken a second block for its decode; now the old one needs another.
    old.token_ids += [1] * 4
    old.num_computed_tokens += 4
    plan = scheduler.schedule()
    assert ids(request for request, _ in plan.preempted) == [young.request_id]
    assert planned(plan) == [(old.request_id, 1)]
    assert (young.status, young.num_computed_tokens) == ("waiting", 0)
    assert ids(scheduler.live_requests()) == ids([old, young, late])
    pool.check_integrity()
    scheduler.drop(old)
    plan = scheduler.schedule()
    assert ids(row.request for row in plan.rows) == ids([young, late])
    assert plan.rows[0].phase == "prefill"


def test_a_request_that_lacks_a_block_and_is_youngest_gives_way_itself() -> None:
    old, young = make_request(4), make_request(8)
    scheduler, pool = make_scheduler(old, young, num_blocks=4, max_num_seqs=2)
    compute(scheduler.schedule())
    old.token_ids += [1] * 3
    old.num_computed_tokens += 3
    pool.allocate("someone else", 4)
    plan = scheduler.schedule()
    assert ids(request for request, _ in plan.preempted) == [young.request_id]
    assert planned(plan) == [(old.request_id, 1)]


def test_whom_a_step_preempts_it_does_not_admit_again() -> None:
    old, young = make_request(8), make_request(7)
    scheduler, pool = make_scheduler(old, young, num_blocks=5, max_num_seqs=3)
    compute(scheduler.schedule())
    old.token_ids += [1] * 4
    old.num_computed_tokens += 4
    plan = scheduler.schedule()
    assert ids(request for request, _ in plan.preempted) == [young.request_id]
    assert planned(plan) == [(old.request_id, 1)]
    assert (young.status, pool.num_free) == ("waiting", 1)


def test_removing_frees_the_blocks_wherever_the_request_is() -> None:
    running, waiting = make_request(8), make_request(8)
    scheduler, pool = make_scheduler(running, waiting, max_num_seqs=1)
    compute(scheduler.schedule())
    assert scheduler.drop(waiting) == []
    assert scheduler.drop(running) == [0, 1]
    assert (scheduler.num_running, scheduler.num_waiting, pool.num_free) == (0, 0, 64)
    assert scheduler.schedule() == Schedule([], [])


def with_priority(priority: int, num_tokens: int) -> Request:
    request = make_request(num_tokens)
    request.priority = priority
    return request


def test_the_urgent_are_admitted_first_and_each_priority_in_order_of_arrival() -> None:
    requests = [with_priority(priority, 2) for priority in (1, 0, 1, 0, -3)]
    scheduler, _ = make_scheduler(*requests, max_num_seqs=4)
    a, b, c, d, e = requests
    assert ids(scheduler.live_requests()) == ids([e, b, d, a, c])
    assert ids(row.request for row in scheduler.schedule().rows) == ids([e, b, d, a])
    assert ids(scheduler.live_requests()) == ids([e, b, d, a, c])


def test_the_urgent_take_the_place_of_the_last_of_those_who_are_not() -> None:
    old, young, equal = with_priority(1, 3), with_priority(1, 3), with_priority(1, 3)
    scheduler, pool = make_scheduler(old, young, equal, max_num_seqs=2)
    compute(scheduler.schedule())
    urgent = with_priority(0, 5)
    scheduler.add(urgent)
    plan = scheduler.schedule()
    assert ids(request for request, _ in plan.preempted) == [young.request_id]
    assert planned(plan) == [(urgent.request_id, 5), (old.request_id, 1)]
    # Who was sent away is still before those of his own kind.
    assert ids(scheduler.live_requests()) == ids([urgent, old, young, equal])
    compute(plan)
    scheduler.drop(urgent)
    assert ids(row.request for row in scheduler.schedule().rows) == ids([old, young])
    pool.check_integrity()


def test_the_urgent_take_blocks_of_as_many_as_it_needs() -> None:
    lesser = [with_priority(1, 12) for _ in range(3)]
    for number, request in enumerate(lesser):
        request.token_ids = [number] * 12
    scheduler, pool = make_scheduler(*lesser, num_blocks=13, budget=64)
    compute(scheduler.schedule())
    urgent = with_priority(0, 24)
    scheduler.add(urgent)
    plan = scheduler.schedule()
    assert ids(request for request, _ in plan.preempted) == ids([lesser[2], lesser[1]])
    assert planned(plan) == [(urgent.request_id, 24), (lesser[0].request_id, 1)]
    pool.check_integrity()


def test_nobody_is_sent_away_for_one_who_would_not_fit_all_the_same() -> None:
    equal, lesser = with_priority(0, 24), with_priority(1, 8)
    scheduler, _ = make_scheduler(equal, lesser, num_blocks=12, budget=64)
    compute(scheduler.schedule())
    urgent = with_priority(0, 24)
    scheduler.add(urgent)
    plan = scheduler.schedule()
    assert plan.preempted == []
    assert urgent.status == "waiting"


def test_blocks_that_wait_for_an_ack_are_waited_for_and_not_taken_from_others() -> None:
    old, young, leaver = make_request(8), make_request(7), make_request(6)
    for number, request in enumerate((old, young, leaver)):
        request.token_ids = [number] * len(request.token_ids)
    scheduler, pool = make_scheduler(old, young, leaver, num_blocks=9, max_num_seqs=3)
    plan = scheduler.schedule()
    pool.launch(1, [row.request.request_id for row in plan.rows])
    scheduler.drop(leaver)
    assert pool.num_retained == 2
    compute(Schedule([row for row in plan.rows if row.request is not leaver], []))
    old.token_ids += [1] * 12
    plan = scheduler.schedule()
    assert plan.preempted == []
    assert planned(plan) == [(young.request_id, 1)]
    compute(plan)
    pool.ack(1)
    plan = scheduler.schedule()
    assert planned(plan) == [(old.request_id, 13), (young.request_id, 1)]


def test_a_step_looks_at_the_flags_of_those_that_run_alone() -> None:
    runs, waits = make_request(4), make_request(4)
    scheduler, _ = make_scheduler(runs, waits, max_num_seqs=1)
    waits.mark_cancelled(Reason.ABORTED)
    scheduler.schedule()
    assert not scheduler.running_flags.any_fired()
    runs.mark_cancelled(Reason.ABORTED)
    assert scheduler.running_flags.any_fired()
    scheduler.drop(runs)
    assert len(scheduler.running_flags) == 0
    scheduler.schedule()
    assert scheduler.running_flags.any_fired()


def test_the_flags_of_who_was_sent_back_to_the_queue_wait_too() -> None:
    first, last = make_request(8), make_request(8)
    scheduler, _ = make_scheduler(first, last, num_blocks=5)
    compute(scheduler.schedule())
    last.mark_cancelled(Reason.ABORTED)
    assert scheduler.running_flags.any_fired()
    while last.status == "running":
        compute(scheduler.schedule())
    assert not scheduler.running_flags.any_fired()
