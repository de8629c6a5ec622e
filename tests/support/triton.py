"""The small server of ``triton_server`` as a process, and the gateway before it."""

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from disconnect_watch.backends.triton import (
    Connecting,
    Endpoint,
    HeaderPassing,
    TritonRepository,
)
from disconnect_watch.server import Frontend, FrontendOptions, Metrics, ServeOptions, bind
from disconnect_watch.server.run import make_server
from disconnect_watch.watcher import Watcher
from tests.support.net import PATIENCE, wait_until
from tests.support.serve import LOOPS, Client, ThreadedServer, metrics_of

#: Runs the server, and has the kernel kill it should this process die before it.
_LAUNCH = """
import ctypes, os, runpy, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() == int(sys.argv.pop(1)):
    runpy.run_module("tests.support.triton_server", run_name="__main__", alter_sys=True)
"""


class TritonProcess:
    """A server of its own.

    Attributes:
        events: what it said so far.
    """

    def __init__(self, *options: str) -> None:
        self.events: list[dict[str, Any]] = []
        self.process = subprocess.Popen(
            [sys.executable, "-c", _LAUNCH, str(os.getpid()), *options],
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def wait_until_it_serves(self) -> None:
        wait_until(lambda: self.events or self.process.poll() is not None, 2 * PATIENCE)
        assert self.process.poll() is None

    @property
    def port(self) -> int:
        port: int = self.events[0]["port"]
        return port

    def of(self, event: str, **fields: Any) -> list[dict[str, Any]]:
        """The events of a kind that have these fields."""
        return [
            each
            for each in list(self.events)
            if each["event"] == event and fields.items() <= each.items()
        ]

    def wait_for(self, event: str, **fields: Any) -> dict[str, Any]:
        """The one event of a kind that has these fields, as soon as it is told."""
        wait_until(lambda: self.of(event, **fields))
        (found,) = self.of(event, **fields)
        return found

    def kill(self) -> None:
        """End it as by the kernel, connections and all. Idempotent."""
        self.process.kill()
        self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.events.append(json.loads(line))


@contextlib.contextmanager
def triton(*options: str) -> Iterator[TritonProcess]:
    """A server that is ready; killed at the end."""
    process = TritonProcess(*options)
    try:
        process.wait_until_it_serves()
        yield process
    finally:
        process.kill()


@contextlib.contextmanager
def shared_triton() -> Iterator[TritonProcess]:
    """A server for all tests of a module, to be there before the first of them.

    gRPC makes threads and fds as it comes to need them, and has them as long as it has a
    channel: what it needs for a stream and a cancel is made here.
    """
    with triton() as process, serving_gateway(process.port) as gateway:
        with Client(gateway.port) as client:
            path = "/v2/models/stream/generate_stream"
            client.post(path, {"INPUT0": 1, "then": "wait", "id": "first"})
            client.read_until(b"\n\n")
        process.wait_for("cancelled", id="first")
        yield process


@dataclass
class Gateway:
    """The frontend before some Tritons, under the server that the command runs."""

    http: ThreadedServer
    frontend: Frontend
    remote: TritonRepository
    metrics: Metrics

    @property
    def port(self) -> int:
        return self.http.port

    def on_loop(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run something on the server's loop, to its end."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.http.loop).result(PATIENCE)

    def is_idle(self) -> bool:
        """Whether nothing is left of any request."""
        outstanding = sum(upstream.num_outstanding for upstream in self.remote.upstreams())
        return not outstanding and not self.frontend.stats().num_live

    def num_ready(self) -> int:
        """How many of the Tritons are ready."""
        return sum(upstream.is_ready for upstream in self.remote.upstreams())


@contextlib.contextmanager
def serving_gateway(
    *ports: int,
    is_secure: bool = False,
    ready: int | None = None,
    connecting: Connecting | None = None,
    passing: HeaderPassing | None = None,
    max_age: float = 5.0,
    serve: ServeOptions | None = None,
    **options: Any,
) -> Iterator[Gateway]:
    """The gateway to Tritons on these ports.

    Args:
        ready: how many of them to wait for; all unless it is said.
        serve: in which its frontend's are ``options``.
    """
    host = "localhost" if is_secure else "127.0.0.1"
    remote = TritonRepository(
        [Endpoint(host, port, is_secure) for port in ports],
        connecting=connecting or Connecting(probe_seconds=0.2),
        passing=passing,
        max_age=max_age,
        patience=0,
    )
    frontend = Frontend(remote=remote, options=FrontendOptions(**options))
    watcher = Watcher()
    metrics = metrics_of(frontend, watcher)
    server = make_server(frontend, metrics, serve or ServeOptions(), watcher=watcher)
    serve_http = server.serve

    async def serve_all(sockets: list[socket.socket] | None = None) -> None:
        async with remote:
            await serve_http(sockets)

    server.serve = serve_all  # type: ignore[method-assign]
    http = ThreadedServer(server, bind("127.0.0.1", 0), make_loop=LOOPS["uvloop"])
    gateway = Gateway(http, frontend, remote, metrics)
    try:
        wait_until(lambda: gateway.num_ready() >= (len(ports) if ready is None else ready))
        yield gateway
        wait_until(gateway.is_idle)
    finally:
        http.stop()
        watcher.close()
