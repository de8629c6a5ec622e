"""The block pool under random use, against a model that is a dict of lists."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    rule,
)

from disconnect_watch.engine.block_pool import BlockPool

pytestmark = pytest.mark.slow


class PoolMachine(RuleBasedStateMachine):
    """Owners come, grow, are set apart, and go; each block is in one place throughout."""

    owners = Bundle("owners")

    @initialize(num_blocks=st.integers(1, 12), block_size=st.integers(1, 5))
    def make(self, num_blocks: int, block_size: int) -> None:
        self.pool = BlockPool(num_blocks, block_size=block_size)
        self.owned: dict[str, list[int]] = {}
        self.retained: set[str] = set()
        self.num_names = 0

    @rule(target=owners)
    def arrive(self) -> str:
        self.num_names += 1
        return f"owner{self.num_names}"

    @rule(owner=owners, num_tokens=st.integers(0, 30))
    def grow(self, owner: str, num_tokens: int) -> None:
        if owner in self.retained:
            return
        have = self.owned.get(owner, [])
        needed = -(-num_tokens // self.pool.block_size)
        num_free = self.pool.num_blocks - sum(map(len, self.owned.values()))
        fits = needed - len(have) <= num_free
        assert self.pool.allocate(owner, num_tokens) == fits
        blocks = list(self.pool.block_ids(owner))
        assert blocks[: len(have)] == have
        assert len(blocks) == (max(needed, len(have)) if fits else len(have))
        strangers = {b for other, bs in self.owned.items() if other != owner for b in bs}
        assert not strangers & set(blocks)
        if blocks:
            self.owned[owner] = blocks

    @rule(owner=owners)
    def retain(self, owner: str) -> None:
        self.pool.retain(owner)
        self.retained.add(owner)

    @rule(owner=consumes(owners))
    def free(self, owner: str) -> None:
        assert self.pool.free(owner) == self.owned.pop(owner, [])
        assert self.pool.free(owner) == []
        self.retained.discard(owner)

    @invariant()
    def adds_up(self) -> None:
        self.pool.check_integrity()
        retained = sum(len(bs) for owner, bs in self.owned.items() if owner in self.retained)
        owned = sum(map(len, self.owned.values()))
        assert self.pool.num_retained == retained
        assert self.pool.num_used == owned - retained
        assert self.pool.num_free == self.pool.num_blocks - owned
        assert self.pool.ledger() == {b: owner for owner, bs in self.owned.items() for b in bs}


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
