"""The ledger of KV blocks: who holds each, and when the others may have it.

A block is in one of four places:

==========  ==================================================================================
used        one request or more hold it (``ref_cnt``); more than one where they share a prefix
retained    no request holds it, but a step that was launched may still read or write it, or a
            transfer, or both: it is *held*
cached      nobody holds or touches it, and its content can be found again: evictable
free        nobody holds or touches it, and it has nothing to keep
==========  ==================================================================================

used → retained → (ack, end of the transfer) → cached or free; used → cached or free at once if no
step and no transfer is under way that had it; cached, or retained and published → used by a prefix
hit; free, and cached by eviction, → used by allocation. Used + retained + cached + free is the size
of the pool, always.

*Ack before free.* Steps are numbered, and the number of the last step that an owner took part in
is its *epoch*. A block goes on to the pool only when a step at least as late as the epoch of each
of its past owners was acknowledged. On a CPU that is when the forward has returned; a device
writes the number itself.

The pool knows numbers only. What lies in a block is the cache's affair.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from disconnect_watch.engine.prefix_cache import PrefixCache

__all__ = ["BlockEntry", "BlockPool"]


@dataclass(frozen=True, slots=True)
class BlockEntry:
    """What the ledger knows of one block that is used or retained.

    Attributes:
        owners: who holds it; none if it is retained.
        generation: how often it was handed out with nothing in it.
        epoch: the last step that may touch it.
    """

    owners: tuple[str, ...]
    generation: int
    epoch: int


@dataclass(slots=True)
class _Owner:
    blocks: list[int] = field(default_factory=list)
    epoch: int = 0
    num_published: int = 0
    # The times at which it got its blocks, summed.
    since_ns: int = 0


class BlockPool:
    """Hands out blocks ``0 .. num_blocks - 1`` to owners, and takes them back once.

    Freed blocks are reused last (the free list is a queue), so that a stale reference to one is
    more likely to be noticed by a test than hidden by luck; and cached ones after all free ones.

    Args:
        clock: nanoseconds, by which it is told for how long blocks are held.
    """

    #: Where a block can be, in the order in which ``places`` numbers them.
    PLACES = ("free", "cached", "retained", "used")

    def __init__(
        self,
        num_blocks: int,
        *,
        block_size: int,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._clock = clock
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free: deque[int] = deque(range(num_blocks))
        self._cache = PrefixCache()
        # Blocks that wait for an ack, in the order in which they were given up.
        self._retained: dict[int, None] = {}
        self._owners: dict[str, _Owner] = {}
        # Requests and transfers together, and the latter alone.
        self._ref_cnt = [0] * num_blocks
        self._num_holds: dict[int, int] = {}
        # Blocks that only transfers have.
        self._num_held_only = 0
        self._generation = [0] * num_blocks
        self._epoch = [0] * num_blocks
        self._acked = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return self._cache.num_idle

    @property
    def num_available(self) -> int:
        """How many blocks can be handed out now."""
        return len(self._free) + self._cache.num_idle

    @property
    def num_retained(self) -> int:
        return len(self._retained) + self._num_held_only

    @property
    def num_unacked(self) -> int:
        """How many of the retained wait for nothing but a step that is under way."""
        return len(self._retained)

    @property
    def num_held(self) -> int:
        """How many blocks transfers have, alone or beside requests."""
        return len(self._num_holds)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_available - self.num_retained

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold ``num_tokens``."""
        return -(-num_tokens // self.block_size)

    def block_ids(self, owner: str) -> list[int]:
        """Return the owner's blocks in the order of its tokens: the live list, not a copy."""
        record = self._owners.get(owner)
        return [] if record is None else record.blocks

    def lookup(self, hashes: Sequence[bytes]) -> list[int]:
        """Return the blocks that hold the longest known prefix, to be given to ``allocate``."""
        return self._cache.lookup(hashes)

    def has_room(
        self, owner: str, num_tokens: int, *, prefix: Sequence[int] = (), reserve: int = 0
    ) -> bool:
        """Whether ``allocate`` would succeed and leave ``reserve`` blocks for others."""
        num_missing = self.num_blocks_for(num_tokens) - len(self.block_ids(owner)) - len(prefix)
        # Blocks of the prefix that nobody uses can't be evicted for the rest of it.
        num_claimed = sum(self._cache.is_idle(block) for block in prefix)
        return num_missing <= 0 or num_missing + reserve <= self.num_available - num_claimed

    def num_freed_by(self, owners: Iterable[str], *, keep: Sequence[int] = ()) -> int:
        """Return how many blocks nobody would hold if all those owners left.

        Args:
            keep: blocks that are not counted.
        """
        held = Counter(block for owner in owners for block in self.block_ids(owner))
        for block in keep:
            held.pop(block, None)
        return sum(count == self._ref_cnt[block] for block, count in held.items())

    def allocate(self, owner: str, num_tokens: int, *, prefix: Sequence[int] = ()) -> bool:
        """Give the owner what it lacks to hold ``num_tokens``, or nothing if that is not there.

        Args:
            prefix: found by ``lookup`` since the last call of anything else; for a new owner only.

        Returns:
            Whether the owner now has room for that many.
        """
        known = self._owners.get(owner)
        if known and not prefix and num_tokens <= len(known.blocks) * self.block_size:
            # What most rows of most steps are: a decode within its last block.
            return True
        if not self.has_room(owner, num_tokens, prefix=prefix):
            return False
        record = self._owners.setdefault(owner, _Owner())
        num_before = len(record.blocks)
        assert not (prefix and record.blocks), f"{owner} has blocks in front of its prefix"
        for block in prefix:
            self._share(block)
        record.blocks += prefix
        record.num_published = max(record.num_published, len(prefix))
        for _ in range(self.num_blocks_for(num_tokens) - len(record.blocks)):
            block = self._free.popleft() if self._free else self._cache.evict()
            self._ref_cnt[block] = 1
            self._generation[block] += 1
            record.blocks.append(block)
        record.since_ns += (len(record.blocks) - num_before) * self._clock()
        return True

    def block_ns(self, owner: str) -> int:
        """Return for how long the owner has held its blocks, summed over them."""
        record = self._owners.get(owner)
        return 0 if record is None else len(record.blocks) * self._clock() - record.since_ns

    def publish(self, owner: str, hashes: Sequence[bytes]) -> None:
        """Let the owner's first ``len(hashes)`` blocks be found, all of which are computed."""
        record = self._owners[owner]
        for index in range(record.num_published, len(hashes)):
            self._cache.publish(record.blocks[index], hashes[index])
        record.num_published = max(record.num_published, len(hashes))

    def launch(self, epoch: int, owners: Iterable[str]) -> None:
        """Note that a step of that number is about to read and write the owners' blocks."""
        for owner in owners:
            self._owners[owner].epoch = epoch

    def ack(self, epoch: int) -> bool:
        """Note that no step up to that number can touch a block any more.

        Returns:
            False for one that comes late, behind that of a later step; nothing is done then.
        """
        if epoch <= self._acked:
            return epoch == self._acked
        self._acked = epoch
        for block in [block for block in self._retained if self._epoch[block] <= epoch]:
            del self._retained[block]
            self._settle(block)
        return True

    def free(self, owner: str, *, forget: bool = False) -> list[int]:
        """Take all blocks of an owner back; those that nobody else holds go on to the pool.

        They do so with the ack of the last step that may touch them, if one is under way.

        Args:
            forget: the content is not to be trusted: let none of it be found again.

        Returns:
            The blocks that nobody holds now, in the order of the owner's tokens; none for an
            owner that has nothing.
        """
        record = self._owners.pop(owner, None)
        if record is None:
            return []
        freed: list[int] = []
        # Backwards, so that the end of a text is evicted before what leads to it.
        for block in reversed(record.blocks):
            if forget:
                self._cache.forget(block)
            self._epoch[block] = max(self._epoch[block], record.epoch)
            self._ref_cnt[block] -= 1
            if not self._ref_cnt[block]:
                freed.append(block)
                self._settle(block)
            elif self._is_held_only(block):
                self._num_held_only += 1
        freed.reverse()
        return freed

    def hold(self, owner: str, num_tokens: int) -> tuple[int, ...]:
        """Let a transfer have the blocks of the owner's first ``num_tokens`` too, until ``unhold``.

        They stay where they are, with what is in them, whatever becomes of the owner.

        Returns:
            The blocks, in the order of the tokens.
        """
        blocks = tuple(self._owners[owner].blocks[: self.num_blocks_for(num_tokens)])
        for block in blocks:
            self._ref_cnt[block] += 1
            self._num_holds[block] = self._num_holds.get(block, 0) + 1
        return blocks

    def unhold(self, blocks: Sequence[int]) -> list[int]:
        """Take back what one ``hold`` gave, once the transfer touches it no more.

        Returns:
            The blocks that nobody has now, in the same order.

        Raises:
            ValueError: no transfer holds one of them; nothing was taken back.
        """
        if strange := [block for block in blocks if block not in self._num_holds]:
            raise ValueError(f"blocks {strange} are held by no transfer, release each hold once")
        freed: list[int] = []
        for block in reversed(blocks):
            was_held_only = self._is_held_only(block)
            self._ref_cnt[block] -= 1
            self._num_holds[block] -= 1
            if not self._num_holds[block]:
                del self._num_holds[block]
            if not self._ref_cnt[block]:
                self._num_held_only -= was_held_only
                freed.append(block)
                self._settle(block)
        freed.reverse()
        return freed

    def ledger(self) -> dict[int, BlockEntry]:
        """Return the entry of each block that is used or retained."""
        owners: dict[int, list[str]] = {block: [] for block in (*self._retained, *self._num_holds)}
        epochs = dict(enumerate(self._epoch))
        for name, record in self._owners.items():
            for block in record.blocks:
                owners.setdefault(block, []).append(name)
                epochs[block] = max(epochs[block], record.epoch)
        return {
            block: BlockEntry(tuple(names), self._generation[block], epochs[block])
            for block, names in owners.items()
        }

    def places(self) -> bytes:
        """Return where each block is, as numbers of ``PLACES``; costs a walk over what is taken."""
        places = bytearray(self.num_blocks)
        for number, blocks in (
            (1, self._cache.idle_block_ids),
            (2, (*self._retained, *self._num_holds)),
            (3, (block for record in self._owners.values() for block in record.blocks)),
        ):
            for block in blocks:
                places[block] = number
        return bytes(places)

    def check_integrity(self) -> None:
        """Verify that every block is in exactly one place. Costs a walk over the whole pool.

        Raises:
            AssertionError: naming what does not add up.
        """
        held = Counter(block for record in self._owners.values() for block in record.blocks)
        idle = self._cache.idle_block_ids
        held_only = self._num_holds.keys() - held.keys()
        places = [*self._free, *idle, *self._retained, *held_only, *held]
        if sorted(places) != list(range(self.num_blocks)):
            raise AssertionError(
                f"{len(places)} places for {self.num_blocks} blocks: free {list(self._free)}, "
                f"cached {idle}, retained {list(self._retained)}, held {sorted(held_only)}, "
                f"used {dict(held)}"
            )
        if len(held_only) != self._num_held_only:
            raise AssertionError(f"{self._num_held_only} is not the number of {sorted(held_only)}")
        held.update(self._num_holds)
        if wrong := [b for b, count in enumerate(self._ref_cnt) if count != held[b]]:
            raise AssertionError(f"blocks {wrong} are counted as held more or less than they are")
        if early := [b for b in (*self._free, *idle) if self._epoch[b] > self._acked]:
            raise AssertionError(f"blocks {early} are free before step {self._acked} was followed")
        self._cache.check_integrity()

    def _share(self, block: int) -> None:
        """Let one more hold a published block, wherever it is."""
        if self._cache.is_idle(block):
            self._cache.claim(block)
        elif self._is_held_only(block):
            self._num_held_only -= 1
        else:
            self._retained.pop(block, None)
        self._ref_cnt[block] += 1

    def _is_held_only(self, block: int) -> bool:
        num_holds = self._num_holds.get(block)
        return num_holds is not None and num_holds == self._ref_cnt[block]

    def _settle(self, block: int) -> None:
        """Put a block that nobody holds where it belongs."""
        if self._epoch[block] > self._acked:
            self._retained[block] = None
        elif self._cache.is_published(block):
            self._cache.park(block)
        else:
            self._free.append(block)
