"""Cancels that should have had their effect by now, and those that had it too late."""

import time
from collections.abc import Callable, Iterable

from disconnect_watch.engine import Outcome
from disconnect_watch.server.running import Running
from disconnect_watch.token import CancelToken

__all__ = ["Overdue"]


class Overdue:
    """What readiness and an alarm are decided by. Nothing is timed: it is looked at when asked.

    Args:
        bound: seconds from a cancel to its effect.
        clock: nanoseconds, as of ``time.monotonic_ns``.

    Attributes:
        num_late: cancels that had their effect, and had it behind the bound.

    Threads: the loop's only.
    """

    def __init__(self, bound: float, *, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self.num_late = 0
        self._bound_ns = int(bound * 1e9)
        self._clock = clock
        # Nobody reads their outputs any more, and their work goes on.
        self._left: set[Running] = set()

    def ended(self, outcome: Outcome) -> None:
        """Take how some work ended."""
        if (
            outcome.kind == "cancelled"
            and outcome.freed_at_ns - outcome.flag_at_ns > self._bound_ns
        ):
            self.num_late += 1

    def left(self, running: Running) -> None:
        """Look after what was closed before its end."""
        self._left = {each for each in self._left if not each.is_over}
        if not running.is_over:
            self._left.add(running)

    def num_overdue(
        self,
        live: Iterable[Running],
        tokens: Iterable[CancelToken],
        unheeded: Iterable[int] = (),
    ) -> int:
        """How many cancels are beyond the bound now.

        Args:
            live: work of engines that somebody waits for.
            tokens: of other work.
            unheeded: when work was cancelled that goes on all the same.
        """
        asked_at = [
            *(each.due_at_ns for each in (*live, *self._left) if not each.is_over),
            *(token.cancelled_at_ns for token in tokens if token.cancelled),
            *unheeded,
        ]
        limit_ns = self._clock() - self._bound_ns
        return sum(0 < at_ns < limit_ns for at_ns in asked_at)
