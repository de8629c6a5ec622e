"""Memory that a client shares: regions it names once, and tensors in them by offset.

A region is mapped from when it is registered until it is unregistered and the last request
that uses it has ended; until then it is there for that request alone.

Source: Triton's shared memory extension; ``shm_open(3)``.
"""

import mmap
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from disconnect_watch.errors import cut, shown
from disconnect_watch.server.errors import (
    ModelNotFoundError,
    ProtocolError,
    UnsupportedError,
)

__all__ = ["Loan", "Region", "SharedMemory"]

#: Where Linux keeps what ``shm_open`` makes.
ROOT = Path("/dev/shm")
RESERVED = "triton_python_backend_shm_region_"


@dataclass(slots=True)
class Region:
    """One registered region.

    Attributes:
        is_registered: false once only requests keep it.
    """

    name: str
    key: str
    offset: int
    size_bytes: int
    memory: mmap.mmap
    is_registered: bool = True

    def close_if_unused(self) -> None:
        """Unmap it, unless a request still has a view of it, or a model has kept an array."""
        if not self.is_registered:
            with suppress(BufferError):
                self.memory.close()


class Loan:
    """A part of a region, for one request.

    Attributes:
        view: writable.
    """

    __slots__ = ("_region", "view")

    def __init__(self, region: Region, offset: int, size_bytes: int) -> None:
        start = region.offset + offset
        self.view = memoryview(region.memory)[start : start + size_bytes]
        self._region = region

    def close(self) -> None:
        """Give it back. Idempotent."""
        self.view = memoryview(b"")
        self._region.close_if_unused()


class SharedMemory:
    """The regions that clients have registered.

    Args:
        is_allowed: whether they may; else everything is answered 501.

    Threads: the loop's only.
    """

    def __init__(self, *, is_allowed: bool = False) -> None:
        self._is_allowed = is_allowed
        self._regions: dict[str, Region] = {}

    def register(self, name: str, key: str, offset: int, size_bytes: int) -> None:
        """Map a region of an object that the client made with ``shm_open``.

        Raises:
            ProtocolError: there is none, or it is too small, or the name is taken.
        """
        self.require_allowed()
        if name.startswith(RESERVED):
            raise ProtocolError(
                f"cannot register shared memory region '{cut(name)}': names that begin with "
                f"'{RESERVED}' are reserved"
            )
        if name in self._regions:
            raise ProtocolError(f"shared memory region '{cut(name)}' already in manager")
        if not size_bytes:
            raise ProtocolError(
                f"cannot register shared memory region '{cut(name)}': its 'byte_size' is 0"
            )
        memory = _map(name, key, offset + size_bytes)
        self._regions[name] = Region(name, key, offset, size_bytes, memory)

    def unregister(self, name: str | None) -> None:
        """Forget a region, or all of them; one that is not there is no error."""
        self.require_allowed()
        names = list(self._regions) if name is None else [name]
        for each in names:
            region = self._regions.pop(each, None)
            if region is not None:
                region.is_registered = False
                region.close_if_unused()

    def status(self, name: str | None) -> list[Region]:
        """The regions, or the one of this name."""
        self.require_allowed()
        if name is None:
            return list(self._regions.values())
        if name not in self._regions:
            raise ModelNotFoundError(f"Unable to find system shared memory region: '{cut(name)}'")
        return [self._regions[name]]

    def borrow(self, name: str, offset: int, size_bytes: int) -> Loan:
        """A part of a region for a request, to be closed with it."""
        self.require_allowed()
        region = self._regions.get(name)
        if region is None:
            raise ProtocolError(f"Unable to find shared memory region: '{cut(name)}'")
        if offset >= region.size_bytes:
            raise ProtocolError(f"Invalid offset for shared memory region: '{cut(name)}'")
        if offset + size_bytes > region.size_bytes:
            raise ProtocolError(
                f"Invalid offset + byte size for shared memory region: '{cut(name)}'"
            )
        return Loan(region, offset, size_bytes)

    def close(self) -> None:
        """Forget all regions."""
        if self._is_allowed:
            self.unregister(None)

    def require_allowed(self) -> None:
        """Raise unless clients may share memory."""
        if not self._is_allowed:
            raise UnsupportedError(
                "Client shared memory is disabled. Start the server with "
                "'--allow-client-shm' to enable."
            )


def _map(name: str, key: str, size_bytes: int) -> mmap.mmap:
    file = key.removeprefix("/")
    # A key with a slash within would be a path out of where shared memory is.
    if not file or "/" in file or "\0" in file or file in (".", ".."):
        raise ProtocolError(
            f"cannot register shared memory region '{cut(name)}': its 'key' is {shown(key)}, "
            "it must be '/' and a name"
        )
    prefix = f"Unable to open shared memory region: '{cut(name)}'"
    try:
        fd = os.open(ROOT / file, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise ProtocolError(f"{prefix}, key {shown(key)}: {error.strerror}") from None
    try:
        if (there := os.fstat(fd).st_size) < size_bytes:
            raise ProtocolError(
                f"{prefix}, key {shown(key)}: 'offset' and 'byte_size' make {size_bytes} bytes, "
                f"it has {there}"
            )
        return mmap.mmap(fd, size_bytes)
    except (OSError, OverflowError, ValueError) as error:
        raise ProtocolError(f"{prefix}, key {shown(key)}: {error}") from None
    finally:
        os.close(fd)
