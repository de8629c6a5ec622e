"""Telling a loop that some flag was set, without a word of each request's.

A request's token is looked at when the request moves; while it rests, in a queue or in a
model, nobody looks. One thread sleeps on the flag table's doorbell for all of them, and
has the loop look through what rests when it rang. So a request that is not cancelled pays
nothing, and one that is costs a look at each that rests.
"""

import asyncio
import threading
from collections.abc import Callable

from disconnect_watch.token import flag_table

__all__ = ["Sweeper"]


class Sweeper:
    """Calls functions on a loop soon after any token of this process group was cancelled.

    Threads: the loop's only; functions are called there.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._sweeps: list[Callable[[], None]] = []
        self._table = flag_table()
        self._is_closed = False
        self._is_due = False
        self._thread = threading.Thread(
            target=self._run, name="disconnect-watch-sweeper", daemon=True
        )
        self._thread.start()

    def add(self, sweep: Callable[[], None]) -> None:
        """Call ``sweep`` from now on."""
        self._sweeps.append(sweep)

    def remove(self, sweep: Callable[[], None]) -> None:
        """Call ``sweep`` no more."""
        self._sweeps.remove(sweep)

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._is_closed = True
        self._table.ring()
        self._thread.join()

    def _run(self) -> None:
        seen = self._table.bell()
        while not self._is_closed:
            self._table.wait_bell(seen, -1)
            seen = self._table.bell()
            if not self._is_due and not self._is_closed:
                self._is_due = True
                try:
                    self._loop.call_soon_threadsafe(self._sweep)
                except RuntimeError:  # the loop was closed, and with it whoever waits on it
                    return

    def _sweep(self) -> None:
        self._is_due = False  # before the look, so that a flag set meanwhile is not missed
        for sweep in tuple(self._sweeps):
            sweep()
