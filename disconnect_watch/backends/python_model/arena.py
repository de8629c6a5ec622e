"""Memory that a server and one worker process share, for tensors too large for a message.

It is a sparse memfd, mapped whole by both and never grown: an address costs nothing until
it is written to. Each side hands out blocks of its own half, so neither needs a lock of
the other's. Who receives a block says when nothing of its own refers to it any more; until
then it is not used again, whatever has become of the request that it came with. What is
received from elsewhere can be read straight into a block (``room``); tensors that lie in such
a one are told of and not copied, and it is free when this side, too, has no view of it.
"""

import mmap
import os
import threading
from collections import defaultdict, deque
from typing import Any, Self

import numpy as np

__all__ = ["Arena", "Block", "Room"]

#: Of addresses, on each side.
HALF_BYTES = 1 << 36
#: Free memory that is kept for the next tensor; what is more goes back to the system.
MAX_IDLE_BYTES = 1 << 27
PAGE_BYTES = mmap.PAGESIZE


def _bytes_at(address: int, size_bytes: int) -> dict[str, Any]:
    return {"shape": (size_bytes,), "typestr": "|u1", "data": (address, False), "version": 3}


class Block:
    """A block that the other side lent us, for as long as an array of it is alive.

    ``np.asarray(block)`` is an array over its bytes, which keeps it.
    """

    __slots__ = ("__array_interface__", "_arena", "_block", "_mapping")

    def __init__(
        self, arena: "Arena", mapping: mmap.mmap, block: int, offset: int, size_bytes: int
    ) -> None:
        self.__array_interface__ = _bytes_at(arena.address + offset, size_bytes)
        self._arena = arena
        self._mapping = mapping
        self._block = block

    def __del__(self) -> None:
        # On whichever thread, in the middle of whatever: no lock may be taken here.
        self._arena.returned.append(self._block)


class Room:
    """A block of our own, for as long as an array of it is alive here or on the other side.

    Attributes:
        offset: of the block.
    """

    __slots__ = ("__array_interface__", "_mapping", "arena", "offset")

    def __init__(self, arena: "Arena", mapping: mmap.mmap, offset: int, size_bytes: int) -> None:
        self.__array_interface__ = _bytes_at(arena.address + offset, size_bytes)
        self.arena = arena
        self.offset = offset
        self._mapping = mapping

    def __del__(self) -> None:
        # As a block of the other side's: no lock may be taken here.
        self.arena.left.append(self.offset)


class Arena:
    """One side's view of the memory.

    Args:
        is_server: whose half is the lower one.
        memfd: of the server's arena; None makes a new one. A duplicate is kept.

    Attributes:
        returned: offsets of the other side's blocks that are not used here any more, to be
            told to it with the next message.
        left: offsets of our own blocks that are not used on this side any more.

    Threads: any.
    """

    def __init__(self, *, is_server: bool, memfd: int | None = None) -> None:
        own = os.memfd_create("disconnect-watch-tensors") if memfd is None else os.dup(memfd)
        try:
            if memfd is None:
                os.ftruncate(own, 2 * HALF_BYTES)
            self._map: mmap.mmap | None = mmap.mmap(own, 2 * HALF_BYTES)
        finally:
            if memfd is not None:
                os.close(own)
        self.memfd = own if memfd is None else -1
        self.address = int(np.frombuffer(self._map, np.uint8).ctypes.data)
        self._start = 0 if is_server else HALF_BYTES
        self._end = self._start + HALF_BYTES
        self._top = self._start
        self._lock = threading.Lock()
        self._sizes: dict[int, int] = {}
        self._free: defaultdict[int, list[int]] = defaultdict(list)
        self._cold: set[int] = set()
        self._idle_bytes = 0
        self.returned: deque[int] = deque()
        self.left: deque[int] = deque()
        # Of rooms: how many have each, ourselves and tensors on the other side.
        self._holders: dict[int, int] = {}

    def close_memfd(self) -> None:
        """Close the fd, once the other side has it; the mapping stays while it is used."""
        if self.memfd >= 0:
            os.close(self.memfd)
            self.memfd = -1

    def release(self) -> None:
        """The other side is gone: let go of the memory, but for what is borrowed of it still."""
        with self._lock:
            self._map = None

    @property
    def num_used(self) -> int:
        """Blocks of our own that are handed out."""
        self._take_back_left()
        with self._lock:
            return len(self._sizes)

    def room(self, size_bytes: int) -> "np.ndarray[Any, Any]":
        """A new block as an array, which may be lent to the other side; see ``find``.

        Raises:
            MemoryError: no address is left, or the other side is gone.
        """
        mapping = self._mapping()
        offset = self.allocate(size_bytes, end=self._start + HALF_BYTES // 2)
        with self._lock:
            self._holders[offset] = 1
        return np.asarray(Room(self, mapping, offset, size_bytes))

    def find(self, data: Any) -> tuple[int, int] | None:
        """Where bytes lie that are in a room of ours: its offset, and theirs; None elsewhere.

        The other side has it then, too, until it gives the room's offset back.
        """
        if not isinstance(data, memoryview):
            return None
        owner: Any = data.obj
        while isinstance(owner, np.ndarray):
            owner = owner.base
        if not isinstance(owner, Room) or owner.arena is not self:
            return None
        with self._lock:
            self._holders[owner.offset] += 1
        start: int = np.frombuffer(data, np.uint8).__array_interface__["data"][0]
        return owner.offset, start - self.address

    def put(self, data: Any) -> int:
        """Copy bytes into a new block; returns its offset.

        Raises:
            MemoryError: no address is left, or the other side is gone.
        """
        view = memoryview(data).cast("B")
        offset = self.allocate(view.nbytes)
        self._mapping()[offset : offset + view.nbytes] = view
        return offset

    def _mapping(self) -> mmap.mmap:
        mapping = self._map
        if mapping is None:
            raise MemoryError("no room for a tensor, the process that it is for has ended")
        return mapping

    def allocate(self, size_bytes: int, *, end: int | None = None) -> int:
        """Take a block of at least that size; returns its offset.

        Args:
            end: of what may be used for it. Whoever only announces a tensor gets some of the
                addresses, so that there are others for those that have come.

        Raises:
            MemoryError: no address is left.
        """
        size = max(PAGE_BYTES, 1 << (size_bytes - 1).bit_length())
        self._take_back_left()
        with self._lock:
            free = self._free[size]
            if free:
                offset = free.pop()
                if offset in self._cold:
                    self._cold.discard(offset)
                else:
                    self._idle_bytes -= size
            else:
                offset = self._top
                if offset + size > (self._end if end is None else end):
                    raise MemoryError(f"no room for a tensor of {size_bytes} bytes")
                self._top += size
            self._sizes[offset] = size
            return offset

    def take_back(self, offsets: Any) -> None:
        """The other side does not use these blocks of ours any more."""
        with self._lock:
            for offset in offsets:
                if offset in self._holders:
                    self._holders[offset] -= 1
                    if self._holders[offset]:
                        continue
                    del self._holders[offset]
                size = self._sizes.pop(offset)
                mapping = self._map
                if mapping is None:
                    continue  # nobody asks for another block
                if self._idle_bytes + size > MAX_IDLE_BYTES:
                    mapping.madvise(mmap.MADV_REMOVE, offset, size)
                    self._cold.add(offset)
                    self._free[size].insert(0, offset)
                else:
                    self._idle_bytes += size
                    self._free[size].append(offset)

    def _take_back_left(self) -> None:
        while self.left:
            self.take_back((self.left.popleft(),))

    def borrow(
        self, offset: int, size_bytes: int, *, block: int | None = None
    ) -> "np.ndarray[Any, Any]":
        """An array over bytes in a block of the other side's, which is returned with its last view.

        Args:
            block: where the block begins; None for at ``offset``.
        """
        block = offset if block is None else block
        return np.asarray(Block(self, self._mapping(), block, offset, size_bytes))

    def drain_returned(self) -> list[int]:
        """The offsets that are to be told to the other side, each once."""
        offsets = []
        while self.returned:
            offsets.append(self.returned.popleft())
        return offsets

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close_memfd()
