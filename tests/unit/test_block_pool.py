"""The ledger of blocks: every block in one place, each given back once."""

import pytest

from disconnect_watch.engine.block_pool import BlockEntry, BlockPool


def test_blocks_are_given_by_the_token_and_counted() -> None:
    pool = BlockPool(8, block_size=4)
    assert pool.allocate("a", 5)
    assert pool.block_ids("a") == [0, 1]
    assert pool.allocate("b", 4)
    assert (pool.num_used, pool.num_free, pool.num_retained) == (3, 5, 0)
    assert pool.ledger() == {
        0: BlockEntry(("a",), 1, 0),
        1: BlockEntry(("a",), 1, 0),
        2: BlockEntry(("b",), 1, 0),
    }
    pool.check_integrity()


def test_growing_keeps_the_order_and_adds_only_what_lacks() -> None:
    pool = BlockPool(8, block_size=4)
    pool.allocate("a", 4)
    pool.allocate("b", 4)
    assert pool.allocate("a", 4)
    assert pool.allocate("a", 9)
    assert pool.block_ids("a") == [0, 2, 3]


def test_how_long_blocks_were_held_is_a_sum_over_them() -> None:
    now = 0
    pool = BlockPool(8, block_size=4, clock=lambda: now)
    pool.allocate("a", 8)
    now = 10
    pool.allocate("a", 9)
    pool.allocate("a", 10)  # within its last block
    now = 15
    assert pool.block_ns("a") == 2 * 15 + 1 * 5
    pool.free("a")
    assert pool.block_ns("a") == 0
    pool.allocate("a", 4)
    assert pool.block_ns("a") == 0


def test_what_does_not_fit_takes_nothing() -> None:
    pool = BlockPool(4, block_size=4)
    pool.allocate("a", 8)
    assert not pool.allocate("b", 12)
    assert not pool.allocate("a", 20)
    assert pool.num_free == 2
    assert pool.block_ids("a") == [0, 1]
    assert pool.block_ids("b") == []
    pool.check_integrity()


def test_freeing_twice_gives_back_once() -> None:
    pool = BlockPool(4, block_size=4)
    pool.allocate("a", 16)
    assert pool.free("a") == [0, 1, 2, 3]
    assert pool.free("a") == []
    assert pool.num_free == 4
    pool.check_integrity()


def test_a_freed_block_is_reused_last() -> None:
    pool = BlockPool(4, block_size=4)
    pool.allocate("a", 4)
    pool.free("a")
    pool.allocate("b", 12)
    assert pool.block_ids("b") == [1, 2, 3]


def test_blocks_of_a_step_under_way_are_neither_used_nor_free_until_its_ack() -> None:
    pool = BlockPool(4, block_size=4)
    pool.allocate("a", 8)
    pool.launch(7, ["a"])
    assert pool.free("a") == [0, 1]
    assert pool.free("a") == []
    assert (pool.num_used, pool.num_free, pool.num_retained) == (0, 2, 2)
    assert pool.ledger() == {0: BlockEntry((), 1, 7), 1: BlockEntry((), 1, 7)}
    assert not pool.allocate("b", 12)
    pool.check_integrity()
    pool.ack(6)
    assert pool.num_retained == 2
    pool.ack(7)
    assert (pool.num_used, pool.num_free, pool.num_retained) == (0, 4, 0)
    pool.check_integrity()


def test_an_ack_that_comes_late_or_twice_changes_nothing() -> None:
    pool = BlockPool(4, block_size=4)
    pool.ack(8)
    pool.allocate("a", 8)
    pool.launch(9, ["a"])
    pool.free("a")
    pool.ack(3)
    pool.ack(8)
    assert pool.num_retained == 2
    pool.check_integrity()


def test_a_shared_block_waits_for_the_last_step_of_each_who_had_it() -> None:
    pool = BlockPool(4, block_size=4)
    pool.allocate("a", 4)
    pool.publish("a", [b"x"])
    pool.allocate("b", 4, prefix=[0])
    pool.launch(1, ["a", "b"])
    pool.ack(1)
    pool.launch(2, ["b"])
    # b's last step still reads it when a, who took no part, is the last to let go.
    pool.free("b")
    pool.free("a")
    assert (pool.num_retained, pool.num_cached) == (1, 0)
    pool.ack(2)
    assert (pool.num_retained, pool.num_cached) == (0, 1)


def test_a_generation_counts_how_often_a_block_was_handed_out() -> None:
    pool = BlockPool(2, block_size=4)
    for name in "abc":
        pool.allocate(name, 8)
        pool.free(name)
    pool.allocate("d", 4)
    [entry] = pool.ledger().values()
    assert entry == BlockEntry(("d",), 4, 0)


def test_the_check_finds_a_block_in_two_places() -> None:
    pool = BlockPool(4, block_size=4)
    pool.allocate("a", 8)
    pool.block_ids("a")[0] = 3
    with pytest.raises(AssertionError, match="places for 4 blocks"):
        pool.check_integrity()


def test_the_check_finds_a_wrong_count_of_holders() -> None:
    pool = BlockPool(4, block_size=4)
    pool.allocate("a", 4)
    pool._ref_cnt[0] = 2
    with pytest.raises(AssertionError, match=r"blocks \[0\] are counted as held"):
        pool.check_integrity()


def test_the_check_finds_a_block_that_was_freed_before_its_ack() -> None:
    pool = BlockPool(4, block_size=4)
    pool._epoch[2] = 5
    with pytest.raises(AssertionError, match=r"blocks \[2\] are free before"):
        pool.check_integrity()


def test_cached_blocks_of_a_prefix_do_not_count_as_room_for_the_rest_of_it() -> None:
    pool = BlockPool(4, block_size=4)
    pool.allocate("a", 8)
    pool.publish("a", [b"x", b"y"])
    pool.allocate("b", 8)
    pool.free("a")
    assert pool.num_available == 2
    assert not pool.allocate("c", 9, prefix=pool.lookup([b"x", b"y"]))
    assert pool.num_cached == 2
    assert pool.allocate("c", 8, prefix=pool.lookup([b"x", b"y"]))
    pool.check_integrity()


def test_what_a_transfer_holds_outlives_its_owner() -> None:
    pool = BlockPool(4, block_size=4)
    pool.allocate("a", 12)
    held = pool.hold("a", 5)
    assert held == (0, 1)
    assert (pool.num_used, pool.num_retained) == (3, 0)
    assert pool.free("a") == [2]
    assert (pool.num_used, pool.num_retained, pool.num_unacked, pool.num_held) == (0, 2, 0, 2)
    assert not pool.allocate("b", 12)
    pool.check_integrity()
    assert pool.unhold(held) == [0, 1]
    assert pool.num_free == 4
    pool.check_integrity()


def test_a_hold_is_taken_back_once() -> None:
    pool = BlockPool(4, block_size=4)
    pool.allocate("a", 8)
    held = pool.hold("a", 8)
    assert pool.unhold(held) == []
    with pytest.raises(ValueError, match="held by no transfer"):
        pool.unhold(held)
    assert pool.free("a") == [0, 1]


def test_what_was_held_waits_for_the_step_that_touches_it_too() -> None:
    pool = BlockPool(4, block_size=4)
    pool.allocate("a", 8)
    pool.launch(3, ["a"])
    held = pool.hold("a", 8)
    pool.free("a")
    pool.unhold(held)
    assert (pool.num_free, pool.num_retained, pool.num_unacked) == (2, 2, 2)
    pool.check_integrity()
    pool.ack(3)
    assert pool.num_free == 4
