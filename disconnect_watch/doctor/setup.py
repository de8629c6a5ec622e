"""The ways to serve an application that the trial compares: servers alone, and with an adapter."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from disconnect_watch.adapters.asgi import CancelOnDisconnect, how_found
from disconnect_watch.doctor.installed import version_of
from disconnect_watch.ports import bind, listen
from disconnect_watch.testing import Server, serving
from disconnect_watch.testing.server import our_protocol

__all__ = ["SERVERS", "Setup", "hosting", "setups_of"]

#: Those that can be run on a thread of the doctor's.
SERVERS = ("uvicorn", "hypercorn")

_ASGI = "disconnect_watch.adapters.asgi"


@dataclass(frozen=True, slots=True)
class Setup:
    """One way to serve an application.

    Attributes:
        server: one of ``SERVERS``.
        protocol: for uvicorn's ``http``.
        is_wrapped: whether ``adapters.asgi.CancelOnDisconnect`` is outermost.
    """

    server: str
    protocol: str = "auto"
    is_wrapped: bool = False

    @property
    def is_watched(self) -> bool:
        """Whether an adapter of ours is in it."""
        return self.is_wrapped or self.protocol != "auto"

    @property
    def name(self) -> str:
        """For the report."""
        if self.is_wrapped:
            return f"{self.server} with {_ASGI}:CancelOnDisconnect"
        return f"{self.server} {'alone' if self.protocol == 'auto' else f'with {self.protocol}'}"

    @property
    def advice(self) -> str:
        """How an adapter is put into this server."""
        if self.server == "uvicorn":
            return f"uvicorn ... --http {our_protocol()}"
        return f"CancelOnDisconnect(app), of {_ASGI}"


def setups_of(protocol: str, servers: tuple[str, ...] = SERVERS) -> list[Setup]:
    """Each server that is installed, alone and with what we have for it."""
    found = []
    for server in servers:
        if version_of(server) is None:
            continue
        found.append(Setup(server))
        if server == "uvicorn":
            found.append(Setup(server, protocol))
        found.append(Setup(server, is_wrapped=True))
    return found


@contextlib.contextmanager
def hosting(
    app: Any, setup: Setup, *, lifespan: str, on_found: Callable[[str], object]
) -> Iterator[Server]:
    """Serve on a free port of loopback; gives what a client can be sent to.

    Args:
        app: the application.
        setup: how.
        lifespan: "on" or "off".
        on_found: called for each request with how ``CancelOnDisconnect`` finds its connection.

    Raises:
        RuntimeError: the application's start-up failed.
    """
    if setup.is_wrapped:
        app = _wrapped(app, on_found)
    if setup.server == "hypercorn":
        with _hypercorn(app if lifespan == "on" else _without_lifespan(app)) as address:
            yield address
        return
    with serving(
        app, protocol=setup.protocol, lifespan=lifespan, ws="none", log_level="critical"
    ) as server:
        yield server


def _wrapped(app: Any, on_found: Callable[[str], object]) -> Any:
    inner = CancelOnDisconnect(app)

    async def outermost(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            # Here, since further in a middleware may hide what the server called with.
            on_found(how_found(scope, receive, send))
        await inner(scope, receive, send)

    return outermost


def _without_lifespan(app: Any) -> Any:
    async def http_alone(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            raise NotImplementedError("no lifespan")  # hypercorn goes on without it
        await app(scope, receive, send)

    return http_alone


@contextlib.contextmanager
def _hypercorn(app: Any) -> Iterator[tuple[str, int]]:
    from hypercorn.asyncio import serve
    from hypercorn.config import Config

    sock = bind("127.0.0.1", 0)
    listen(sock)
    address: tuple[str, int] = sock.getsockname()[:2]
    config = Config()
    config.bind = [f"fd://{sock.detach()}"]  # hypercorn's own from here on
    config.errorlog = None
    config.graceful_timeout = 1
    loop, stop = asyncio.new_event_loop(), asyncio.Event()
    # hypercorn ends by cancelling connections, which asyncio reports before Python 3.12.
    loop.set_exception_handler(lambda _, context: None)
    failures: list[BaseException] = []

    def run() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            try:
                runner.run(serve(app, config, shutdown_trigger=stop.wait))
            except Exception as error:  # the start-up's
                failures.append(error)

    thread = threading.Thread(target=run, name="doctor-hypercorn")
    thread.start()
    try:
        yield address
    finally:
        with contextlib.suppress(RuntimeError):  # the loop has ended by itself
            loop.call_soon_threadsafe(stop.set)
        thread.join(20)
        if failures:
            raise RuntimeError(f"hypercorn did not start: {failures[0]!r}")
