"""Prefill and decode nodes and the proxy in this process, so that a test can hold each of them.

All is real but for the processes: engines, frontends, sockets, the transport. Leases last an hour,
so whatever is free again was released.
"""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import httpx
import msgspec

from disconnect_watch.backends.engine import EngineBackend
from disconnect_watch.disagg import KVBlocks, ReleaseKind
from disconnect_watch.disagg.shm import ShmPeer
from disconnect_watch.engine import DEFAULT_MODEL, ChatTemplate, Engine, EngineConfig
from disconnect_watch.keys import Caller, KeyRing, digest_of
from disconnect_watch.keys import Role as KeyRole
from disconnect_watch.server import Frontend, ServeOptions, bind
from disconnect_watch.server.disagg.messages import PREFILL_HEADER, TICKET_HEADER, Prefilled
from disconnect_watch.server.disagg.nodes import Node as NodeOfProxy
from disconnect_watch.server.disagg.nodes import NodePool
from disconnect_watch.server.disagg.proxy import PdProxy
from disconnect_watch.server.disagg.role import (
    NodeRole,
    Role,
    ShmTransport,
    TcpTransport,
    Transport,
)
from disconnect_watch.server.guard import Gatekeeper
from disconnect_watch.server.run import make_server
from disconnect_watch.watcher import Watcher
from tests.support.net import PATIENCE, wait_until
from tests.support.serve import LOOPS, ThreadedServer, metrics_of, packaged_model, serving_opened

__all__ = [
    "OTHER_KEY",
    "SERVICE_KEY",
    "USER_KEY",
    "GatedProxy",
    "HeldShm",
    "ThreadedNode",
    "node",
    "proxy_before",
]

#: Of the proxy, of another proxy, and of somebody.
SERVICE_KEY, OTHER_KEY, USER_KEY = "dw-service", "dw-other", "dw-user"
KEYS = KeyRing(
    [
        (Caller("proxy", KeyRole.SERVICE), digest_of(SERVICE_KEY)),
        (Caller("other", KeyRole.SERVICE), digest_of(OTHER_KEY)),
        (Caller("somebody", KeyRole.USER), digest_of(USER_KEY)),
    ]
)
LEASE = 3600.0


@dataclass
class ThreadedNode:
    """One node."""

    http: ThreadedServer
    engine: Engine
    role: NodeRole
    watcher: Watcher

    @property
    def url(self) -> str:
        return self.http.url

    def is_idle(self) -> bool:
        """Whether nothing is left of any request."""
        stats = self.engine.stats()
        return (
            stats.num_waiting == stats.num_running == 0
            and stats.num_blocks_available == stats.num_blocks
            and stats.num_blocks_held == 0
            and self.role.node.stats().num_transfers == 0
            and self.watcher.stats().num_armed == 0
        )

    def released(self, kind: ReleaseKind) -> int:
        """Transfers that were let go so."""
        return self.role.node.stats().num_released.get(kind, 0)

    def post(self, path: str, body: Any, *, key: str = SERVICE_KEY, **headers: str) -> Any:
        """One request to this node, and its whole answer."""
        return httpx.post(
            self.url + path,
            json=body,
            headers={**({"authorization": f"Bearer {key}"} if key else {}), **headers},
            timeout=PATIENCE,
        )

    @contextmanager
    def prefilled(self, path: str, body: Any, *, name: str = "r1") -> Iterator[Prefilled]:
        """Have a prompt computed here, and stay connected, as a proxy does."""
        headers = {
            "authorization": f"Bearer {SERVICE_KEY}",
            PREFILL_HEADER: "1",
            "x-request-id": name,
        }
        with httpx.stream(
            "POST", self.url + path, json=body, headers=headers, timeout=PATIENCE
        ) as response:
            assert response.status_code == 200, response.read()
            lines = response.iter_lines()  # its end would be the connection's
            yield msgspec.json.decode(next(lines), type=Prefilled)

    def decode(self, path: str, body: Any, prefilled: Prefilled, **headers: str) -> Any:
        """Go on with what another node has computed."""
        return self.post(path, body, **{TICKET_HEADER: prefilled.header()}, **headers)


class HeldShm(ShmTransport):
    """Pulls by it wait until the test lets them."""

    def __init__(self) -> None:
        super().__init__()
        self.has_begun = threading.Event()
        self.may_go_on = threading.Event()

    def dial(self, address: str) -> ShmPeer:
        transport = self

        class Held(ShmPeer):
            def _receive_blocks(self, channel: Any, accepted: Any, into: KVBlocks) -> None:
                transport.has_begun.set()
                assert transport.may_go_on.wait(PATIENCE)
                super()._receive_blocks(channel, accepted, into)

        return Held(address)


class GatedProxy(PdProxy):
    """Holds each request between the prefill's answer and the decode's dispatch."""

    def __init__(self, *pools: NodePool, **options: Any) -> None:
        super().__init__(*pools, **options)
        self.has_come = threading.Event()

    async def _decode(
        self, asked: Any, prefilled: Prefilled | None, held: AsyncExitStack
    ) -> tuple[NodeOfProxy, aiohttp.ClientResponse]:
        self.has_come.set()
        await asyncio.Event().wait()  # until the client has left
        return await super()._decode(asked, prefilled, held)


@contextmanager
def node(
    role: Role, transport: Transport | None = None, *, lease: float = LEASE, **config: Any
) -> Iterator[ThreadedNode]:
    """One node of the package's model."""
    transport = transport or ShmTransport()
    model, tokenizer = packaged_model()
    settings = EngineConfig(**{"num_blocks": 256, "num_threads": 1, **config})
    engine = Engine(model, tokenizer, config=settings, allocate=transport.allocate)
    template = ChatTemplate.from_pretrained(DEFAULT_MODEL)
    backend = EngineBackend(engine, name="tiny", chat_template=template)
    with ExitStack() as ending:
        watcher = ending.enter_context(Watcher())
        made = NodeRole(engine, role, transport, lease=lease)
        ending.callback(made.close)
        ending.callback(backend.close)
        frontend = Frontend(backend)
        server = make_server(
            frontend,
            metrics_of(frontend, watcher),
            ServeOptions(grace=0.2, node=made),
            watcher=watcher,
            gatekeeper=Gatekeeper(KEYS),
        )
        http = ThreadedServer(server, bind("127.0.0.1", 0), make_loop=LOOPS["uvloop"])
        ending.callback(http.stop)
        found = ThreadedNode(http, engine, made, watcher)
        yield found
        # A fixture's value outlives its end, and a mapping has an fd.
        vars(found).clear()


def tcp() -> TcpTransport:
    """The other transport; all that are made so know one key."""
    return TcpTransport(b"a secret of sixteen bytes")


@contextmanager
def proxy_before(
    prefills: list[str], decodes: list[str], kind: type[PdProxy] = PdProxy, **options: Any
) -> Iterator[tuple[PdProxy, ThreadedServer]]:
    """The proxy before nodes, which are asked how they are all the time."""
    proxy = kind(
        NodePool(prefills),
        NodePool(decodes),
        **{"key": SERVICE_KEY, "probe_seconds": PATIENCE, **options},
    )
    with serving_opened(proxy.serving()) as http:
        yield proxy, http


def wait_until_idle(*nodes: ThreadedNode) -> None:
    """Wait until nothing is left on any of them."""
    for each in nodes:
        wait_until(each.is_idle)
