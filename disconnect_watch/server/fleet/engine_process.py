"""The engine's process: ``python -m disconnect_watch.server.fleet.engine_process FD FD``."""

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable
from typing import Any

import uvloop

from disconnect_watch.backends.engine import EngineBackend
from disconnect_watch.backends.remote_engine.server import EngineServer
from disconnect_watch.engine import CheckpointError
from disconnect_watch.server.fleet.channel import Channel
from disconnect_watch.server.fleet.processes import begin
from disconnect_watch.server.fleet.setup import EngineSetup
from disconnect_watch.server.metrics import Metrics

__all__ = ["main"]

#: Seconds in which frontends hear the last of an engine that ends.
LAST_WORDS = 2.0


def main(prepare: Callable[[EngineBackend], object] = lambda _: None) -> None:
    """Serve until the supervisor says that it is enough, or is gone.

    Args:
        prepare: called with the engine before it serves.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    start, control, links = begin()
    with start.sockets(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        raise SystemExit(runner.run(_run(start.setup.engine, control, links, prepare)))


async def _run(
    setup: EngineSetup,
    control: socket.socket,
    links: socket.socket,
    prepare: Callable[[EngineBackend], object],
) -> int:
    process = _Process()
    process.channel = await Channel.open(control, process.answer, process.ended.set)
    try:
        backend = await asyncio.to_thread(
            EngineBackend.from_pretrained,
            setup.path,
            name=setup.name,
            config=setup.config,
            chat_template=setup.chat_template,
        )
    except (CheckpointError, ValueError, OSError) as error:
        await process.channel.ask("refused", str(error))
        return 2
    try:
        prepare(backend)
        return await process.serve(backend, links)
    finally:
        await asyncio.to_thread(backend.close)


class _Process:
    def __init__(self) -> None:
        self.ended = asyncio.Event()
        self.channel: Channel
        self._metrics: Metrics | None = None
        self._status = 0
        self._adding: set[asyncio.Task[None]] = set()

    async def answer(self, name: str, body: list[Any]) -> Any:
        if name == "metrics":
            return self._metrics.render().decode() if self._metrics is not None else ""
        assert name == "end", name
        self.ended.set()
        return None

    async def serve(self, backend: EngineBackend, links: socket.socket) -> int:
        """Until the end; returns the exit status."""
        self._metrics = Metrics(engine=backend.stats, watcher=None, frontend=None)
        backend.listen(self._metrics.observe)
        server = EngineServer(
            backend,
            on_drained=lambda link_id: self.channel.tell("drained", link_id),
            on_failed=self._fail,
        )
        loop = asyncio.get_running_loop()
        links.setblocking(False)
        loop.add_reader(links, self._take_link, links, server)
        self.channel.tell("ready")
        try:
            await self.ended.wait()
        finally:
            loop.remove_reader(links)
            server.close()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_WORDS):
                    await server.wait_closed()
        self.channel.close()
        return self._status

    def _fail(self) -> None:
        """The engine's thread has died; another process does better than this one can."""
        self._status = 1
        self.ended.set()

    def _take_link(self, links: socket.socket, server: EngineServer) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(links, 8, 1)
        except BlockingIOError:
            return
        if not fds:
            asyncio.get_running_loop().remove_reader(links)
            return
        link_id = int.from_bytes(data, "little")
        task = asyncio.get_running_loop().create_task(
            server.add(link_id, socket.socket(fileno=fds[0]))
        )
        self._adding.add(task)
        task.add_done_callback(self._adding.discard)


if __name__ == "__main__":
    main()
