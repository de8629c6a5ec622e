"""How many connections there may be, in all and from one address.

A server without a file descriptor left can't accept, and libuv then closes whoever knocks
(its "EMFILE trick"). So accepting ends before: who comes then waits in the kernel's
queue, and is served once another has left.
"""

import logging
import os
import resource
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["TOO_MANY", "Crowd", "num_connections_possible"]

#: Kept for all else: files of models, the store, sockets to workers, other ports.
RESERVED_FDS = 64

_BODY = b'{"error":"too many connections from this address"}'
#: What a client is told that has too many.
TOO_MANY = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\n"
    b"connection: close\r\ncontent-length: %d\r\n\r\n%b" % (len(_BODY), _BODY)
)

logger = logging.getLogger("disconnect_watch.server")


def num_connections_possible() -> int:
    """As many as this process may still open file descriptors, less some for all else."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(1, soft - len(os.listdir("/dev/fd")) - RESERVED_FDS)


class Crowd:
    """Counts connections.

    Args:
        limit: of all; None for no limit.
        limit_per_address: of one IP address; None for no limit.

    Attributes:
        is_full: whether the last place is taken.
        on_full: called when the last place is taken.
        on_room: called when one is free again.

    Threads: the loop's only.
    """

    def __init__(self, limit: int | None = None, limit_per_address: int | None = None) -> None:
        self._limit = limit
        self._limit_per_address = limit_per_address
        self._by_address: Counter[str] = Counter()
        self._num_open = 0
        self.is_full = False
        self._is_told = False
        self.on_full: Callable[[], None] = _nothing
        self.on_room: Callable[[], None] = _nothing

    def enter(self, address: str | None) -> bool:
        """Count one more; False if its address has too many already.

        Args:
            address: None for a Unix socket, which has none. Who is let in has to ``leave``.
        """
        if address is not None and self._limit_per_address is not None:
            if self._by_address[address] >= self._limit_per_address:
                return False
            self._by_address[address] += 1
        self._num_open += 1
        if not self.is_full and self._limit is not None and self._num_open >= self._limit:
            self.is_full = True
            if not self._is_told:
                self._is_told = True
                logger.warning(
                    "accepting no more connections until some have ended; raise "
                    "--max-connections or the limit on open files",
                    extra={"num_connections": self._num_open},
                )
            self.on_full()
        return True

    def leave(self, address: str | None) -> None:
        """One that was let in has ended."""
        if address is not None and self._limit_per_address is not None:
            self._by_address[address] -= 1
            if not self._by_address[address]:
                del self._by_address[address]
        self._num_open -= 1
        if self.is_full:
            self.is_full = False
            self.on_room()
        elif self._limit is not None and self._num_open < self._limit // 2:
            self._is_told = False  # where it stays full, once is enough


def _nothing() -> None:
    pass
