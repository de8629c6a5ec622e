"""Which full blocks hold which tokens, so that what was computed once is found again.

A block's name is a digest of all tokens up to its end: its own, behind the digest of the block
before it. So equal names mean equal text from the very start, and a lookup that walks a prompt
block by block stops where the texts part. The digest is cryptographic: a collision, which a client
could look for, would show him an answer to another's prompt.

Published blocks that nobody uses are *idle*. They keep their content until it is evicted, the one
that has been idle longest first.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

__all__ = ["PrefixCache", "extend_hashes"]


def extend_hashes(hashes: list[bytes], token_ids: Sequence[int], *, block_size: int) -> None:
    """Append the digests of those full blocks of ``token_ids`` that ``hashes`` does not have yet.

    Args:
        hashes: of the first blocks of the same tokens; changed in place.
    """
    for index in range(len(hashes), len(token_ids) // block_size):
        digest = blake2b(hashes[-1] if hashes else b"", digest_size=16)
        digest.update(array("q", token_ids[index * block_size : (index + 1) * block_size]))
        hashes.append(digest.digest())


class PrefixCache:
    """Published blocks by digest. Who uses a block is the pool's affair."""

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    @property
    def idle_block_ids(self) -> list[int]:
        """In the order of eviction."""
        return list(self._idle)

    def is_idle(self, block: int) -> bool:
        return block in self._idle

    def is_published(self, block: int) -> bool:
        return block in self._hash_of

    def lookup(self, hashes: Sequence[bytes]) -> list[int]:
        """Return the blocks of the longest known prefix."""
        blocks: list[int] = []
        for digest in hashes:
            block = self._block_of.get(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def publish(self, block: int, digest: bytes) -> None:
        """Let a full block be found, unless another one with the same tokens can be already."""
        if digest not in self._block_of:
            self._block_of[digest] = block
            self._hash_of[block] = digest

    def forget(self, block: int) -> None:
        """Let the block be found no more, if it could be."""
        digest = self._hash_of.pop(block, None)
        if digest is not None:
            del self._block_of[digest]

    def park(self, block: int) -> None:
        """Take in a published block that nobody uses any more."""
        self._idle[block] = None

    def claim(self, block: int) -> None:
        """Hand an idle block to one who uses it; it stays published."""
        del self._idle[block]

    def evict(self) -> int:
        """Give up the block that has been idle longest, and what is known of it."""
        block, _ = self._idle.popitem(last=False)
        self.forget(block)
        return block

    def check_integrity(self) -> None:
        """Verify that digests and blocks name each other.

        Raises:
            AssertionError: naming what does not add up.
        """
        if {block: digest for digest, block in self._block_of.items()} != self._hash_of:
            raise AssertionError("digests and blocks of the prefix cache do not name each other")
        if unknown := [block for block in self._idle if block not in self._hash_of]:
            raise AssertionError(f"idle blocks {unknown} can't be found by any digest")
