"""What a store knows of transfers that are not there: those that ended, and those let go early."""

from collections import OrderedDict
from typing import TypeVar

from disconnect_watch.disagg.records import ReleaseKind

__all__ = ["Remembered"]

#: A tombstone waits for a prefill that may be long in a queue; if it were not there, the lease
#: would free the blocks all the same.
TOMBSTONE_NS = 600 * 10**9
#: Names of each kind; the oldest are forgotten first.
MAX_NAMES = 1 << 16

Value = TypeVar("Value")

#: Owner and id, of a transfer or a request.
Name = tuple[str, str]


class Remembered:
    """Bounded, whatever is released by whomever. Threads: one at a time."""

    def __init__(self) -> None:
        self._ended: OrderedDict[Name, ReleaseKind] = OrderedDict()
        self._tombstones: OrderedDict[Name, tuple[int, ReleaseKind]] = OrderedDict()

    @property
    def num_tombstones(self) -> int:
        return len(self._tombstones)

    def end(self, name: Name, kind: ReleaseKind) -> None:
        """Note how what has that name was released."""
        _put(self._ended, name, kind)

    def kind_of(self, name: Name) -> ReleaseKind | None:
        """Return how it was released; None if it is not known to have been there."""
        return self._ended.get(name)

    def bury(self, name: Name, kind: ReleaseKind, now: int) -> None:
        """Leave a tombstone for what has not come yet."""
        _put(self._tombstones, name, (now + TOMBSTONE_NS, kind))

    def take_tombstone(self, name: Name, now: int) -> ReleaseKind | None:
        """Remove the tombstone for what comes now, and return how it was released."""
        until, kind = self._tombstones.pop(name, (now, ReleaseKind.ABORT))
        return kind if until > now else None

    def expire(self, now: int) -> None:
        """Remove tombstones that nothing came for."""
        while self._tombstones:
            until, _ = next(iter(self._tombstones.values()))
            if until > now:
                return
            self._tombstones.popitem(last=False)


def _put(table: "OrderedDict[Name, Value]", key: Name, value: Value) -> None:
    table.pop(key, None)  # the newest is last
    table[key] = value
    if len(table) > MAX_NAMES:
        table.popitem(last=False)
