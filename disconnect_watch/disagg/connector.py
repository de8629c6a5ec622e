"""How a node keeps blocks for others and gets those that others keep for it.

A node has one ``Connector``. What it retains, it hands out a ``Ticket`` for, which goes to the
decode node by way of whoever routes the request. That node's connector pulls by the ticket, or
releases it unpulled; in between it holds it, which renews the lease.

Other nodes are reached by ``Peer``s, of which each transport has one: ``shm``, ``tcp``. The one
here is for a node that pulls from itself.
"""

import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol, Self

from disconnect_watch.disagg.errors import LayoutError, PeerLostError, TransferCancelledError
from disconnect_watch.disagg.heartbeat import Heartbeat
from disconnect_watch.disagg.kv import KVBlocks, KVMemory
from disconnect_watch.disagg.records import Released, ReleaseKind, Ticket, Transfer, TransferMeta
from disconnect_watch.disagg.retained import RetainedStore
from disconnect_watch.errors import ClosedError
from disconnect_watch.token import CancelToken

__all__ = ["Connector", "LocalPeer", "Peer", "require_fit"]


class Peer(Protocol):
    """One other node, as a connector reaches it.

    Raises:
        PeerLostError: from each call, where the node can't be reached.

    Threads: any.
    """

    def pull(
        self, transfer_id: str, owner: str, into: KVBlocks, cancel: CancelToken | None
    ) -> None:
        """Copy a transfer's blocks into others, and release it; see ``Connector.pull``."""

    def release(self, name: str, owner: str, kind: ReleaseKind) -> Released:
        """As ``RetainedStore.release``."""

    def extend_lease(self, transfer_id: str, owner: str) -> bool:
        """As ``RetainedStore.extend_lease``."""

    def close(self) -> None:
        """Let go of the connection; a pull under way ends. Idempotent."""


def require_fit(source: KVBlocks, into: KVBlocks) -> None:
    """Raises:
    LayoutError: the blocks of both sides are not alike, or not as many.
    """
    if source.memory.layout != into.memory.layout:
        raise LayoutError(f"pull {source.memory.layout} into {into.memory.layout}: not alike")
    if len(source.block_ids) != len(into.block_ids):
        raise LayoutError(
            f"pull {len(source.block_ids)} blocks into {len(into.block_ids)}: not as many"
        )


class LocalPeer:
    """A node's own store and memory."""

    def __init__(self, store: RetainedStore, memory: KVMemory) -> None:
        self._store = store
        self._memory = memory

    def pull(
        self, transfer_id: str, owner: str, into: KVBlocks, cancel: CancelToken | None
    ) -> None:
        is_released = threading.Event()
        with self._store.begin_pull(transfer_id, owner, on_release=is_released.set) as pull:
            source = KVBlocks(self._memory, pull.blocks)
            require_fit(source, into)
            for ours, theirs in zip(pull.blocks, into.block_ids, strict=True):
                if is_released.is_set() or (cancel is not None and cancel.cancelled):
                    break
                into.memory.block(theirs)[:] = self._memory.block(ours)
            else:
                if pull.finish():
                    return
        raise TransferCancelledError("pull: the transfer was cancelled or released meanwhile")

    def release(self, name: str, owner: str, kind: ReleaseKind) -> Released:
        return self._store.release(name, owner, kind)

    def extend_lease(self, transfer_id: str, owner: str) -> bool:
        return self._store.extend_lease(transfer_id, owner)

    def close(self) -> None:
        """There is nothing to let go of."""


class Connector:
    """What a node retains, and its way to what others do.

    Args:
        store: of this node; its reaper is the caller's.
        memory: that the blocks of the store are of.
        address: that others reach this node by, through a server of the transport's.
        dial: makes the ``Peer`` for another node's address. It is called once an address, and
            may raise ``PeerLostError``, or ``ValueError`` for an address that is none: tickets come
            from elsewhere, so that counts as lost, too.

    Threads: any. ``pull`` blocks the calling thread until the blocks are there: give it one
    beside the step loop.
    """

    def __init__(
        self,
        store: RetainedStore,
        memory: KVMemory,
        *,
        address: str = "local:",
        dial: Callable[[str], Peer],
    ) -> None:
        self.store = store
        self.memory = memory
        self.address = address
        self._dial = dial
        self._lock = threading.Lock()
        self._is_closed = False
        self._peers: dict[str, Peer] = {address: LocalPeer(store, memory)}
        # One for each other node: one that does not answer holds up the leases of no other.
        self._heartbeats: dict[str, Heartbeat] = {}

    def retain(self, owner: str, blocks: Sequence[int], meta: TransferMeta) -> Transfer:
        """Take blocks of this node over; see ``RetainedStore.retain``."""
        return self.store.retain(owner, blocks, meta)

    def ticket(self, transfer: Transfer) -> Ticket:
        """What another node pulls a transfer of this one by."""
        return Ticket(self.address, transfer.id, transfer.owner, transfer.lease_ns)

    def pull(self, ticket: Ticket, into: KVBlocks, *, cancel: CancelToken | None = None) -> None:
        """Copy the blocks of a ticket into blocks of this node, and release it in band.

        A ticket is good for one pull, whatever becomes of it. If this raises, the blocks in
        ``into`` hold anything, nothing writes to them any more, and the ticket's are let go: at
        once where its node hears of it, else by its lease.

        Args:
            into: as many blocks as were retained, which nobody else touches meanwhile.
            cancel: ends it midway.

        Raises:
            TransferCancelledError: it was cancelled, here or there.
            UnknownTransferError: the ticket is for nothing, or for nothing any more.
            TransferUsedError: there was a pull before.
            LayoutError: the blocks of both nodes do not fit.
            PeerLostError: the node can't be reached, or left midway.
        """
        try:
            self._peer(ticket.address).pull(ticket.transfer_id, ticket.owner, into, cancel)
        finally:
            self._let_go(ticket)

    def release(self, ticket: Ticket, kind: ReleaseKind = ReleaseKind.IN_BAND) -> Released:
        """Let a ticket's blocks go unpulled. Idempotent.

        Raises:
            PeerLostError: its node can't be reached; the lease does it.
        """
        self._let_go(ticket)
        return self._peer(ticket.address).release(ticket.transfer_id, ticket.owner, kind)

    def hold(self, ticket: Ticket, on_gone: Callable[[Ticket], object] = lambda _: None) -> None:
        """Renew a ticket's lease by itself, at once and until ``pull`` ends or ``release``.

        Args:
            on_gone: called once, on a thread of the connector's, if there is nothing left to pull:
                it was released there, or its node is not heard of for as long as its lease.
        """
        with self._lock:
            if self._is_closed:
                raise ClosedError("hold a ticket: the connector is closed, release it")
            heartbeat = self._heartbeats.get(ticket.address)
            if heartbeat is None:
                heartbeat = self._heartbeats[ticket.address] = Heartbeat(self.extend_lease)
        heartbeat.hold(ticket, on_gone)

    def extend_lease(self, ticket: Ticket) -> bool:
        """Renew a ticket's lease; see ``RetainedStore.extend_lease``.

        Raises:
            PeerLostError: its node can't be reached.
        """
        return self._peer(ticket.address).extend_lease(ticket.transfer_id, ticket.owner)

    def tombstone(self, address: str, request_id: str, owner: str) -> Released:
        """Let go what a node retains, or will, for a request whose ticket is not known.

        Raises:
            PeerLostError: that node can't be reached.
        """
        return self._peer(address).release(request_id, owner, ReleaseKind.ABORT)

    def close(self) -> None:
        """Let go of all peers; pulls under way end, and no lease is renewed. Idempotent."""
        with self._lock:
            self._is_closed = True
            peers = list(self._peers.values())
            heartbeats = list(self._heartbeats.values())
        for peer in peers:
            peer.close()
        for heartbeat in heartbeats:
            heartbeat.close()

    def _let_go(self, ticket: Ticket) -> None:
        with self._lock:
            heartbeat = self._heartbeats.get(ticket.address)
        if heartbeat is not None:
            heartbeat.let_go(ticket)

    def _peer(self, address: str) -> Peer:
        with self._lock:
            peer = self._peers.get(address)
        if peer is None:
            # Not under the lock: a node that does not answer must not hold up the others.
            try:
                made = self._dial(address)
            except ValueError as error:
                raise PeerLostError(str(error)) from error
            with self._lock:
                peer = self._peers.setdefault(address, made)
                is_closed = self._is_closed
            if is_closed or peer is not made:
                made.close()
        return peer

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
