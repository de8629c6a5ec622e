"""An engine as a node among others: what it prefills is kept for them, what they do is fetched.

The engine calls in on its own thread and is never kept waiting: what it has retained goes into the
store at once, what it wants loaded is fetched on a loader's threads.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from disconnect_watch.backends.held_ticket import HeldTicket
from disconnect_watch.disagg import (
    Connector,
    KVLayout,
    KVMemory,
    Peer,
    Reaper,
    Released,
    ReleaseKind,
    RetainedStats,
    RetainedStore,
    Ticket,
    TransferMeta,
)
from disconnect_watch.engine import Engine, Request
from disconnect_watch.engine.loader import KVLoader
from disconnect_watch.token import CancelToken

__all__ = ["EngineNode", "Retained", "layout_of"]

#: Releases that other nodes are told of at the same time: one that does not answer delays few.
MAX_CALLS = 8


def layout_of(shape: tuple[int, ...], dtype: str) -> KVLayout:
    """The layout of a cache, given the shape of ``KVCache.blocks`` and the name of its dtype."""
    num_layers, _, _, block_size, num_kv_heads, head_dim = shape
    return KVLayout(num_layers, block_size, num_kv_heads, head_dim, dtype)


class _Blocks(tuple[int, ...]):
    """The blocks of one transfer, and who waits for their end: the store gives this object back."""

    ended: "Future[None]"


@dataclass(frozen=True, slots=True)
class Retained:
    """What ``Outcome.transfer`` of a prefill is.

    Attributes:
        ended: done when the blocks are nobody's any more, however that came.
    """

    ticket: Ticket
    ended: "Future[None]"


class EngineNode:
    """Connects an engine and a connector, both ways; made before the first request.

    Args:
        engine: whose cache is on a CPU.
        capacity: blocks that may be retained at once; None takes half of all, so that there is
            always room to prefill.
        lease: seconds for which a transfer stays when nobody is heard of.
        memory: of the cache; None takes the engine's own.

    Attributes:
        store: what this node retains.
        connector: None before ``connect``.

    Threads: any.
    """

    connector: Connector | None = None

    def __init__(
        self,
        engine: Engine,
        *,
        capacity: int | None = None,
        lease: float = 5.0,
        memory: KVMemory | None = None,
    ) -> None:
        num_blocks = engine.stats().num_blocks
        self.store = RetainedStore(
            max(1, num_blocks // 2) if capacity is None else capacity,
            int(lease * 1e9),
            on_free=self._free,
        )
        cache = engine.kv_cache
        dtype = str(cache.blocks.dtype).removeprefix("torch.")
        layout = layout_of(tuple(cache.blocks.shape), dtype)
        self.memory = memory or KVMemory(layout, cache.as_bytes())
        self._engine = engine
        self._lock = threading.Lock()
        #: By the engine's id of a request: whose it is, and how its owner names it.
        self._orders: dict[str, tuple[str, str]] = {}
        self._loader = KVLoader(engine.finish_load)
        self._reaper = Reaper(self.store)
        self._calls = ThreadPoolExecutor(MAX_CALLS, thread_name_prefix="disconnect-watch-release")
        engine.on_retain = self._retain
        engine.on_load = self._loader.start

    def connect(self, address: str, dial: Callable[[str], Peer]) -> None:
        """Say how others reach this node, and how it reaches them; once."""
        self.connector = Connector(self.store, self.memory, address=address, dial=dial)

    @contextmanager
    def ordered(self, engine_id: str, *, owner: str, name: str) -> Iterator[None]:
        """Retain what the engine prefills by an id for an owner, who names the request so."""
        with self._lock:
            self._orders[engine_id] = (owner, name)
        try:
            yield
        finally:
            with self._lock:
                self._orders.pop(engine_id, None)

    def hold(self, ticket: Ticket) -> HeldTicket:
        """Keep the lease of what another node has for one of our requests."""
        assert self.connector is not None, "connect comes first"
        return HeldTicket(self.connector, ticket, call_soon=self._call_soon)

    def release(self, name: str, owner: str, kind: ReleaseKind = ReleaseKind.ABORT) -> Released:
        """Let go of a transfer of this node, by its id or its request's; see ``RetainedStore``."""
        return self.store.release(name, owner, kind)

    def stats(self) -> RetainedStats:
        """Counters and gauges of now."""
        return self.store.stats()

    def close(self) -> None:
        """Let go of everything; call it when the engine has stopped. Idempotent."""
        self._loader.close()
        # What is to be said to other nodes is said before the way to them is closed.
        self._calls.shutdown(wait=True)
        if self.connector is not None:
            self.connector.close()
        self.store.close()
        self._reaper.close()
        self._engine.settle()

    def _retain(self, request: Request, blocks: tuple[int, ...]) -> Retained | None:
        with self._lock:
            order = self._orders.get(request.request_id)
        if order is None:
            raise LookupError("nobody has ordered it, see EngineNode.ordered")
        owner, name = order
        connector = self.connector
        assert connector is not None, "connect comes first"
        kept = _Blocks(blocks)
        kept.ended = Future()
        transfer = self.store.retain(owner, kept, TransferMeta(name, request.num_prompt_tokens))
        if request.cancel is not None:
            # From now until it is fetched, whoever asked for the prefill is watched as before.
            request.cancel.add_callback(_Release(self.store, transfer.id, owner))
        return Retained(connector.ticket(transfer), kept.ended)

    def _call_soon(self, call: Callable[[], None]) -> None:
        # Closed: the lease does it.
        with suppress(RuntimeError):
            self._calls.submit(call)

    def _free(self, blocks: Sequence[int]) -> None:
        self._engine.release_blocks(blocks)
        if isinstance(blocks, _Blocks):
            with suppress(Exception):  # whoever waited for it may have given up
                blocks.ended.set_result(None)


@dataclass(frozen=True, slots=True)
class _Release:
    store: RetainedStore
    transfer_id: str
    owner: str

    def __call__(self, token: CancelToken) -> None:
        self.store.release(self.transfer_id, self.owner, ReleaseKind.ABORT)
