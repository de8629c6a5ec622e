"""The frontend for tests: as an application in this task, or as a server on a thread of its own."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import torch
import uvloop

from disconnect_watch.adapters.uvicorn import H11, HalfClose, HttpTools, h11, http_tools
from disconnect_watch.adapters.uvicorn._watched import WatchedProtocol
from disconnect_watch.backends import Backend
from disconnect_watch.backends.embedder import EmbedderBackend
from disconnect_watch.backends.engine import EngineBackend
from disconnect_watch.backends.repository import ModelRepository
from disconnect_watch.engine import (
    DEFAULT_MODEL,
    ChatTemplate,
    Engine,
    EngineConfig,
    ModelConfig,
    Outcome,
)
from disconnect_watch.engine.checkpoint import load_model
from disconnect_watch.engine.model import LlamaModel
from disconnect_watch.engine.tokenizer import Tokenizer
from disconnect_watch.keys import KeyRing
from disconnect_watch.server import (
    Frontend,
    FrontendOptions,
    Metrics,
    ServeOptions,
    bind,
    create_app,
)
from disconnect_watch.server.guard import Gatekeeper
from disconnect_watch.server.openai.responses.store import ResponseStore
from disconnect_watch.server.run import FrontendServer, make_server
from disconnect_watch.testing import ThreadedServer as ThreadedServer
from disconnect_watch.testing import serving
from disconnect_watch.watcher import Watcher
from tests.support.http import Client as Client
from tests.support.http import request_bytes as request_bytes
from tests.support.net import PATIENCE

LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}


@dataclass(frozen=True, slots=True)
class Stack:
    """A kind of event loop, and one of our protocols on it."""

    loop_name: str
    protocol: type[HttpTools | H11]

    def configured(self, **options: Any) -> type[HttpTools | H11]:
        """The protocol with a policy of its own."""
        return http_tools(**options) if self.protocol is HttpTools else h11(**options)

    def mixed(self, mixin: type[WatchedProtocol], **options: Any) -> type[HttpTools | H11]:
        """The protocol with methods of ``mixin`` before its own."""
        return type(mixin.__name__, (mixin, self.configured(**options)), {})

    def serving(
        self, app: Any, protocol: type[HttpTools | H11] | str | None = None, **options: Any
    ) -> AbstractContextManager["ThreadedServer"]:
        """``serving_app`` on this loop, under this protocol or another."""
        return serving_app(
            app, loop_name=self.loop_name, protocol=protocol or self.protocol, **options
        )

    def __str__(self) -> str:
        return f"{self.loop_name}-{self.protocol.__name__}"


STACKS = [Stack(loop_name, protocol) for protocol in (HttpTools, H11) for loop_name in LOOPS]


@cache
def packaged_model() -> tuple[LlamaModel, Tokenizer]:
    """The model of the package, loaded once."""
    config = ModelConfig.from_pretrained(DEFAULT_MODEL)
    model = load_model(DEFAULT_MODEL, config, dtype=torch.float32)
    return model, Tokenizer.from_pretrained(DEFAULT_MODEL)


def packaged_engine(**config: Any) -> Engine:
    """A new engine on the model of the package, which is loaded once for all tests."""
    model, tokenizer = packaged_model()
    settings = EngineConfig(num_blocks=1024, num_threads=1, **config)
    return Engine(model, tokenizer, config=settings)


def metrics_of(frontend: Frontend, watcher: Watcher | None = None) -> Metrics:
    """Metrics over a frontend's first backend, and its models."""
    if watcher is None:
        with Watcher(driver="loop") as idle:
            nothing = idle.stats()
    engine = next(iter(frontend.backends.values()), None)
    return Metrics(
        engine=engine.stats if engine is not None else None,
        watcher=lambda: nothing if watcher is None else watcher.stats(),
        frontend=frontend.stats,
        models=frontend.model_statistics,
        upstreams=frontend.remote.upstreams if frontend.remote is not None else None,
        outcomes=lambda: frontend.outcomes,
        signals=lambda: frontend.ledger.signals,
    )


async def request_app(
    target: Frontend | Backend, method: str, path: str, **options: Any
) -> httpx.Response:
    """One request to the application, without a server; the client stays to the end."""
    frontend = target if isinstance(target, Frontend) else Frontend(target)
    transport = httpx.ASGITransport(create_app(frontend, metrics_of(frontend)))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        return await client.request(method, path, **options)


async def post_json(
    target: Frontend | Backend,
    path: str,
    body: dict[str, Any] | bytes | AsyncIterator[bytes],
    **options: Any,
) -> httpx.Response:
    """One POST to the application, without a server."""
    content = json.dumps(body).encode() if isinstance(body, dict) else body
    return await request_app(target, "POST", path, content=content, **options)


@contextmanager
def serving_app(
    app: Any,
    *,
    loop_name: str = "uvloop",
    protocol: type[HttpTools | H11] | str = HttpTools,
    sock: socket.socket | None = None,
    **config: Any,
) -> Iterator[ThreadedServer]:
    """Any ASGI application under our protocol, over TCP or on a bound ``sock``."""
    config = {"ws": "none", "lifespan": "off", "timeout_graceful_shutdown": 5, **config}
    with serving(app, protocol=protocol, sock=sock, make_loop=LOOPS[loop_name], **config) as server:
        yield server


@contextmanager
def serving_frontend(frontend: Frontend, **options: Any) -> Iterator[ThreadedServer]:
    """The frontend's own server over any backend."""
    server = make_server(frontend, metrics_of(frontend), ServeOptions(**options))
    http = ThreadedServer(server, bind("127.0.0.1", 0), make_loop=LOOPS["uvloop"])
    try:
        yield http
    finally:
        http.stop()


@contextmanager
def serving_opened(
    opening: AbstractAsyncContextManager[Any], **options: Any
) -> Iterator[ThreadedServer]:
    """An application that is opened on the loop that serves it, as ``serve(open_app=)`` has it."""
    frontend = Frontend()
    with Watcher() as watcher:
        # The loop is not there yet.
        opened: dict[str, Any] = {}

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await opened["app"](scope, receive, send)

        server = make_server(
            frontend,
            metrics_of(frontend),
            ServeOptions(**{"grace": 0.2, **options}),
            watcher=watcher,
            app=app,
        )
        http = ThreadedServer(server, bind("127.0.0.1", 0), make_loop=LOOPS["uvloop"])

        def on_loop(coroutine: Any) -> Any:
            return asyncio.run_coroutine_threadsafe(coroutine, http.loop).result(PATIENCE)

        try:
            opened["app"] = on_loop(opening.__aenter__())
            yield http
        finally:
            on_loop(opening.__aexit__(None, None, None))
            http.stop()


@dataclass
class Serving:
    """The whole frontend over an engine, and all its ledgers.

    Attributes:
        outcomes: by request id, as the engine told them: one each, or this is a failure.
    """

    http: ThreadedServer
    engine: Engine
    backend: EngineBackend
    frontend: Frontend
    watcher: Watcher
    metrics: Metrics
    outcomes: dict[str, list[Outcome]]
    gatekeeper: Gatekeeper

    @property
    def port(self) -> int:
        return self.http.port

    def is_idle(self) -> bool:
        """Whether nothing is left of any request: in the engine, the frontend, the watcher."""
        stats = self.backend.stats()
        return (
            stats.num_waiting == stats.num_running == 0
            and stats.num_blocks_available == stats.num_blocks
            and self.engine.block_ledger == {}
            and self.frontend.stats().num_live == 0
            and self.watcher.stats().num_armed == 0
        )


def with_models(
    kind: type[FrontendServer], frontend: Frontend, directory: Path
) -> type[FrontendServer]:
    """The server with a model repository, which lives on its loop and as long as it serves."""

    class Server(kind):  # type: ignore[misc, valid-type]
        async def serve(self, sockets: list[socket.socket] | None = None) -> None:
            async with ModelRepository(directory) as models:
                frontend.models = models
                await super().serve(sockets)

    return Server


@contextmanager
def serving_engine(
    engine: Engine,
    *,
    loop_name: str = "uvloop",
    half_close: HalfClose = "disconnect",
    grace: float = 5.0,
    max_body_bytes: int = 1 << 26,
    request_timeout: float | None = None,
    keys: KeyRing | None = None,
    send_buffer: int | None = None,
    embedder: EmbedderBackend | None = None,
    store: ResponseStore | None = None,
    repository: Path | None = None,
    cancel_bound: float = 30.0,
) -> Iterator[Serving]:
    """The frontend with a watcher of its own, as ``serve`` puts it together."""
    watcher = Watcher()
    backend = EngineBackend(
        engine, name="tiny", chat_template=ChatTemplate.from_pretrained(DEFAULT_MODEL)
    )
    options = FrontendOptions(
        max_body_bytes=max_body_bytes, request_timeout=request_timeout, cancel_bound=cancel_bound
    )
    frontend = Frontend(backend, embedder=embedder, options=options, store=store)
    gatekeeper = Gatekeeper(keys)
    metrics = metrics_of(frontend, watcher)
    outcomes: dict[str, list[Outcome]] = {}
    backend.listen(metrics.observe)
    backend.listen(lambda request_id, outcome: outcomes.setdefault(request_id, []).append(outcome))
    server = make_server(
        frontend,
        metrics,
        ServeOptions(grace=grace, half_close=half_close),
        watcher=watcher,
        gatekeeper=gatekeeper,
    )
    if repository is not None:
        server.__class__ = with_models(type(server), frontend, repository)
    sock = bind("127.0.0.1", 0)
    if send_buffer is not None:  # connections have it from the socket that they come by
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    http = ThreadedServer(server, sock, make_loop=LOOPS[loop_name])
    try:
        yield Serving(http, engine, backend, frontend, watcher, metrics, outcomes, gatekeeper)
    finally:
        http.stop()
        backend.close()
        watcher.close()
