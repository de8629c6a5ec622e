"""The ledger of KV blocks: which are free, and whom each of the others belongs to.

A block is in one of three places. *Free*: in the free list. *Used*: its owner is alive. *Retained*:
its owner has been cancelled, but the forward that runs may still write to it; it is given back
when that forward has returned. Free + used + retained is the size of the pool, always.

The pool knows numbers only. What lies in a block is the cache's affair.
"""

from collections import deque

__all__ = ["BlockPool"]


class BlockPool:
    """Hands out blocks ``0 .. num_blocks - 1`` to owners, and takes them back once.

    Freed blocks are reused last (the free list is a queue), so that a stale reference to one is
    more likely to be noticed by a test than hidden by luck.
    """

    def __init__(self, num_blocks: int, *, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free: deque[int] = deque(range(num_blocks))
        self._owned: dict[str, list[int]] = {}
        self._retained: set[str] = set()
        self._num_retained = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_retained(self) -> int:
        return self._num_retained

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free) - self._num_retained

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold ``num_tokens``."""
        return -(-num_tokens // self.block_size)

    def block_ids(self, owner: str) -> list[int]:
        """Return the owner's blocks in the order of its tokens: the live list, not a copy."""
        return self._owned.get(owner, [])

    def allocate(self, owner: str, num_tokens: int) -> bool:
        """Give the owner what it lacks to hold ``num_tokens``, or nothing if that is not there.

        Returns:
            Whether the owner now has room for that many.
        """
        blocks = self._owned.get(owner, [])
        num_missing = self.num_blocks_for(num_tokens) - len(blocks)
        if num_missing > len(self._free):
            return False
        if num_missing > 0:
            blocks.extend(self._free.popleft() for _ in range(num_missing))
            self._owned[owner] = blocks
        return True

    def retain(self, owner: str) -> None:
        """Set the blocks of a cancelled owner apart while a forward runs; ``free`` them after."""
        if owner not in self._retained:
            self._retained.add(owner)
            self._num_retained += len(self._owned.get(owner, ()))

    def free(self, owner: str) -> list[int]:
        """Take all blocks of an owner back; nothing may touch them any more.

        Returns:
            Their ids; none for an owner that has nothing.
        """
        blocks = self._owned.pop(owner, [])
        if owner in self._retained:
            self._retained.remove(owner)
            self._num_retained -= len(blocks)
        self._free.extend(blocks)
        return blocks

    def ledger(self) -> dict[int, str]:
        """Return the owner of each block that has one."""
        return {block: owner for owner, blocks in self._owned.items() for block in blocks}

    def check_integrity(self) -> None:
        """Verify that every block is in exactly one place. Costs a walk over the whole pool.

        Raises:
            AssertionError: naming what does not add up.
        """
        places = [*self._free, *(block for blocks in self._owned.values() for block in blocks)]
        if sorted(places) != list(range(self.num_blocks)):
            raise AssertionError(
                f"{len(places)} places for {self.num_blocks} blocks: free {list(self._free)}, "
                f"owned {self._owned}"
            )
        retained = sum(len(self._owned.get(owner, ())) for owner in self._retained)
        if retained != self._num_retained:
            raise AssertionError(f"{retained} blocks are retained, {self._num_retained} counted")
