"""The parent of a fleet: starts its processes, starts again what has ended, and ends all."""

import asyncio
import itertools
import logging
import signal
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

from disconnect_watch.errors import DisconnectWatchError
from disconnect_watch.ports import listen
from disconnect_watch.server.fleet.child import Child
from disconnect_watch.server.fleet.hub import Hub
from disconnect_watch.server.fleet.links import Links
from disconnect_watch.server.fleet.setup import FleetSetup, Start
from disconnect_watch.server.openai.responses.store import ResponseStore
from disconnect_watch.token import flag_table

__all__ = ["FleetError", "supervise"]

#: What the processes run.
ENGINE_MODULE = "disconnect_watch.server.fleet.engine_process"
FRONTEND_MODULE = "disconnect_watch.server.fleet.frontend_process"

#: The engine's place among the children; frontends have theirs from 0.
ENGINE = -1

#: Seconds beside the grace time that a process has to end.
END_WITHIN = 15.0

#: Seconds before what has ended is started again: doubled each time that it did not live long.
FIRST_DELAY, LAST_DELAY, LONG_LIFE = 0.05, 10.0, 30.0

logger = logging.getLogger("disconnect_watch.server")


class FleetError(DisconnectWatchError):
    """A fleet that cannot begin to serve."""


def supervise(
    setup: FleetSetup,
    sockets: Mapping[str, socket.socket],
    store: ResponseStore,
    *,
    announce: Callable[[], None] = lambda: None,
) -> None:
    """Serve until SIGTERM or SIGINT; returns after an orderly end.

    Args:
        sockets: bound, by the names that ``serve`` has for them.
        store: of responses; closed at the end.
        announce: called once requests are taken.

    Raises:
        OSError: says on which address it cannot listen.
        FleetError: says what can't be served, and why.

    Threads: the main thread, which gets the signals.
    """
    for sock in sockets.values():
        if sock.family == socket.AF_UNIX:
            sock.listen()
        else:
            listen(sock)
    asyncio.run(Supervisor(setup, sockets, store, announce).run())


class Supervisor:
    """See ``supervise``."""

    def __init__(
        self,
        setup: FleetSetup,
        sockets: Mapping[str, socket.socket],
        store: ResponseStore,
        announce: Callable[[], None],
    ) -> None:
        self._setup = setup
        self._sockets = sockets
        self._announce = announce
        self._table = flag_table()
        self._children: dict[int, Child] = {}
        self._born: dict[int, float] = {}
        self._num_short_lives: dict[int, int] = {}
        self._link_ids = itertools.count(1)
        self._links = Links()
        self._has_served = False
        self._stopping = asyncio.Event()
        self._failure: str | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._hub = Hub(self._ready, store)

    async def run(self) -> None:
        """Until the end of all."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop)
        try:
            for index in range(ENGINE, self._setup.num_frontends):
                await self._start(index)
            await self._stopping.wait()
        finally:
            await self._end()
        if self._failure is not None:
            raise FleetError(self._failure)

    def _stop(self) -> None:
        """Begin to end; the second time, frontends end without grace."""
        self._stopping.set()
        for index, child in self._children.items():
            if index != ENGINE:
                child.signal(signal.SIGTERM)

    async def _end(self) -> None:
        self._stopping.set()
        frontends = [child for index, child in self._children.items() if index != ENGINE]
        for child in frontends:
            if not child.is_ready:
                child.signal(signal.SIGKILL)  # it has no request yet
        grace = self._setup.frontend.options.grace
        await asyncio.gather(*(child.end(grace + END_WITHIN) for child in frontends))
        engine = self._children.get(ENGINE)
        if engine is not None:
            if engine.is_ready:
                engine.channel.tell("end")
            else:
                engine.signal(signal.SIGKILL)
            await engine.end(END_WITHIN)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._table.reclaim()
        await self._hub.close()

    async def _start(self, index: int) -> None:
        fds = {"table": self._table.fileno()}
        if index != ENGINE:
            fds |= {name: sock.fileno() for name, sock in self._sockets.items()}
        module = ENGINE_MODULE if index == ENGINE else FRONTEND_MODULE
        child = Child(module, Start(self._setup, fds), index=index, on_exit=self._exited)
        self._children[index] = child
        self._born[index] = time.monotonic()
        await child.open(self._hear)
        if index != ENGINE:
            self._link(child)

    def _ready(self) -> list[Child]:
        return [child for child in self._children.values() if child.is_ready]

    async def _hear(self, child: Child, name: str, body: list[Any]) -> Any:
        if name == "ready":
            self._has_come(child)
        elif name == "refused":
            child.refusal = body[0]
        elif name == "drained":
            self._links.drained(body[0])
            self._reclaim()
        else:
            return await self._hub.answer(child, name, body)
        return None

    def _has_come(self, child: Child) -> None:
        child.is_ready = True
        if child.index == ENGINE:
            for other in self._children.values():
                if other.index != ENGINE:
                    self._link(other)
        if not self._has_served and len(self._ready()) == self._setup.num_frontends + 1:
            self._has_served = True
            self._announce()

    def _link(self, frontend: Child) -> None:
        """Let a frontend and the engine speak to each other, if both are there."""
        engine = self._children.get(ENGINE)
        if engine is None or not engine.is_ready:
            return
        frontend.link_id = next(self._link_ids)
        self._links.made(frontend.link_id)
        ours, theirs = socket.socketpair()
        with ours, theirs:
            engine.give(frontend.link_id, ours)
            frontend.give(frontend.link_id, theirs)

    def _exited(self, child: Child) -> None:
        del self._children[child.index]
        self._hub.forget(child)
        if child.index == ENGINE:
            self._links.engine_ended()
            for other in self._children.values():
                other.link_id = None
        elif child.link_id is not None:
            self._links.orphaned(child.link_id)
        self._reclaim()
        if self._stopping.is_set():
            return
        if not self._has_served:
            what = "the engine" if child.index == ENGINE else "a frontend"
            self._failure = child.refusal or f"{what} ended before it served, status {child.status}"
            self._stop()
            return
        logger.error(
            "the engine ended" if child.index == ENGINE else "a frontend ended",
            extra={"pid": child.pid, "exit_status": child.status, "index": child.index},
        )
        task = asyncio.get_running_loop().create_task(self._start_again(child.index))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _start_again(self, index: int) -> None:
        if time.monotonic() - self._born[index] > LONG_LIFE:
            self._num_short_lives[index] = 0
        while not self._stopping.is_set():
            number = self._num_short_lives.get(index, 0)
            self._num_short_lives[index] = number + 1
            await asyncio.sleep(min(LAST_DELAY, FIRST_DELAY * 2**number))
            if self._stopping.is_set() or await self._is_started(index):
                return

    async def _is_started(self, index: int) -> bool:
        """Start it; False if the system has no room for a process now."""
        try:
            await self._start(index)
        except OSError as error:
            if index not in self._children:
                logger.error("cannot start a process", extra={"index": index, "why": str(error)})
                return False
            # It has died at once, of which there is a notice.
        return True

    def _reclaim(self) -> None:
        """Take back the flags of the dead, when no step can touch them any more."""
        if self._links.are_quiet():
            self._table.reclaim()
