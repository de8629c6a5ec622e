"""Blocks that a prefill node keeps for a decode node, and every way to be rid of them.

A transfer is in one of four states::

    retained ──begin_pull──► pulled ──finish, abort──► ended
       │                        │
       └──release, lease──► ended       release, lease ──► released ──last pin──► ended

*retained*: somebody may pull it, once. *pulled*: a copy is under way, and the blocks are pinned.
*released*: let go, but pinned still; whoever copies was told. *ended*: the blocks are free; of the
transfer no more is known than that it was there.

Rules:

- Blocks go to ``on_free`` exactly once, and only when the last pin of either direction is gone.
- Whatever is retained has a lease that runs out, so that nobody has to remember it. Whoever holds
  it renews the lease by being heard of; a release takes that right away.
- A release may come twice, late, or before what it releases. An early one leaves a tombstone under
  owner and request id, which the next ``retain`` of both finds.
- An id is good for one pull. It names the incarnation of the store, which no other store has, so
  that a node that was started anew serves nothing of what it promised before.
"""

import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from disconnect_watch.disagg.errors import (
    RetainedFullError,
    TransferUsedError,
    UnknownTransferError,
)
from disconnect_watch.disagg.ledger import Entry, Ledger
from disconnect_watch.disagg.pins import Pin, Pull
from disconnect_watch.disagg.records import (
    Direction,
    Released,
    ReleaseKind,
    ReleaseOutcome,
    RetainedStats,
    Transfer,
    TransferMeta,
    TransferView,
)
from disconnect_watch.errors import ClosedError, cut

__all__ = ["RetainedStore"]


def _nobody() -> None:
    """Whom to tell of a release where nobody asked."""


class RetainedStore:
    """The retained blocks of one node, from its start to its end.

    Args:
        capacity: blocks that may be retained at once.
        lease_ns: for how long a transfer stays when its holder is not heard of.
        clock: nanoseconds, monotonic.
        on_free: is given the blocks, the very object that ``retain`` got, when nobody may copy
            them any more. It is called with no lock held, by whichever thread ended the transfer,
            and must not block.

    Attributes:
        incarnation: 64 random bits in hex, which all ids of this store begin with.

    Threads: any.
    """

    def __init__(
        self,
        capacity: int,
        lease_ns: int,
        clock: Callable[[], int] = time.monotonic_ns,
        on_free: Callable[[Sequence[int]], object] = lambda blocks: None,
    ) -> None:
        if capacity < 0 or lease_ns <= 0:
            raise ValueError(
                f"store for {capacity} blocks with a lease of {lease_ns} ns: "
                "neither can be negative, nor the lease nothing"
            )
        self.capacity = capacity
        self.lease_ns = lease_ns
        self.incarnation = secrets.token_hex(8)
        self._clock = clock
        self._on_free = on_free
        self._lock = threading.Lock()
        self._is_closed = False
        self._ledger = Ledger()

    def retain(self, owner: str, blocks: Sequence[int], meta: TransferMeta) -> Transfer:
        """Take blocks over, to be pulled by ``owner``'s decode node or let go.

        If that request was released before, they are free when this returns.

        Raises:
            RetainedFullError: there is no room; the blocks stay the caller's.
            ClosedError: the same, for good.
        """
        with self._lock:
            if self._is_closed:
                raise ClosedError("retain blocks: the store is closed, free them")
            now = self._clock()
            early = self._ledger.remembered.take_tombstone((owner, meta.request_id), now)
            transfer = Transfer(
                id=f"{self.incarnation}{secrets.token_hex(16)}",
                owner=owner,
                meta=meta,
                num_blocks=len(blocks),
                lease_ns=self.lease_ns,
                is_tombstoned=early is not None,
            )
            if early is None:
                self._require_room(len(blocks))
                self._ledger.add(Entry(transfer, blocks, now, now, now + self.lease_ns))
            else:
                self._ledger.count(transfer, early)
        if early is not None:
            self._on_free(blocks)
        return transfer

    def begin_pull(
        self, transfer_id: str, owner: str, *, on_release: Callable[[], object] = _nobody
    ) -> Pull:
        """Pin a transfer's blocks for the one copy to a decode node.

        Args:
            on_release: called when the transfer is released under the copy, and again whenever a
                lease has passed since: stop, and end the pull. It is called with no lock held,
                on the thread that released it.

        Raises:
            UnknownTransferError: there is no such transfer of that owner, or not any more.
            TransferUsedError: it was pulled before.
        """
        with self._lock:
            entry = self._require(transfer_id, owner)
            if entry.is_used:
                raise TransferUsedError(
                    f"pull {cut(transfer_id)!r}: it was pulled before, prefill anew"
                )
            entry.is_used = True
            pull = Pull(
                entry.transfer,
                entry.blocks,
                Direction.SEND,
                on_release=on_release,
                on_drop=self._drop,
            )
            entry.pins.add(pull)
            return pull

    def pin(
        self,
        transfer_id: str,
        owner: str,
        direction: Direction,
        *,
        on_release: Callable[[], object] = _nobody,
    ) -> Pin:
        """Keep a transfer's blocks from being freed until the pin is dropped, whatever happens.

        Raises:
            UnknownTransferError: there is no such transfer of that owner, or not any more.
        """
        with self._lock:
            entry = self._require(transfer_id, owner)
            pin = Pin(
                entry.transfer, entry.blocks, direction, on_release=on_release, on_drop=self._drop
            )
            entry.pins.add(pin)
            return pin

    def release(self, name: str, owner: str, kind: ReleaseKind = ReleaseKind.ABORT) -> Released:
        """Let blocks go. Idempotent.

        Blocks that are being copied are free when the copy has ended, which is told to stop.

        Args:
            name: the id of the transfer, or of the request; of a request that is not known it
                leaves a tombstone.
        """
        with self._lock:
            now = self._clock()
            entries = self._ledger.named(name, owner)
            if not entries:
                return self._release_unknown(name, owner, kind, now)
            told = [pin for entry in entries for pin in entry.pins]
            freed = [entry for entry in entries if self._ledger.let_go(entry, kind, now)]
        self._announce(freed, told)
        num_blocks = sum(entry.transfer.num_blocks for entry in entries)
        return Released(ReleaseOutcome.RELEASED, kind, num_blocks, is_pinned=bool(told))

    def tombstone(self, request_id: str, owner: str) -> Released:
        """Let go what is retained for a request, or will be: ``release`` as an abort, by its id."""
        return self.release(request_id, owner, ReleaseKind.ABORT)

    def extend_lease(self, transfer_id: str, owner: str) -> bool:
        """The holder of a transfer was heard of: its lease runs anew.

        Returns:
            Whether the transfer is still to be had; if not, it was released.
        """
        with self._lock:
            entry = self._ledger.retained(transfer_id, owner)
            if entry is None:
                return False
            entry.heard_ns = self._clock()
            entry.deadline_ns = entry.heard_ns + self.lease_ns
            return True

    def reap(self, now: int | None = None) -> int:
        """Release what nobody was heard of for too long, and forget old tombstones.

        Whoever copies such a thing is told to stop; also if it was told before.

        Args:
            now: on the store's clock; None asks it.

        Returns:
            How many transfers were released.
        """
        with self._lock:
            now = self._clock() if now is None else now
            due = [entry for entry in self._ledger if entry.deadline_ns <= now]
            told = [pin for entry in due for pin in entry.pins]
            for pin in told:
                pin.is_lapsed = True
            num_lapsed = sum(entry.released is None for entry in due)
            for entry in due:
                entry.deadline_ns = now + self.lease_ns
            freed = [entry for entry in due if self._ledger.let_go(entry, ReleaseKind.LEASE, now)]
            self._ledger.remembered.expire(now)
        self._announce(freed, told)
        return num_lapsed

    def next_deadline(self) -> int | None:
        """Return when ``reap`` has something to do at the earliest; None while nothing is held."""
        with self._lock:
            return min((entry.deadline_ns for entry in self._ledger), default=None)

    def close(self) -> None:
        """Release everything and take no more; what is pinned is free when its copy ends.

        Idempotent.
        """
        with self._lock:
            self._is_closed = True
            transfers = [entry.transfer for entry in self._ledger]
        for transfer in transfers:
            self.release(transfer.id, transfer.owner, ReleaseKind.ABORT)

    def view(self) -> tuple[TransferView, ...]:
        """Return every transfer that holds blocks, the oldest first."""
        with self._lock:
            return self._ledger.view(self._clock())

    def stats(self) -> RetainedStats:
        """Return counters and gauges of now."""
        with self._lock:
            return self._ledger.stats(self._clock())

    def _drop(self, pin: Pin) -> bool:
        with self._lock:
            entry = self._ledger.find(pin.transfer.id)
            if entry is None or pin not in entry.pins:
                return False
            entry.pins.discard(pin)
            was_whole = entry.released is None
            # There is no second pull, so that after one there is nothing left to keep them for.
            is_over = isinstance(pin, Pull) or not was_whole
            is_freed = is_over and self._ledger.let_go(entry, pin.end_kind, self._clock())
        self._announce([entry] if is_freed else [], ())
        return was_whole

    def _announce(self, freed: Iterable[Entry], told: Iterable[Pin]) -> None:
        """Call whoever is to hear of it, now that the lock is not held."""
        calls: list[Callable[[], object]] = [partial(self._on_free, e.blocks) for e in freed]
        calls += [pin.on_release for pin in told]
        errors = []
        for call in calls:
            try:
                call()
            except Exception as error:  # it must not keep the others from hearing of theirs
                errors.append(error)
        if errors:
            raise errors[0]

    def _require_room(self, num_blocks: int) -> None:
        num_taken = self._ledger.num_blocks
        if num_taken + num_blocks > self.capacity:
            raise RetainedFullError(
                f"retain {num_blocks} blocks: {num_taken} of {self.capacity} are taken, "
                "decode here or ask again later"
            )

    def _require(self, transfer_id: str, owner: str) -> Entry:
        entry = self._ledger.retained(transfer_id, owner)
        if entry is None:
            is_own = transfer_id.startswith(self.incarnation)
            why = (
                "it has ended, or is not yours"
                if is_own
                else "this life of the node made none such"
            )
            raise UnknownTransferError(f"pull {cut(transfer_id)!r}: {why}, prefill anew")
        return entry

    def _release_unknown(self, name: str, owner: str, kind: ReleaseKind, now: int) -> Released:
        ended = self._ledger.remembered.kind_of((owner, name))
        if ended is not None:
            return Released(ReleaseOutcome.ALREADY_RELEASED, ended)
        # What begins as an id of this store is no request's.
        if not name.startswith(self.incarnation):
            self._ledger.remembered.bury((owner, name), kind, now)
        return Released(ReleaseOutcome.NOT_FOUND)
