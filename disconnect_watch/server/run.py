"""One process that serves: two sockets, one loop, the engine's thread, and an orderly end."""

import asyncio
import logging
import math
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Any, ClassVar

import uvicorn
import uvloop
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from disconnect_watch.adapters import WHOLE_KEY
from disconnect_watch.adapters.uvicorn import HalfClose
from disconnect_watch.aio import grace
from disconnect_watch.backends import Backend
from disconnect_watch.backends.engines import EngineTable
from disconnect_watch.backends.models import Models, RemoteModels
from disconnect_watch.errors import DisconnectWatchError
from disconnect_watch.ports import listen
from disconnect_watch.server.access import App
from disconnect_watch.server.app import create_app, create_metrics_app
from disconnect_watch.server.cloud import CloudMode
from disconnect_watch.server.collector import rare_collections
from disconnect_watch.server.crowd import TOO_MANY, Crowd, num_connections_possible
from disconnect_watch.server.documents import encode
from disconnect_watch.server.frontend import Frontend
from disconnect_watch.server.guard import AdminDoor, AdminPort, Gatekeeper
from disconnect_watch.server.metrics import Metrics
from disconnect_watch.server.openai.responses.store import ResponseStore
from disconnect_watch.server.options import FrontendOptions
from disconnect_watch.server.peers import Peers
from disconnect_watch.server.slow import Arrivals
from disconnect_watch.server.upload import UploadProtocol
from disconnect_watch.watcher import Watcher, default_watcher

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

    from disconnect_watch.backends.embedder import EmbedderBackend
    from disconnect_watch.server.disagg.role import NodeRole

__all__ = [
    "FrontendProtocol",
    "FrontendServer",
    "ModelsFailedError",
    "ServeOptions",
    "make_server",
    "serve",
]

#: Seconds that a client gets to take the last words of a response that a shutdown cut short.
FLUSH = 1.0
#: Of one request's headers; of what is still coming, beyond the read in which it begins.
MAX_HEAD_BYTES = 1 << 16
#: Of one request's body, as Triton has it: each costs work, however little is in it.
MAX_CHUNKS = 1 << 16
#: Seconds that no request takes; a timer can't wait without end.
FOREVER = 1e8
#: Seconds between looks while a shutdown waits.
TICK = 0.05

_MESSAGE = encode(
    {
        "error": f"Chunked request body exceeds maximum of {MAX_CHUNKS} non-empty chunks. "
        "Send fewer or larger HTTP chunks."
    }
)
TOO_MANY_CHUNKS = (
    b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n"
    b"content-length: %d\r\n\r\n%b" % (len(_MESSAGE), _MESSAGE)
)

logger = logging.getLogger("disconnect_watch.server")


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """How to serve.

    Attributes:
        grace: seconds that running requests have to finish once a shutdown began.
        half_close: what a client's FIN means, see ``HttpTools``, as for the next two.
        vanish_after: seconds after which a silent client is gone; None asks for no sign.
        unblind: bytes; None leaves receive buffers alone.
        disconnect_grace: seconds that a request may go on without its client; infinity for
            to its end.
        keep_alive: seconds after which an idle connection is closed.
        read_timeout: seconds that a request has to arrive, beside those for its size.
        max_connections: of the main port, who comes then waits; None for as many as there may
            be open files.
        max_connections_per_address: who has more is answered 503; None for no limit.
        frontend: what it allows, and how it answers.
        exit_on_error: do not serve if a model can't be loaded.
        cloud: whose paths are served instead of our own.
        tracing: makes a span of each request; shut down at the end.
        node: what the server does among others that prefill and decode; closed at the end.
    """

    grace: float = 5.0
    half_close: HalfClose = "disconnect"
    vanish_after: float | None = None
    unblind: int | None = None
    disconnect_grace: float = 0.0
    keep_alive: int = 75
    read_timeout: float = 60.0
    max_connections: int | None = None
    max_connections_per_address: int | None = None
    frontend: FrontendOptions = field(default_factory=FrontendOptions)
    exit_on_error: bool = True
    cloud: CloudMode | None = None
    tracing: "TracerProvider | None" = None
    node: "NodeRole | None" = None


class ModelsFailedError(DisconnectWatchError):
    """Models that were to be served can't be."""


class NoUpgrades(HttpToolsProtocol):
    """Answers a request to upgrade as one that does not ask for it (RFC 9110 7.8).

    uvicorn does so too, and warns each time that a WebSocket library should be installed,
    where none is wanted (0.54; ``test_an_upgrade_is_passed_over_in_silence``).
    """

    def _unsupported_upgrade_warning(self) -> None:
        pass


class FrontendProtocol(NoUpgrades, UploadProtocol):
    """What cannot be parsed, or is all head, is closed without a word, as Triton does.

    Neither uvicorn nor its parser bounds the head of a request.
    """

    arrivals: ClassVar[Arrivals]
    crowd: ClassVar[Crowd]

    # Not in the instance's dict, as those of WatchedProtocol.
    __slots__ = (
        "_address",
        "_first_bytes",
        "_has_begun",
        "_head_bytes",
        "_is_refused",
        "_num_chunks",
        "_read_bytes",
    )

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        # The state that each request gets a copy of.
        super().__init__(config, server_state, {**app_state, WHOLE_KEY: True}, _loop)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        peer = transport.get_extra_info("peername")
        self._address = peer[0] if isinstance(peer, tuple) else None
        self._is_refused = not self.crowd.enter(self._address)
        if self._is_refused:
            transport.write(TOO_MANY)
            transport.close()
            return
        super().connection_made(transport)
        self._has_begun = False
        self._read_bytes = self._first_bytes = self._num_chunks = 0
        self._head_bytes: int | None = None
        self.arrivals.begin(self)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._is_refused:
            return
        self.arrivals.end(self)
        super().connection_lost(exc)
        self.crowd.leave(self._address)

    @property
    def is_answering(self) -> bool:
        """Whether a request that is whole has no whole response yet."""
        cycle = self.cycle
        is_running = cycle is not None and not (cycle.more_body or cycle.response_complete)
        return is_running or bool(self.pipeline)

    def on_message_complete(self) -> None:
        self._has_begun = False
        self.arrivals.end(self)
        super().on_message_complete()

    def on_message_begin(self) -> None:
        # Most come to their end in the read that they begin in.
        self._has_begun = True
        # The read in which a head begins is not counted: who pipelines may have sent
        # most of it as the body of the request before.
        self._first_bytes, self._head_bytes = self._read_bytes, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        # What one read brought from beginning to end was never counted. The headers are
        # measured only where there were enough bytes for them to be too large.
        if self._first_bytes + (self._head_bytes or 0) > MAX_HEAD_BYTES and (
            sum(len(name) + len(value) for name, value in self.headers) > MAX_HEAD_BYTES
        ):
            raise ValueError("the head is too large")  # uvicorn calls send_400_response
        self._head_bytes = None
        self._num_chunks = 0
        super().on_headers_complete()

    def on_chunk_complete(self) -> None:
        """Called by httptools alone, and only where a body comes in chunks."""
        self._num_chunks += 1
        # The last, of no bytes, is counted too.
        if self._num_chunks > MAX_CHUNKS + 1:
            cycle = self.cycle
            is_next = cycle is not None and not self.pipeline and not cycle.response_started
            if is_next:
                self.transport.write(TOO_MANY_CHUNKS)
            raise ValueError("the body has too many chunks")  # see send_400_response

    def body_received(self, num_bytes: int) -> None:
        self.arrivals.progress(self, num_bytes)

    def data_received(self, data: bytes) -> None:
        self._read_bytes = len(data)
        self.arrivals.progress(self, len(data))
        if self._head_bytes is not None:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._has_begun:
            self._has_begun = False
            self.arrivals.begin(self)
        if self._head_bytes is not None and self._head_bytes > MAX_HEAD_BYTES:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        self.transport.close()


class FrontendServer(uvicorn.Server):
    """uvicorn's server with our way to stop.

    On the first signal: no new connections, not ready, requests that run may finish
    within the grace time, then they are cancelled with reason SHUTDOWN and told so. A
    second signal ends the grace time.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        frontend: Frontend,
        *,
        crowd: Crowd,
        grace: float,
        announce: Callable[[], None],
    ) -> None:
        super().__init__(config)
        self._frontend = frontend
        self.crowd = crowd
        self._grace = grace
        self._announce = announce
        self._is_hurried = False
        self._listening: list[socket.socket] = []
        self._accepting: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # uvicorn's own would raise the signal again once all is done, and make an
        # orderly end look like a kill.
        self._is_hurried = self.should_exit
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        # A loop's server closes its socket, and with the last of a socket the kernel's queue ends.
        self._listening = [sock.dup() for sock in sockets or ()]
        await super().startup(sockets)
        self.crowd.on_full = self._stop_accepting
        self.crowd.on_room = self._accept_again
        self._announce()

    def _stop_accepting(self) -> None:
        for server in self.servers:
            server.close()
        self.servers = []

    def _accept_again(self) -> None:
        if self._listening and (self._accepting is None or self._accepting.done()):
            self._accepting = asyncio.get_running_loop().create_task(self._accept())

    async def _accept(self) -> None:
        config = self.config
        for sock in self._listening:
            while True:
                try:
                    again = sock.dup()
                    break
                except OSError:  # no file descriptor is left: not ours alone use them up
                    await asyncio.sleep(TICK)
            server = await asyncio.get_running_loop().create_server(
                lambda: config.http_protocol_class(  # type: ignore[call-arg]
                    config=config, server_state=self.server_state, app_state=self.lifespan.state
                ),
                sock=again,
                backlog=config.backlog,
            )
            self.servers.append(server)
        if self.crowd.is_full:  # again, while this waited
            self._stop_accepting()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.crowd.on_full = self.crowd.on_room = lambda: None
        if self._accepting is not None:
            self._accepting.cancel()
            await asyncio.wait([self._accepting])
        for sock in self._listening:
            sock.close()
        self._frontend.begin_drain()
        logger.info("shutting down", extra={"grace": self._grace})
        deadline = asyncio.get_running_loop().time() + self._grace
        ending = asyncio.create_task(self._end_connections())
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()
            await self._end_responses(deadline)

    async def _end_connections(self) -> None:
        """See that every connection and request ends, which uvicorn's shutdown waits for."""
        if not await self._are_done_within(self._grace):
            self._frontend.cancel_all()
            await self._are_done_within(FLUSH, hurries=False)
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    async def _end_responses(self, deadline: float) -> None:
        """See that what no connection waits for ends too, and is stored."""
        loop = asyncio.get_running_loop()
        while self._frontend.responses.num_running:
            if loop.time() >= deadline or self._is_hurried:
                self._frontend.cancel_all()
                break
            await asyncio.sleep(TICK)
        await self._frontend.responses.close()

    async def _are_done_within(self, seconds: float, *, hurries: bool = True) -> bool:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        # A request in its grace has no connection any more.
        while self.server_state.connections or self.server_state.tasks:
            if loop.time() >= deadline or (hurries and self._is_hurried):
                return False
            await asyncio.sleep(TICK)
        return True


def make_server(
    frontend: Frontend,
    metrics: Metrics,
    options: ServeOptions,
    *,
    watcher: Watcher | None = None,
    gatekeeper: Gatekeeper | None = None,
    announce: Callable[[], None] = lambda: None,
    app: App | None = None,
) -> FrontendServer:
    """The server of the main port, to be run on a loop with ``await server.serve([socket])``.

    Args:
        watcher: of its connections; None for the process-wide one.
        gatekeeper: see ``create_app``.
        announce: called once requests are taken.
        app: served in place of the frontend's own application.
    """
    seconds = min(options.disconnect_grace, FOREVER)
    limit = options.max_connections
    crowd = Crowd(
        num_connections_possible() if limit is None else limit, options.max_connections_per_address
    )
    protocol = type(
        "FrontendProtocol",
        (FrontendProtocol,),
        {
            "__slots__": (),
            "half_close": options.half_close,
            "vanish_after": options.vanish_after,
            "unblind": options.unblind,
            "on_disconnect": grace(seconds) if seconds else "cancel",
            "watcher": watcher,
            "arrivals": Arrivals(options.read_timeout),
            "crowd": crowd,
        },
    )
    return FrontendServer(
        _config(
            app
            or create_app(
                frontend,
                metrics,
                gatekeeper=gatekeeper,
                cloud=options.cloud,
                tracing=options.tracing,
                node=options.node,
            ),
            protocol,
            options,
        ),
        frontend,
        crowd=crowd,
        grace=options.grace,
        announce=announce,
    )


def serve(
    backend: Backend | None,
    *,
    embedder: "EmbedderBackend | None" = None,
    http: socket.socket,
    metrics: socket.socket,
    options: ServeOptions,
    open_models: Callable[[], AbstractAsyncContextManager[Models | None]] = nullcontext,
    open_remote: Callable[[], AbstractAsyncContextManager[RemoteModels | None]] = nullcontext,
    open_app: Callable[[], AbstractAsyncContextManager[App | None]] = nullcontext,
    open_peers: Callable[[], AbstractAsyncContextManager[Peers | None]] = nullcontext,
    gatekeeper: Gatekeeper | None = None,
    admin: socket.socket | None = None,
    admin_port: socket.socket | None = None,
    store: ResponseStore | None = None,
    engines: EngineTable | None = None,
    announce: Callable[[Frontend], None] = lambda _: None,
) -> None:
    """Serve until SIGTERM or SIGINT; returns after an orderly end.

    Args:
        backend, embedder: an engine, an encoder; closed at the end.
        http, metrics: from ``bind``; closed at the end.
        open_models: called on the loop for the models that take tensors.
        open_remote: the same, where other servers run them.
        open_app: the same for an application that is served in place of our own.
        open_peers: the same for the other frontends, where the engines are those of all of them.
        gatekeeper: knows who calls; None needs no keys.
        admin: from ``bind_unix``; whoever connects to it is the admin. Closed at the end.
        admin_port: from ``bind``; has what only an admin may do, for a gatekeeper that knows of
            it. Closed at the end.
        store: of responses; None keeps them in memory. Closed at the end.
        engines: where those of ``open_models`` stand.
        announce: called once requests are taken.

    Raises:
        OSError: says on which address it cannot listen.
        ModelsFailedError: says which models can't be loaded, and why.

    Threads: the main thread, which gets the signals.
    """
    try:
        # uvloop, where it failed to, would close the fd, and hide why with a second close.
        listen(http)
        listen(metrics)
        if admin is not None:
            admin.listen()
        if admin_port is not None:
            listen(admin_port)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(
                _serve(
                    backend,
                    embedder,
                    http,
                    metrics,
                    options,
                    open_models,
                    open_remote,
                    open_app,
                    open_peers,
                    gatekeeper,
                    admin,
                    admin_port,
                    store,
                    engines,
                    announce,
                )
            )
    finally:
        if backend is not None:
            backend.close()
        if options.node is not None:
            options.node.close()
        if embedder is not None:
            embedder.close()
        http.close()
        metrics.close()
        for sock in (admin, admin_port):
            if sock is not None:
                sock.close()
        if options.tracing is not None:
            options.tracing.shutdown()


async def _serve(
    backend: Backend | None,
    embedder: "EmbedderBackend | None",
    http: socket.socket,
    metrics_socket: socket.socket,
    options: ServeOptions,
    open_models: Callable[[], AbstractAsyncContextManager[Models | None]],
    open_remote: Callable[[], AbstractAsyncContextManager[RemoteModels | None]],
    open_app: Callable[[], AbstractAsyncContextManager[App | None]],
    open_peers: Callable[[], AbstractAsyncContextManager[Peers | None]],
    gatekeeper: Gatekeeper | None,
    admin: socket.socket | None,
    admin_port: socket.socket | None,
    store: ResponseStore | None,
    engines: EngineTable | None,
    announce: Callable[[Frontend], None],
) -> None:
    async with AsyncExitStack() as others:
        models = await others.enter_async_context(open_models())
        if models is not None and options.exit_on_error:
            _require_all(models)
        remote = await others.enter_async_context(open_remote())
        app = await others.enter_async_context(open_app())
        peers = await others.enter_async_context(open_peers())
        backends = () if backend is None else (backend,)
        frontend = Frontend(
            *backends,
            models=models,
            embedder=embedder,
            remote=remote,
            engines=engines,
            options=options.frontend,
            store=store,
            peers=peers,
        )
        others.push_async_callback(frontend.responses.close)
        others.callback(frontend.memory.close)
        metrics = Metrics(
            # Those of an engine that is not this process's alone are told by the engine's.
            engine=frontend.backends.stats if peers is None else None,
            watcher=lambda: default_watcher().stats(),
            frontend=frontend.stats,
            models=frontend.model_statistics,
            upstreams=None if remote is None else remote.upstreams,
            outcomes=lambda: frontend.outcomes,
            signals=lambda: frontend.ledger.signals,
            gather=None if peers is None else peers.metrics,
        )
        if options.node is not None:
            options.node.observe(metrics.registry)
        if peers is None:
            frontend.backends.listen(metrics.observe)
        else:
            peers.attach(frontend, metrics)
        for handler in logging.getLogger().handlers:
            handler.addFilter(frontend.log_settings)
        server = make_server(
            frontend,
            metrics,
            options,
            gatekeeper=gatekeeper,
            announce=lambda: announce(frontend),
            app=app,
        )
        scraped = create_metrics_app(metrics)
        await others.enter_async_context(
            _running(_config(scraped, NoUpgrades, options), metrics_socket)
        )
        # The same application, with the same ledger, by other doors, which are never too crowded.
        protocol = type("AdminProtocol", (server.config.http,), {"__slots__": (), "crowd": Crowd()})  # type: ignore[arg-type]
        if admin is not None:
            door = _config(AdminDoor(server.config.app), protocol, options)
            await others.enter_async_context(_running(door, admin))
        if admin_port is not None:
            port = _config(AdminPort(server.config.app), protocol, options)
            await others.enter_async_context(_running(port, admin_port))
        others.enter_context(rare_collections())
        await server.serve(sockets=[http])


def _require_all(models: Models) -> None:
    failed = [
        f"'{entry.name}' version {entry.version}: {entry.reason}"
        for entry in models.index()
        if entry.state == "UNAVAILABLE"
    ]
    if failed:
        raise ModelsFailedError(
            f"cannot load {'; '.join(failed)}; mend them, or serve the others with "
            "--exit-on-error false"
        )


@asynccontextmanager
async def _running(config: uvicorn.Config, sock: socket.socket) -> AsyncIterator[None]:
    """One more server on this loop, which knows nothing of signals."""
    server = uvicorn.Server(config)
    config.load()
    server.lifespan = config.lifespan_class(config)
    await server.startup(sockets=[sock])
    try:
        yield
    finally:
        await server.shutdown(sockets=[sock])


def _config(app: object, protocol: object, options: ServeOptions) -> uvicorn.Config:
    return uvicorn.Config(
        app,  # type: ignore[arg-type]
        http=protocol,  # type: ignore[arg-type]
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=options.keep_alive,
        # The last bound, should a connection outlive its abort.
        timeout_graceful_shutdown=math.ceil(options.grace + 2 * FLUSH),
    )
