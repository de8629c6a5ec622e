"""The block pool under random use, against a model that knows texts and steps.

The model: each owner's blocks, those that transfers hold, and the last step that each block was
part of. Owners read one of a few texts, so that prefixes are shared, evicted and shared again.
"""

from collections import Counter

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
from disconnect_watch.engine.prefix_cache import extend_hashes

pytestmark = pytest.mark.slow

TEXTS = [[0] * 30, [0] * 9 + [1] * 21, [2] * 30]


class PoolMachine(RuleBasedStateMachine):
    """Owners come, share, grow and go; no block is handed out while a step may touch it."""

    owners = Bundle("owners")

    @initialize(num_blocks=st.integers(1, 12), block_size=st.integers(1, 5))
    def make(self, num_blocks: int, block_size: int) -> None:
        self.pool = BlockPool(num_blocks, block_size=block_size)
        self.owned: dict[str, list[int]] = {}
        self.holds: list[tuple[int, ...]] = []
        self.texts: dict[str, list[int]] = {}
        #: What was written to each block since it was handed out, as the tokens up to its end.
        self.content: dict[int, list[int]] = {}
        self.last_step: dict[int, int] = {}
        self.step = 0
        self.acked = 0
        self.num_names = 0

    @rule(target=owners, text=st.sampled_from(TEXTS))
    def arrive(self, text: list[int]) -> str:
        self.num_names += 1
        name = f"owner{self.num_names}"
        self.texts[name] = text
        return name

    def hashes(self, owner: str, num_tokens: int) -> list[bytes]:
        hashes: list[bytes] = []
        tokens = self.texts[owner][:num_tokens]
        extend_hashes(hashes, tokens, block_size=self.pool.block_size)
        return hashes

    @rule(owner=owners, num_tokens=st.integers(1, 30))
    def grow(self, owner: str, num_tokens: int) -> None:
        size = self.pool.block_size
        have = self.owned.get(owner, [])
        prefix = [] if have else self.pool.lookup(self.hashes(owner, num_tokens))
        for index, block in enumerate(prefix):
            # A hit is exactly the text that it stands for.
            assert self.content[block] == self.texts[owner][: (index + 1) * size]
        num_available = self.pool.num_available
        fits = self.pool.has_room(owner, num_tokens, prefix=prefix)
        assert self.pool.allocate(owner, num_tokens, prefix=prefix) == fits
        blocks = list(self.pool.block_ids(owner))
        if not fits:
            assert blocks == have
            assert self.pool.num_available == num_available
            assert -(-num_tokens // size) - len(have) > num_available - len(prefix)
            return
        assert blocks[: len(have) + len(prefix)] == have + prefix
        new = blocks[len(have) + len(prefix) :]
        assert len(blocks) == max(-(-num_tokens // size), len(have))
        for block in new:
            assert all(block not in others for others in (*self.owned.values(), *self.holds))
            assert self.last_step.get(block, 0) <= self.acked
            self.content[block] = []
        self.owned[owner] = blocks

    @rule(owner=owners)
    def compute(self, owner: str) -> None:
        """A step that writes all of the owner's blocks, and lets them be found."""
        self.step += 1
        self.touch(owner)
        size = self.pool.block_size
        blocks = self.owned.get(owner, [])
        for index, block in enumerate(blocks):
            self.content[block] = self.texts[owner][: (index + 1) * size]
        if blocks:
            self.pool.publish(owner, self.hashes(owner, len(blocks) * size))

    def touch(self, owner: str) -> None:
        if owner in self.owned:
            self.pool.launch(self.step, [owner])
            for block in self.owned[owner]:
                self.last_step[block] = self.step

    @rule(lag=st.integers(0, 3))
    def ack(self, lag: int) -> None:
        self.acked = max(self.acked, self.step - lag)
        self.pool.ack(self.step - lag)

    @rule(owner=consumes(owners), forget=st.booleans())
    def free(self, owner: str, forget: bool) -> None:
        blocks = self.owned.pop(owner, [])
        held = self.taken()
        assert self.pool.free(owner, forget=forget) == [b for b in blocks if b not in held]
        assert self.pool.free(owner) == []
        if forget and blocks:
            digests = self.hashes(owner, len(blocks) * self.pool.block_size)
            found = self.pool.lookup(digests)
            assert not set(found) & set(blocks)

    def taken(self) -> set[int]:
        return {block for have in (*self.owned.values(), *self.holds) for block in have}

    @rule(owner=owners, num_tokens=st.integers(1, 30))
    def hold(self, owner: str, num_tokens: int) -> None:
        if owner in self.owned:
            blocks = self.pool.hold(owner, num_tokens)
            assert list(blocks) == self.owned[owner][: -(-num_tokens // self.pool.block_size)]
            self.holds.append(blocks)

    @rule(index=st.integers(0, 99))
    def unhold(self, index: int) -> None:
        if self.holds:
            blocks = self.holds.pop(index % len(self.holds))
            taken = self.taken()
            assert self.pool.unhold(blocks) == [block for block in blocks if block not in taken]

    @invariant()
    def adds_up(self) -> None:
        self.pool.check_integrity()
        held = Counter(block for blocks in self.owned.values() for block in blocks)
        assert self.pool.num_used == len(held)
        assert self.pool.num_blocks == (
            self.pool.num_used + self.pool.num_retained + self.pool.num_cached + self.pool.num_free
        )
        places = Counter(BlockPool.PLACES[place] for place in self.pool.places())
        assert [places[name] for name in ("free", "cached", "retained", "used")] == [
            self.pool.num_free,
            self.pool.num_cached,
            self.pool.num_retained,
            self.pool.num_used,
        ]
        ledger = self.pool.ledger()
        assert len(ledger) == self.pool.num_used + self.pool.num_retained
        for block, entry in ledger.items():
            assert sorted(entry.owners) == sorted(
                owner for owner, blocks in self.owned.items() if block in blocks
            )
            # Never too early; a block that an owner got after its last step waits with the others.
            assert entry.epoch >= self.last_step.get(block, 0)
            is_held = any(block in blocks for blocks in self.holds)
            assert entry.owners or is_held or entry.epoch > self.acked
        assert self.pool.num_held == len({block for blocks in self.holds for block in blocks})
        assert self.pool.num_unacked == sum(block not in self.taken() for block in ledger)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
