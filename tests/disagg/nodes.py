"""A prefill node and a decode node in this process, over each transport."""

import contextlib
import itertools
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from disconnect_watch import CancelToken
from disconnect_watch.disagg import (
    Connector,
    KVBlocks,
    KVLayout,
    KVMemory,
    Peer,
    PeerLostError,
    RetainedStore,
    Ticket,
    Transfer,
    TransferMeta,
)
from disconnect_watch.disagg.channel import Channel
from disconnect_watch.disagg.peer import RemotePeer
from disconnect_watch.disagg.server import TransferServer
from disconnect_watch.disagg.shm import SharedMemory, ShmPeer, ShmServer
from disconnect_watch.disagg.tcp import TcpPeer, TcpServer
from disconnect_watch.ports import bind
from tests.support import tls
from tests.support.net import PATIENCE

KEY = b"sixteen bytes or more"
LEASE_NS = 10**9
NUM_BLOCKS = 24
TRANSPORTS = ("local", "shm", "tcp", "tls")
#: A block is several frames of TCP's, and so many are more than its credit.
LAYOUT = KVLayout(num_layers=2, block_size=16, num_kv_heads=16, head_dim=128, dtype="float32")
SMALL = KVLayout(num_layers=2, block_size=4, num_kv_heads=1, head_dim=2, dtype="float32")


class GatedMemory(KVMemory):
    """Memory whose copies wait, before the block of that place, until the gate opens."""

    hold_at: int | None = None

    def arm(self, place: int) -> None:
        self.hold_at = place
        self._places = itertools.count()
        self._reached = threading.Event()
        self._opened = threading.Event()

    def block(self, block_id: int) -> NDArray[np.uint8]:
        # A copy asks for a block once or twice, always before it writes to it.
        if self.hold_at is not None and next(self._places) == self.hold_at:
            self._reached.set()
            assert self._opened.wait(PATIENCE)
        return super().block(block_id)

    def wait(self) -> None:
        """Until a copy is held."""
        assert self._reached.wait(PATIENCE), "no copy came to the gate"

    def open(self) -> None:
        self._opened.set()


@dataclass
class Rig:
    """Both nodes; the clock of the store is the test's.

    Attributes:
        freed: what the store gave back, in order.
    """

    layout: KVLayout
    store: RetainedStore
    source: KVMemory
    into: GatedMemory
    connector: Connector
    server: TransferServer | None
    freed: list[Sequence[int]]
    now: list[int]
    pool: ThreadPoolExecutor

    def retain(self, blocks: Sequence[int] = (5, 2, 9, 7), owner: str = "alice") -> Transfer:
        return self.store.retain(owner, blocks, TransferMeta("r", 64))

    def ticket(self, transfer: Transfer) -> Ticket:
        address = "local:" if self.server is None else self.server.address
        return Ticket(address, transfer.id, transfer.owner, transfer.lease_ns)

    def pull(
        self,
        ticket: Ticket,
        blocks: Sequence[int] = (0, 1, 2, 3),
        cancel: CancelToken | None = None,
    ) -> None:
        self.connector.pull(ticket, KVBlocks(self.into, blocks), cancel=cancel)

    def start_pull(self, ticket: Ticket, cancel: CancelToken | None = None) -> "Future[None]":
        """Pull on another thread, up to the gate in front of the third block."""
        self.into.arm(2)
        pull = self.pool.submit(self.pull, ticket, cancel=cancel)
        self.into.wait()
        return pull

    def channels(self, *, of_server: bool) -> list[Channel]:
        """The connections that are in use, as one of the sides has them."""
        assert self.server is not None
        if of_server:
            return list(self.server._channels)
        peer = self.connector._peers[self.server.address]
        assert isinstance(peer, RemotePeer)
        return list(peer._busy)

    def lapse(self) -> None:
        self.now[0] += 2 * LEASE_NS
        self.store.reap()


@contextlib.contextmanager
def serving(
    transport: str,
    store: RetainedStore,
    shared: SharedMemory,
    *,
    port: int = 0,
    at: str | None = None,
) -> Iterator[TransferServer | None]:
    """The server of a transport, closed at the end.

    Args:
        port: of TCP; 0 takes a free one.
        at: where one was before, of shared memory.
    """
    with contextlib.ExitStack() as stack:
        server: TransferServer | None = None
        if transport == "shm":
            if at is None:
                path = stack.enter_context(tempfile.TemporaryDirectory()) + "/kv"
            else:
                path = at.removeprefix("shm:")
                stack.enter_context(_directory(path))
            server = ShmServer(store, shared, path)
        elif transport != "local":
            context = tls.server_context() if transport == "tls" else None
            listening = bind("127.0.0.1", port)
            server = TcpServer(store, shared.memory, listening, key=KEY, tls=context)
        try:
            yield server
        finally:
            if server is not None:
                server.close()


@contextlib.contextmanager
def _directory(path: str) -> Iterator[None]:
    directory = Path(path).parent
    directory.mkdir()
    yield
    directory.rmdir()


def dialler(transport: str, *, timeout: float = PATIENCE) -> Callable[[str], Peer]:
    """What makes the peers of a transport."""

    def dial(address: str) -> Peer:
        if transport == "shm":
            return ShmPeer(address, timeout=timeout)
        if transport in ("tcp", "tls"):
            context = tls.client_context() if transport == "tls" else None
            return TcpPeer(address, key=KEY, tls=context, timeout=timeout)
        raise PeerLostError(f"dial {address}: nobody is there")

    return dial


@contextlib.contextmanager
def rig(transport: str, layout: KVLayout = SMALL) -> Iterator[Rig]:
    """A node that retains and a node that pulls; with ``local`` they are one."""
    now = [0]
    freed: list[Sequence[int]] = []
    store = RetainedStore(NUM_BLOCKS, LEASE_NS, lambda: now[0], freed.append)
    with SharedMemory(layout, NUM_BLOCKS) as shared, ThreadPoolExecutor() as pool:
        shared.memory.array[:] = np.random.default_rng(0).integers(
            0, 256, shared.memory.array.shape, np.uint8
        )
        into = GatedMemory.empty(layout, NUM_BLOCKS)
        with serving(transport, store, shared) as server:
            own = store if transport == "local" else RetainedStore(0, LEASE_NS)
            with Connector(own, shared.memory, dial=dialler(transport)) as connector:
                nodes = Rig(layout, store, shared.memory, into, connector, server, freed, now, pool)
                yield nodes
                # A fixture that gave them keeps them until after the leak guard has looked, and a
                # mapping has a descriptor.
                vars(nodes).clear()
