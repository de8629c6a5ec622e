"""A process of a fleet as its supervisor sees it."""

import asyncio
import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import disconnect_watch
from disconnect_watch.server.fleet.channel import Channel
from disconnect_watch.server.fleet.setup import Start

__all__ = ["Child"]


class Child:
    """One process, from its start to its end, of which there is exactly one notice.

    It is no fork of this process, and ends with it: its channel then hangs up. A Ctrl-C is not
    for it, but for the supervisor alone.

    Args:
        module: what it runs.
        start: its first message.
        on_exit: called once, with this.

    Attributes:
        is_ready: whether it has said that it serves.
        refusal: why it can't, in its own words.
        link_id: of its link to the engine; of a frontend only.

    Threads: the loop's only.
    """

    def __init__(
        self, module: str, start: Start, *, index: int, on_exit: Callable[["Child"], object]
    ) -> None:
        self.index = index
        self.is_ready = False
        self.refusal = ""
        self.link_id: int | None = None
        self.has_ended = asyncio.Event()
        self.status = 0
        self._on_exit = on_exit
        self._loop = asyncio.get_running_loop()
        self._channel: Channel | None = None
        self._control, theirs = socket.socketpair()
        self._links, their_links = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, their_links:
            fds = (theirs.fileno(), their_links.fileno())
            self._process = _spawn(module, fds, (*fds, *start.fds.values()))
        self.pid = self._process.pid
        self._pidfd = os.pidfd_open(self.pid)
        packed = pickle.dumps(start)
        with contextlib.suppress(OSError):  # it has died, of which there is a notice
            self._control.sendall(len(packed).to_bytes(4, "little") + packed)
        self._links.setblocking(False)
        self._loop.add_reader(self._pidfd, self._exited)

    async def open(self, handler: Callable[["Child", str, list[Any]], Awaitable[Any]]) -> None:
        """Hear what it says from now on."""

        def handle(name: str, body: list[Any]) -> Awaitable[Any]:
            return handler(self, name, body)

        self._channel = await Channel.open(self._control, handle, lambda: None)
        if self.has_ended.is_set():
            self._channel.close()

    @property
    def channel(self) -> Channel:
        """To ask it by."""
        assert self._channel is not None
        return self._channel

    def give(self, link_id: int, sock: socket.socket) -> None:
        """Hand it its end of a link."""
        with contextlib.suppress(OSError):  # it has died, of which there is a notice
            socket.send_fds(self._links, [link_id.to_bytes(8, "little")], [sock.fileno()])

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal, if it is there."""
        if not self.has_ended.is_set():
            self._process.send_signal(number)

    async def end(self, within: float) -> None:
        """Wait for its end, and bring it about if it has not come after so many seconds."""
        try:
            async with asyncio.timeout(within):
                await self.has_ended.wait()
        except TimeoutError:
            self.signal(signal.SIGKILL)
            await self.has_ended.wait()

    def _exited(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self.status = self._process.wait()
        self._links.close()
        # What it said at last may not have been heard yet.
        self._loop.call_later(0.0, self._finish)

    def _finish(self) -> None:
        if self._channel is not None:
            self._channel.close()
        self.has_ended.set()
        self._on_exit(self)


def _spawn(
    module: str, fds: tuple[int, ...], inherited: tuple[int, ...]
) -> "subprocess.Popen[bytes]":
    root = str(Path(disconnect_watch.__file__).parents[1])
    path = os.environ.get("PYTHONPATH")
    return subprocess.Popen(
        [sys.executable, "-m", module, *map(str, fds)],
        stdin=subprocess.DEVNULL,
        pass_fds=inherited,
        process_group=0,
        env={**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{path}" if path else root},
    )
