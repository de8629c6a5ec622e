"""The book of retained blocks: who holds which, what pins them, how they were let go.

It calls nobody and takes no lock; ``RetainedStore`` does both around it.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from disconnect_watch.disagg.pins import Pin
from disconnect_watch.disagg.records import (
    Direction,
    ReleaseKind,
    RetainedStats,
    Transfer,
    TransferView,
)
from disconnect_watch.disagg.remembered import Remembered

__all__ = ["Entry", "Ledger"]

#: Seconds, of ``RetainedStats.leases_by_age``.
AGES = (0.05, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0, float("inf"))


@dataclass(slots=True)
class Entry:
    """A transfer that holds blocks.

    Attributes:
        heard_ns: when its holder was last heard of.
        deadline_ns: when the store next looks at it if nobody is.
        is_used: its one pull has begun.
        released: which way it was let go, if pins alone keep it.
        released_ns: since when nobody wants the blocks; for a lease, since nobody was heard of.
    """

    transfer: Transfer
    blocks: Sequence[int]
    retained_ns: int
    heard_ns: int
    deadline_ns: int
    is_used: bool = False
    pins: set[Pin] = field(default_factory=set)
    released: ReleaseKind | None = None
    released_ns: int = 0

    def held_ns(self, now: int) -> int:
        return (now - self.retained_ns) * self.transfer.num_blocks

    def stranded_ns(self, now: int) -> int:
        return 0 if self.released is None else (now - self.released_ns) * self.transfer.num_blocks


class Ledger:
    """The entries of one store, and what is remembered of those that ended.

    Attributes:
        num_blocks: that all entries hold.
    """

    def __init__(self) -> None:
        self.num_blocks = 0
        self.remembered = Remembered()
        self._entries: dict[str, Entry] = {}
        self._by_request: dict[tuple[str, str], set[str]] = {}
        self._num_released: Counter[ReleaseKind] = Counter()
        self._block_ns = 0
        self._stranded_block_ns = 0

    def __iter__(self) -> Iterator[Entry]:
        return iter(list(self._entries.values()))

    def add(self, entry: Entry) -> None:
        transfer = entry.transfer
        self._entries[transfer.id] = entry
        request = (transfer.owner, transfer.meta.request_id)
        self._by_request.setdefault(request, set()).add(transfer.id)
        self.num_blocks += transfer.num_blocks

    def find(self, transfer_id: str) -> Entry | None:
        """Return the entry of a transfer, released or not."""
        return self._entries.get(transfer_id)

    def retained(self, transfer_id: str, owner: str) -> Entry | None:
        """Return what an owner may still have; what is another's is as unknown as what is not."""
        entry = self._entries.get(transfer_id)
        if entry is None or entry.transfer.owner != owner or entry.released is not None:
            return None
        return entry

    def named(self, name: str, owner: str) -> list[Entry]:
        """Return what is not yet released of the transfer, or of the request, of that name."""
        ids = [name, *sorted(self._by_request.get((owner, name), ()))]
        return [entry for each in ids if (entry := self.retained(each, owner)) is not None]

    def let_go(self, entry: Entry, kind: ReleaseKind, now: int) -> bool:
        """Release an entry unless it is, and take it out unless something pins it.

        Returns:
            Whether its blocks are to be freed.
        """
        transfer = entry.transfer
        if entry.released is None:
            entry.released = kind
            entry.released_ns = entry.heard_ns if kind is ReleaseKind.LEASE else now
            self.count(transfer, kind)
        if entry.pins:
            return False
        del self._entries[transfer.id]
        request = (transfer.owner, transfer.meta.request_id)
        siblings = self._by_request[request]
        siblings.discard(transfer.id)
        if not siblings:
            del self._by_request[request]
        self.num_blocks -= transfer.num_blocks
        self._block_ns += entry.held_ns(now)
        self._stranded_block_ns += entry.stranded_ns(now)
        return True

    def count(self, transfer: Transfer, kind: ReleaseKind) -> None:
        """Note that a transfer was released, and remember it by both of its names."""
        self._num_released[kind] += 1
        for name in (transfer.id, transfer.meta.request_id):
            self.remembered.end((transfer.owner, name), kind)

    def view(self, now: int) -> tuple[TransferView, ...]:
        return tuple(
            TransferView(
                id=entry.transfer.id,
                owner=entry.transfer.owner,
                request_id=entry.transfer.meta.request_id,
                num_blocks=entry.transfer.num_blocks,
                age_ns=now - entry.retained_ns,
                lease_left_ns=entry.deadline_ns - now,
                num_pins=_by_direction(entry.pins),
                is_used=entry.is_used,
                released=entry.released,
            )
            for entry in self
        )

    def stats(self, now: int) -> RetainedStats:
        ages = [(now - entry.retained_ns) / 1e9 for entry in self]
        return RetainedStats(
            num_transfers=len(ages),
            num_blocks=self.num_blocks,
            num_pinned_blocks=sum(entry.transfer.num_blocks for entry in self if entry.pins),
            num_tombstones=self.remembered.num_tombstones,
            leases_by_age=tuple((bound, sum(age <= bound for age in ages)) for bound in AGES),
            num_released=MappingProxyType({kind: self._num_released[kind] for kind in ReleaseKind}),
            block_ns=self._block_ns + sum(entry.held_ns(now) for entry in self),
            stranded_block_ns=self._stranded_block_ns
            + sum(entry.stranded_ns(now) for entry in self),
        )


def _by_direction(pins: set[Pin]) -> tuple[int, int]:
    num_sending = sum(pin.direction is Direction.SEND for pin in pins)
    return num_sending, len(pins) - num_sending
