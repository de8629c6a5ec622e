"""Whether any live request is to end: asked at every step and before every layer.

Nearly every time the answer is no, so that is what has to be cheap: one call in C over the words
of all flags, and one comparison for all deadlines, whatever the number of requests. Within a step
only those that run can be dropped, so before a layer the flags of those that wait are left out.
Only when the answer is yes does the step loop ask each request.
"""

from collections.abc import Callable
from heapq import heapify, heappop, heappush

from disconnect_watch.engine.request import Request
from disconnect_watch.token import FlagSet, Reason

__all__ = ["CancelScan"]

#: Deadlines of requests that have ended are thrown away when they are more than the others and
#: this: a request may end an hour before its time is over.
MAX_OLD_DEADLINES = 64


class CancelScan:
    """The flags and deadlines of all live requests.

    Args:
        running: the flags of those that run, kept by whoever admits and preempts them.

    Threads: the one that steps the engine. Flags may be set by any meanwhile.
    """

    def __init__(self, running: FlagSet) -> None:
        self._flags = FlagSet()
        self._running = running
        # By deadline, then in the order of arrival here, so that requests are never compared.
        self._deadlines: list[tuple[int, int, Request]] = []
        self._num_live_deadlines = 0
        self._num_added = 0

    def add(self, request: Request) -> None:
        """Take in a request, once for all its siblings: they are cancelled together."""
        for flag in request.flags:
            self._flags.add(flag)
        if request.deadline_ns is not None:
            self._num_added += 1
            self._num_live_deadlines += 1
            heappush(self._deadlines, (request.deadline_ns, self._num_added, request))

    def remove(self, request: Request) -> None:
        """Forget a request that has ended, with all its siblings."""
        for flag in request.flags:
            self._flags.remove(flag)
        if request.deadline_ns is not None:
            self._num_live_deadlines -= 1
            if len(self._deadlines) > 2 * self._num_live_deadlines + MAX_OLD_DEADLINES:
                # The outcome, not the status: it may have siblings that live on.
                self._deadlines = [e for e in self._deadlines if e[2].outcome is None]
                heapify(self._deadlines)

    def has_fired(self, clock: Callable[[], int]) -> bool:
        """Whether a request is cancelled; those whose time is over by ``clock`` are, from now on.

        It stays so until they were all removed.
        """
        self._mark_late(clock)
        return self._flags.any_fired()

    def has_running_fired(self, clock: Callable[[], int]) -> bool:
        """The same of those that run: what a step that is under way can still act upon."""
        self._mark_late(clock)
        return self._running.any_fired()

    def _mark_late(self, clock: Callable[[], int]) -> None:
        if self._deadlines:
            now_ns = clock()
            while self._deadlines and self._deadlines[0][0] <= now_ns:
                heappop(self._deadlines)[2].mark_cancelled(Reason.DEADLINE)
