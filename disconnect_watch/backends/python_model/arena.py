"""Memory that a server and one worker process share, for tensors too large for a message.

It is a sparse memfd, mapped whole by both and never grown: an address costs nothing until
it is written to. Each side hands out blocks of its own half, so neither needs a lock of
the other's. Who receives a block says when nothing of its own refers to it any more; until
then it is not used again, whatever has become of the request that it came with.
"""

import mmap
import os
import threading
from collections import defaultdict, deque
from typing import Any, Self

import numpy as np

__all__ = ["Arena", "Block"]

#: Of addresses, on each side.
HALF_BYTES = 1 << 36
#: Free memory that is kept for the next tensor; what is more goes back to the system.
MAX_IDLE_BYTES = 1 << 27
PAGE_BYTES = mmap.PAGESIZE


class Block:
    """A block that the other side lent us, for as long as an array of it is alive.

    ``np.asarray(block)`` is an array over its bytes, which keeps it.
    """

    __slots__ = ("__array_interface__", "_arena", "_mapping", "_offset")

    def __init__(self, arena: "Arena", mapping: mmap.mmap, offset: int, size_bytes: int) -> None:
        self.__array_interface__ = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (arena.address + offset, False),
            "version": 3,
        }
        self._arena = arena
        self._mapping = mapping
        self._offset = offset

    def __del__(self) -> None:
        # On whichever thread, in the middle of whatever: no lock may be taken here.
        self._arena.returned.append(self._offset)


class Arena:
    """One side's view of the memory.

    Args:
        is_server: whose half is the lower one.
        memfd: of the server's arena; None makes a new one. A duplicate is kept.

    Attributes:
        returned: offsets of the other side's blocks that are not used here any more, to be
            told to it with the next message.

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
        with self._lock:
            return len(self._sizes)

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

    def allocate(self, size_bytes: int) -> int:
        """Take a block of at least that size; returns its offset.

        Raises:
            MemoryError: no address is left.
        """
        size = max(PAGE_BYTES, 1 << (size_bytes - 1).bit_length())
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
                if offset + size > self._end:
                    raise MemoryError(f"no room for a tensor of {size_bytes} bytes")
                self._top += size
            self._sizes[offset] = size
            return offset

    def take_back(self, offsets: Any) -> None:
        """The other side, or nobody, uses these blocks of ours any more."""
        with self._lock:
            for offset in offsets:
                size = self._sizes.pop(offset)
                if self._idle_bytes + size > MAX_IDLE_BYTES:
                    self._mapping().madvise(mmap.MADV_REMOVE, offset, size)
                    self._cold.add(offset)
                    self._free[size].insert(0, offset)
                else:
                    self._idle_bytes += size
                    self._free[size].append(offset)

    def borrow(self, offset: int, size_bytes: int) -> "np.ndarray[Any, Any]":
        """An array over a block of the other side's, which is returned with its last view."""
        return np.asarray(Block(self, self._mapping(), offset, size_bytes))

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
