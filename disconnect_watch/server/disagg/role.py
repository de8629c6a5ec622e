"""What a server does among others: its engine as a node, and the transport that others come by."""

import secrets
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

from prometheus_client import CollectorRegistry

from disconnect_watch.backends.engine_node import EngineNode, layout_of
from disconnect_watch.disagg import KVMemory, Peer, PeerLostError
from disconnect_watch.disagg.shm import SharedMemory, ShmPeer, ShmServer
from disconnect_watch.disagg.tcp import TcpPeer, TcpServer
from disconnect_watch.engine import Engine
from disconnect_watch.ports import bind
from disconnect_watch.server.disagg.metrics import TransferMetrics

__all__ = ["NodeRole", "Role", "ShmTransport", "TcpTransport", "Transport"]

Role = Literal["prefill", "decode", "both"]


class ShmTransport:
    """Nodes of one host, by memory that they share."""

    def __init__(self) -> None:
        self._shared: SharedMemory | None = None

    def allocate(self, shape: tuple[int, ...], dtype: str) -> Any:
        """Memory for a cache that others can map; see ``KVCache``."""
        self._shared = SharedMemory(layout_of(shape, dtype), shape[2])
        return self._shared.buffer

    def memory(self) -> KVMemory | None:
        """The cache that was allocated so."""
        return None if self._shared is None else self._shared.memory

    def open(self, node: EngineNode, closing: ExitStack) -> str:
        """Let others in; returns the address."""
        assert self._shared is not None, "the cache must lie in the memory of ``allocate``"
        closing.enter_context(self._shared)
        # Nobody else may write where the socket is.
        directory = closing.enter_context(tempfile.TemporaryDirectory(prefix="disconnect-watch-"))
        server = ShmServer(node.store, self._shared, str(Path(directory, secrets.token_hex(8))))
        closing.callback(server.close)
        return server.address

    def dial(self, address: str) -> Peer:
        """Reach another node."""
        if not address.startswith("shm:"):
            raise PeerLostError(f"cannot reach {address!r}: this node has --kv-transfer shm")
        return ShmPeer(address)


class TcpTransport:
    """Nodes of several hosts.

    Args:
        key: that all of them have.
        host: that this one listens on, and is reached by.
    """

    #: The cache lies where it always does.
    allocate: Callable[[tuple[int, ...], str], Any] | None = None

    def __init__(self, key: bytes, *, host: str = "127.0.0.1", port: int = 0) -> None:
        self._key = key
        self._host = host
        self._socket = bind(host, port)

    def memory(self) -> None:
        """None: the cache's own."""

    def open(self, node: EngineNode, closing: ExitStack) -> str:
        """Let others in; returns the address."""
        server = TcpServer(node.store, node.memory, self._socket, key=self._key, host=self._host)
        closing.callback(server.close)
        return server.address

    def dial(self, address: str) -> Peer:
        """Reach another node."""
        return TcpPeer(address, key=self._key)


Transport = ShmTransport | TcpTransport


class NodeRole:
    """An engine as a node, from before its first request to after its last.

    Args:
        transport: whose ``allocate`` made the engine's cache.
        lease: seconds, see ``EngineNode``.
    """

    def __init__(
        self, engine: Engine, role: Role, transport: Transport, *, lease: float = 5.0
    ) -> None:
        self.role = role
        with ExitStack() as closing:
            self.node = EngineNode(engine, lease=lease, memory=transport.memory())
            closing.callback(self.node.close)
            self.address = transport.open(self.node, closing)
            self.node.connect(self.address, transport.dial)
            self._closing = closing.pop_all()

    @property
    def prefills(self) -> bool:
        return self.role != "decode"

    @property
    def decodes(self) -> bool:
        return self.role != "prefill"

    def observe(self, registry: CollectorRegistry) -> None:
        """Tell what is kept for others, as metrics."""
        registry.register(TransferMetrics(self.node.stats))

    def close(self) -> None:
        """Let go of everything, when the engine has stopped. Idempotent."""
        self._closing.close()
