"""The ledger of blocks: every block in one place, each given back once."""

import pytest

from disconnect_watch.engine.block_pool import BlockPool


def test_blocks_are_given_by_the_token_and_counted() -> None:
    pool = BlockPool(8, block_size=4)
    assert pool.allocate("a", 5)
    assert pool.block_ids("a") == [0, 1]
    assert pool.allocate("b", 4)
    assert (pool.num_used, pool.num_free, pool.num_retained) == (3, 5, 0)
    assert pool.ledger() == {0: "a", 1: "a", 2: "b"}
    pool.check_integrity()


def test_growing_keeps_the_order_and_adds_only_what_lacks() -> None:
    pool = BlockPool(8, block_size=4)
    pool.allocate("a", 4)
    pool.allocate("b", 4)
    assert pool.allocate("a", 4)
    assert pool.allocate("a", 9)
    assert pool.block_ids("a") == [0, 2, 3]


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


def test_retained_blocks_are_neither_used_nor_free() -> None:
    pool = BlockPool(4, block_size=4)
    pool.allocate("a", 8)
    pool.retain("a")
    pool.retain("a")
    assert (pool.num_used, pool.num_free, pool.num_retained) == (0, 2, 2)
    assert not pool.allocate("b", 12)
    pool.check_integrity()
    pool.free("a")
    assert (pool.num_used, pool.num_free, pool.num_retained) == (0, 4, 0)
    pool.check_integrity()


def test_the_check_finds_a_block_in_two_places() -> None:
    pool = BlockPool(4, block_size=4)
    pool.allocate("a", 8)
    pool.block_ids("a")[0] = 3
    with pytest.raises(AssertionError, match="places for 4 blocks"):
        pool.check_integrity()
