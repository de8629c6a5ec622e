"""The timer of the leases: a thread of its own, so that they run out when nothing else happens."""

import logging
import threading
import time
from types import TracebackType
from typing import Self

from disconnect_watch.disagg.retained import RetainedStore

__all__ = ["Reaper"]

_logger = logging.getLogger("disconnect_watch.disagg")


class Reaper:
    """Calls ``store.reap`` when a lease runs out, until it is closed.

    It needs no word of a new transfer: it sleeps for at most one lease, and none that begins
    meanwhile ends before. The store's clock must be ``time.monotonic_ns``.
    """

    def __init__(self, store: RetainedStore) -> None:
        self._store = store
        self._is_closed = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name="disconnect-watch-reaper", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """End the thread; leases run out no more. Idempotent."""
        self._is_closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_closed.wait(self._seconds_to_sleep()):
            try:
                self._store.reap()
            except Exception:
                # Whoever was given blocks back failed; the leases of others run out all the same.
                _logger.exception("reap")

    def _seconds_to_sleep(self) -> float:
        deadline = self._store.next_deadline()
        lease_ns = self._store.lease_ns
        left_ns = lease_ns if deadline is None else deadline - time.monotonic_ns()
        return max(0, min(left_ns, lease_ns)) / 1e9

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
