"""Which requests wait, which run next and together, and which are refused."""

import asyncio
from typing import Any

import pytest

from disconnect_watch.backends.infer import Code, InferError, InferRequest
from disconnect_watch.backends.model_config import complete, from_document
from disconnect_watch.backends.pending import Pending
from disconnect_watch.backends.request_queue import RequestQueue

MS = 1_000_000


def queue_of(max_batch_size: int = 8, **batching: Any) -> RequestQueue:
    config = from_document({"max_batch_size": max_batch_size, "dynamic_batching": batching})
    complete(config, "m")
    return RequestQueue(config)


@pytest.fixture
def loop() -> Any:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


class Maker:
    """Makes requests that arrive one after another, 1 ms apart, from 0 on."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._num = 0

    def __call__(self, size: int = 1, key: str = "", **request: Any) -> Pending:
        pending = Pending(InferRequest(**request), size, key, self._loop)
        pending.arrived_ns = self._num * MS
        self._num += 1
        return pending


@pytest.fixture
def make(loop: asyncio.AbstractEventLoop) -> Maker:
    return Maker(loop)


def test_without_batching_each_request_runs_alone_in_order(make: Maker) -> None:
    config = from_document({"max_batch_size": 8})
    complete(config, "m")
    queue = RequestQueue(config)
    one, two = make(), make()
    queue.push(one)
    queue.push(two)
    assert queue.take(0, 0) == ([one], 0)
    assert queue.take(0, 0) == ([two], 0)
    assert queue.take(0, 0) == ([], 0)


def test_batch_is_what_waits_up_to_the_largest(make: Maker) -> None:
    queue = queue_of(max_batch_size=4)
    sizes = [1, 2, 2, 1]
    made = [make(size) for size in sizes]
    for pending in made:
        queue.push(pending)
    assert queue.take(0, 0)[0] == made[:2]
    assert queue.take(0, 0)[0] == made[2:]


def test_requests_that_may_share_no_batch_do_not(make: Maker) -> None:
    queue = queue_of()
    made = [make(key=key) for key in "aaba"]
    for pending in made:
        queue.push(pending)
    batches = [queue.take(0, 0)[0] for _ in range(3)]
    assert batches == [made[:2], [made[2]], [made[3]]]


def test_batch_waits_for_more_until_its_first_has_waited_long_enough(make: Maker) -> None:
    queue = queue_of(max_queue_delay_microseconds=10_000)
    one, two = make(), make()
    queue.push(one)
    queue.push(two)
    assert queue.take(5 * MS, 0) == ([], 10 * MS)
    assert queue.take(10 * MS, 0) == ([one, two], 0)


def test_batch_that_is_full_or_can_not_grow_does_not_wait(make: Maker) -> None:
    queue = queue_of(max_batch_size=2, max_queue_delay_microseconds=10_000)
    one, two = make(), make()
    queue.push(one)
    queue.push(two)
    assert queue.take(0, 0) == ([one, two], 0)
    other = [make(key="a"), make(key="b")]
    for pending in other:
        queue.push(pending)
    assert queue.take(0, 0) == ([other[0]], 0)


def test_preferred_size_goes_at_once_and_the_rest_waits(make: Maker) -> None:
    queue = queue_of(preferred_batch_size=[2, 4], max_queue_delay_microseconds=10_000)
    made = [make() for _ in range(3)]
    for pending in made:
        queue.push(pending)
    assert queue.take(0, 0) == (made[:2], 0)
    assert queue.take(0, 0) == ([], 12 * MS)


def test_more_urgent_requests_run_first(make: Maker) -> None:
    queue = queue_of(priority_levels=3, default_priority_level=2)
    usual, low, urgent, beyond = make(), make(priority=3), make(priority=1), make(priority=9)
    for pending in (low, usual, urgent, beyond):
        queue.push(pending)
    assert list(queue) == [urgent, usual, low, beyond]


def test_request_beyond_the_queues_size_is_refused(make: Maker) -> None:
    queue = queue_of(default_queue_policy={"max_queue_size": 1})
    first = make(id="a")
    queue.push(first)
    with pytest.raises(InferError) as caught:
        queue.push(make(id="b"))
    assert caught.value.code is Code.UNAVAILABLE
    assert caught.value.message == "[request id: b] Exceeds maximum queue size"
    # Who was cancelled holds no place.
    assert queue.remove(first)
    assert not queue.remove(first)
    queue.push(make(id="c"))


def test_each_level_has_a_policy_of_its_own(make: Maker) -> None:
    queue = queue_of(
        priority_levels=2,
        default_priority_level=1,
        priority_queue_policy={"2": {"max_queue_size": 1}},
    )
    queue.push(make(priority=2))
    with pytest.raises(InferError, match="Exceeds maximum queue size"):
        queue.push(make(priority=2))
    queue.push(make())
    queue.push(make())


@pytest.mark.parametrize(
    ("own_us", "allowed", "deadline_ms"),
    [(0, True, 5), (2000, True, 2), (9000, True, 5), (2000, False, 5)],
)
def test_own_timeout_counts_where_it_is_allowed_and_shorter(
    make: Maker, own_us: int, allowed: bool, deadline_ms: int
) -> None:
    queue = queue_of(
        default_queue_policy={
            "default_timeout_microseconds": 5000,
            "allow_timeout_override": allowed,
        }
    )
    queue.push(make(timeout_us=own_us))
    assert queue.next_deadline_ns() == deadline_ms * MS


def test_request_that_waited_too_long_is_refused(make: Maker) -> None:
    queue = queue_of(default_queue_policy={"default_timeout_microseconds": 5000})
    late, later = make(), make()
    queue.push(late)
    queue.push(later)
    assert queue.expire(4 * MS) == []
    assert queue.expire(5 * MS) == [late]
    assert queue.next_deadline_ns() == 6 * MS
    assert queue.take(0, 0) == ([later], 0)
    assert queue.next_deadline_ns() == 0


def test_request_that_waited_too_long_is_put_off_where_the_policy_says_so(make: Maker) -> None:
    queue = queue_of(
        max_batch_size=1,
        default_queue_policy={"default_timeout_microseconds": 5000, "timeout_action": "DELAY"},
    )
    late, in_time = make(), make()
    queue.push(late)
    queue.push(in_time)
    assert queue.expire(5 * MS) == []
    assert list(queue) == [in_time, late]
    assert queue.expire(100 * MS) == []
    assert queue.remove(late)
    assert not len(queue) - 1
