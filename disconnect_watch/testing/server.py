"""An ASGI application under uvicorn, on a thread and a loop of its own. Needs uvicorn."""

import asyncio
import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from disconnect_watch.ports import bind
from disconnect_watch.testing.waiting import wait_until

if TYPE_CHECKING:
    import uvicorn

__all__ = ["ThreadedServer", "our_protocol", "serving"]

_GRACE = 1  # seconds


def our_protocol() -> str:
    """What ``uvicorn --http`` takes: the protocol that watches its connections."""
    name = "HttpTools" if find_spec("httptools") else "H11"
    return f"disconnect_watch.adapters.uvicorn:{name}"


class ThreadedServer:
    """A uvicorn server on a thread of its own; serves from its making to ``stop``.

    Args:
        server: one that does not serve yet.
        sock: bound; closed by ``stop``.
        make_loop: for its loop.

    Attributes:
        loop: the server's; call into it with ``call_soon_threadsafe``.
    """

    def __init__(
        self,
        server: "uvicorn.Server",
        sock: socket.socket,
        *,
        make_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop,
    ) -> None:
        from disconnect_watch.testing._prompt import made_prompt  # which needs uvicorn

        self.server = server
        self.sock = sock
        self.loop = make_loop()
        self._server = made_prompt(server)
        self._thread = threading.Thread(target=self._run, name="test-server")
        self._thread.start()
        wait_until(lambda: server.started or not self._thread.is_alive(), 60)
        if not server.started:
            self.stop()
            raise RuntimeError("the server did not start; uvicorn's log says why")

    @property
    def port(self) -> int:
        """Of a TCP server."""
        port: int = self.sock.getsockname()[1]
        return port

    @property
    def url(self) -> str:
        """What clients are to be given."""
        if self.sock.family == socket.AF_UNIX:
            return f"unix:{self.sock.getsockname()}"
        host, port = self.sock.getsockname()[:2]
        scheme = "https" if self.server.config.is_ssl else "http"
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    def stop(self) -> None:
        """An orderly end, as by a signal. Idempotent."""
        self.server.should_exit = True
        with contextlib.suppress(RuntimeError):  # the loop has ended by itself
            self.loop.call_soon_threadsafe(self._server.tell_to_stop)
        self._thread.join(60)
        assert not self._thread.is_alive(), "the server did not stop"
        self.sock.close()

    def block_loop(self) -> Callable[[], None]:
        """Keep the loop busy until the returned function is called."""
        is_blocked, release = threading.Event(), threading.Event()

        def block() -> None:
            is_blocked.set()
            release.wait(60)

        self.loop.call_soon_threadsafe(block)
        assert is_blocked.wait(40)
        return release.set

    def _run(self) -> None:
        with (
            asyncio.Runner(loop_factory=lambda: self.loop) as runner,
            contextlib.suppress(SystemExit),  # by which uvicorn says that start-up failed
        ):
            runner.run(self._server.serve(sockets=[self.sock]))


@contextlib.contextmanager
def serving(
    app: Any,
    *,
    protocol: Any = None,
    sock: socket.socket | None = None,
    make_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop,
    **config: Any,
) -> Iterator[ThreadedServer]:
    """Serve an ASGI application over loopback for the length of a block.

    Args:
        app: the application.
        protocol: for uvicorn's ``http``; without it ours, "auto" is uvicorn's own.
        sock: bound; without it a free TCP port.
        make_loop: for the server's loop.
        config: more of ``uvicorn.Config``, such as ``lifespan="off"``.

    Raises:
        ImportError: there is no uvicorn.
        RuntimeError: the application failed to start.
    """
    import uvicorn

    settings = {
        "http": protocol or our_protocol(),
        "log_config": None,
        "access_log": False,
        "timeout_graceful_shutdown": _GRACE,
        **config,
    }
    with _levels_kept():
        server = uvicorn.Server(uvicorn.Config(app, **settings))
        threaded = ThreadedServer(server, sock or bind("127.0.0.1", 0), make_loop=make_loop)
        try:
            yield threaded
        finally:
            threaded.stop()


@contextlib.contextmanager
def _levels_kept() -> Iterator[None]:
    """A ``log_level`` sets the levels of uvicorn's loggers, for the rest of the process."""
    loggers = [logging.getLogger(f"uvicorn.{name}") for name in ("error", "access", "asgi")]
    levels = [logger.level for logger in loggers]
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
