"""Clients that leave when it is their time, whatever the engine is doing then."""

import heapq
import threading
import time
from types import TracebackType
from typing import Self

from disconnect_watch import CancelToken

__all__ = ["Leavers"]

#: How exactly the time of an ack is known.
ACK_POLL_SECONDS = 1e-4


class Leavers:
    """A thread that cancels each token when its client leaves, and waits for acks if asked to."""

    def __init__(self, *, waits_for_ack: bool) -> None:
        self._waits_for_ack = waits_for_ack
        self._due: list[tuple[float, int, CancelToken]] = []
        self._unacked: list[tuple[float, CancelToken]] = []
        self._changed = threading.Condition()
        self._is_closed = False
        self.reusable_ms: list[float] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def add(self, at: float, token: CancelToken) -> None:
        """Have a token cancelled at that time, by ``time.perf_counter``."""
        with self._changed:
            heapq.heappush(self._due, (at, id(token), token))
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                now = time.perf_counter()
                wait = self._due[0][0] - now if self._due else None
                if self._is_closed and not self._unacked:
                    return
                if not self._unacked and (wait is None or wait > 0):
                    self._changed.wait(wait)
                    continue
                if self._unacked:
                    # No spin: the engine's own thread needs the GIL.
                    self._changed.wait(ACK_POLL_SECONDS)
                due = self._due[0][2] if wait is not None and wait <= 0 else None
                if due is not None:
                    heapq.heappop(self._due)
            if due is not None and due.cancel() and self._waits_for_ack:
                self._unacked.append((time.perf_counter(), due))
            for entry in [e for e in self._unacked if e[1].acked or self._is_closed]:
                if entry[1].acked:
                    self.reusable_ms.append((time.perf_counter() - entry[0]) * 1e3)
                self._unacked.remove(entry)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()
