"""What was computed once is found again: by whose text, for how long, and never by halves."""

from disconnect_watch.engine.block_pool import BlockPool
from disconnect_watch.engine.params import SamplingParams
from disconnect_watch.engine.prefix_cache import PrefixCache, extend_hashes
from disconnect_watch.engine.request import Request
from disconnect_watch.engine.scheduler import Scheduler

TEXT = list(range(40))


def hashes_of(token_ids: list[int], block_size: int = 4) -> list[bytes]:
    hashes: list[bytes] = []
    extend_hashes(hashes, token_ids, block_size=block_size)
    return hashes


def make_request(name: str, token_ids: list[int]) -> Request:
    return Request(name, token_ids, params=SamplingParams(), seed=0)


def make_scheduler(
    num_blocks: int = 16, *, budget: int = 32, enable_prefix_caching: bool = True
) -> tuple[Scheduler, BlockPool]:
    pool = BlockPool(num_blocks, block_size=4)
    scheduler = Scheduler(
        pool,
        max_num_seqs=4,
        max_num_batched_tokens=budget,
        enable_prefix_caching=enable_prefix_caching,
    )
    return scheduler, pool


def run_step(scheduler: Scheduler) -> list[tuple[str, int, int]]:
    """One step that computes nothing; returns the rows as name, start and stop."""
    rows = scheduler.schedule().rows
    for row in rows:
        is_sampled = row.is_sampled
        scheduler.advance(row.request, row.stop)
        if is_sampled:
            row.request.token_ids.append(99)
    return [(row.request.request_id, row.start, row.stop) for row in rows]


def test_a_digest_names_all_tokens_up_to_the_end_of_its_block() -> None:
    assert len(hashes_of(TEXT[:11])) == 2
    assert hashes_of(TEXT[:12])[:2] == hashes_of(TEXT[:8])
    other = [7, *TEXT[1:8]]
    assert not set(hashes_of(TEXT[:8])) & set(hashes_of(other))
    # The same tokens in a later block are another text.
    assert len(set(hashes_of([5] * 12))) == 3


def test_digests_are_computed_once_as_the_text_grows() -> None:
    hashes = hashes_of(TEXT[:9])
    extend_hashes(hashes, TEXT[:20], block_size=4)
    assert hashes == hashes_of(TEXT[:20])


def test_a_lookup_ends_where_the_texts_part() -> None:
    cache = PrefixCache()
    for block, digest in enumerate(hashes_of(TEXT[:16])):
        cache.publish(block, digest)
    assert cache.lookup(hashes_of([*TEXT[:8], 1, 2, 3, 4, *TEXT[12:16]])) == [0, 1]
    cache.forget(1)
    assert cache.lookup(hashes_of(TEXT[:16])) == [0]


def test_what_has_been_idle_longest_is_evicted_first() -> None:
    cache = PrefixCache()
    for block, digest in enumerate(hashes_of(TEXT[:12])):
        cache.publish(block, digest)
        cache.park(block)
    cache.claim(0)
    cache.park(0)
    assert [cache.evict(), cache.evict(), cache.evict()] == [1, 2, 0]
    assert cache.lookup(hashes_of(TEXT[:12])) == []
    cache.check_integrity()


def test_a_second_request_computes_only_what_differs() -> None:
    scheduler, pool = make_scheduler()
    scheduler.add(make_request("a", TEXT[:20]))
    run_step(scheduler)
    scheduler.add(make_request("b", [*TEXT[:17], 50, 51]))
    assert run_step(scheduler) == [("a", 20, 21), ("b", 16, 19)]
    assert pool.block_ids("b")[:4] == pool.block_ids("a")[:4]
    assert pool.num_used == 7
    pool.check_integrity()


def test_a_block_is_found_only_when_it_was_computed_whole() -> None:
    scheduler, _ = make_scheduler(budget=10)
    first, second = make_request("a", TEXT[:20]), make_request("b", TEXT[:20])
    scheduler.add(first)
    run_step(scheduler)
    # Ten tokens are computed, five blocks are allocated: two can be shared.
    scheduler.drop(first)
    scheduler.add(second)
    assert run_step(scheduler) == [("b", 8, 18)]


def test_the_last_token_is_computed_even_if_all_is_known() -> None:
    scheduler, _ = make_scheduler()
    first = make_request("a", TEXT[:16])
    scheduler.add(first)
    run_step(scheduler)
    scheduler.drop(first)
    scheduler.add(make_request("b", TEXT[:16]))
    assert run_step(scheduler) == [("b", 12, 16)]


def test_who_shares_a_block_keeps_it_when_the_other_leaves() -> None:
    scheduler, pool = make_scheduler()
    first, second = make_request("a", TEXT[:12]), make_request("b", TEXT[:13])
    scheduler.add(first)
    run_step(scheduler)
    scheduler.add(second)
    run_step(scheduler)
    assert scheduler.drop(first) == [3]
    assert pool.block_ids("b")[:3] == [0, 1, 2]
    assert scheduler.drop(second) == [0, 1, 2, 4]
    assert (pool.num_cached, pool.num_free) == (3, 13)
    pool.check_integrity()


def test_cached_blocks_go_to_who_needs_them_once_none_are_free() -> None:
    scheduler, pool = make_scheduler(6)
    old = make_request("old", TEXT[:16])
    scheduler.add(old)
    run_step(scheduler)
    scheduler.drop(old)
    assert (pool.num_cached, pool.num_free) == (4, 2)
    scheduler.add(make_request("new", [70 + index for index in range(16)]))
    assert run_step(scheduler) == [("new", 0, 16)]
    # The end of the old text went first: what is left of it can still be used.
    assert pool.lookup(hashes_of(TEXT[:16])) == [0, 1]
    pool.check_integrity()


def test_a_prefix_that_is_about_to_be_shared_is_not_evicted_for_the_rest() -> None:
    scheduler, pool = make_scheduler(5)
    first = make_request("a", TEXT[:16])
    scheduler.add(first)
    run_step(scheduler)
    scheduler.drop(first)
    # Three of the four cached blocks are the prefix: of the other two one is for the last token.
    scheduler.add(make_request("b", [*TEXT[:12], 60, 61, 62, 63, 64]))
    assert run_step(scheduler) == [("b", 12, 17)]
    assert pool.block_ids("b")[:3] == [0, 1, 2]
    pool.check_integrity()
    assert not pool.has_room("c", 4)


def test_a_preempted_request_finds_what_it_had_computed() -> None:
    scheduler, pool = make_scheduler(8)
    old, young = make_request("old", TEXT[:8]), make_request("young", TEXT[20:27])
    scheduler.add(old)
    scheduler.add(young)
    run_step(scheduler)
    old.token_ids += [1] * 19
    assert run_step(scheduler) == [("old", 8, 28)]
    assert young.status == "waiting"
    scheduler.drop(old)
    # Of its two blocks the full one is still there.
    assert run_step(scheduler) == [("young", 4, 8)]
    assert young.num_cached_tokens == 0
    pool.check_integrity()


def test_what_is_not_to_be_trusted_is_found_no_more() -> None:
    scheduler, pool = make_scheduler()
    first = make_request("a", TEXT[:12])
    scheduler.add(first)
    run_step(scheduler)
    scheduler.drop(first, forget=True)
    assert (pool.num_cached, pool.num_free) == (0, 16)
    scheduler.add(make_request("b", TEXT[:12]))
    assert run_step(scheduler) == [("b", 0, 12)]
    pool.check_integrity()


def test_a_published_block_that_waits_for_its_ack_can_be_shared() -> None:
    pool = BlockPool(4, block_size=4)
    pool.allocate("a", 4)
    pool.publish("a", [b"x"])
    pool.launch(1, ["a"])
    pool.free("a")
    assert pool.allocate("b", 5, prefix=pool.lookup([b"x"]))
    assert (pool.num_used, pool.num_retained) == (2, 0)
    pool.check_integrity()
    pool.free("b")
    assert (pool.num_retained, pool.num_free) == (1, 3)
    pool.ack(1)
    assert (pool.num_cached, pool.num_free) == (1, 3)
    pool.check_integrity()


def test_without_the_cache_nothing_is_kept_and_nothing_shared() -> None:
    scheduler, pool = make_scheduler(enable_prefix_caching=False)
    first = make_request("a", TEXT[:12])
    scheduler.add(first)
    run_step(scheduler)
    scheduler.add(make_request("b", TEXT[:12]))
    assert run_step(scheduler)[1] == ("b", 0, 12)
    scheduler.drop(first)
    assert pool.num_cached == 0
