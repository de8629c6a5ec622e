"""The queue of those who wait, in the order in which they are to run."""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator

from disconnect_watch.engine.request import Request

__all__ = ["WaitingQueue"]


class WaitingQueue:
    """Waiting requests by priority, the lowest number first, and by arrival within one.

    Any member can leave in constant time, whatever its place: that is what a thousand clients
    that leave at once come down to.
    """

    def __init__(self) -> None:
        self._levels: dict[int, OrderedDict[str, Request]] = {}
        self._priorities: list[int] = []
        self._num_requests = 0

    def __len__(self) -> int:
        return self._num_requests

    def __iter__(self) -> Iterator[Request]:
        for priority in self._priorities:
            yield from self._levels[priority].values()

    @property
    def head(self) -> Request:
        """Who is next; there must be one."""
        return next(iter(self._levels[self._priorities[0]].values()))

    def add(self, request: Request) -> None:
        """Take in one that arrives, behind all others of its priority."""
        self._level_of(request)[request.key] = request
        self._num_requests += 1

    def put_back(self, request: Request) -> None:
        """Take in one that has run before, in front of all others of its priority."""
        self.add(request)
        self._levels[request.priority].move_to_end(request.key, last=False)

    def remove(self, request: Request) -> None:
        """Take one out, wherever it is."""
        level = self._levels[request.priority]
        del level[request.key]
        self._num_requests -= 1
        if not level:
            del self._levels[request.priority]
            del self._priorities[bisect_left(self._priorities, request.priority)]

    def _level_of(self, request: Request) -> OrderedDict[str, Request]:
        level = self._levels.get(request.priority)
        if level is None:
            level = self._levels[request.priority] = OrderedDict()
            insort(self._priorities, request.priority)
        return level
