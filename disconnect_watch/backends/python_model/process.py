"""A worker process as its server sees it: started, written to, read from, ended."""

import asyncio
import os
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import disconnect_watch
from disconnect_watch.backends.python_model.arena import Arena
from disconnect_watch.backends.python_model.messages import (
    MAX_PACKET_BYTES,
    Kind,
    decode,
    encode,
)
from disconnect_watch.token import flag_table

__all__ = ["WorkerProcess"]

#: Messages of one worker that are read before others have their turn.
MAX_READS = 16

_WORKER = "disconnect_watch.backends.python_model.worker"


class WorkerProcess:
    """One process, from its start to its end, of which there is exactly one notice.

    It is no fork of this process, whose threads would leave their locks behind in it, and
    it ends with this process: its socket then hangs up.

    Args:
        on_message: called with kind and body of each message; returns whether another is to be
            expected soon, which is then looked for.
        on_call: the same, for messages on the socket for calls of other models.
        on_exit: called once, with the exit status as ``Popen.returncode`` has it, behind
            the last message.

    Threads: the loop's only.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        on_message: Callable[[list[Any]], bool],
        on_call: Callable[[list[Any]], bool],
        on_exit: Callable[[int], None],
    ) -> None:
        self._loop = loop
        self._on_exit = on_exit
        self.has_ended = asyncio.Event()
        self.arena = Arena(is_server=True)
        with self.arena:
            ours, theirs = _socketpair()
            ours_calls, theirs_calls = _socketpair()
            with theirs, theirs_calls:
                fds = (
                    theirs.fileno(),
                    theirs_calls.fileno(),
                    self.arena.memfd,
                    flag_table().fileno(),
                )
                self._process = _spawn(fds)
        self.pid = self._process.pid
        self._pidfd = os.pidfd_open(self.pid)
        self._main = _Channel(loop, ours, self.arena, on_message)
        self._calls = _Channel(loop, ours_calls, self.arena, on_call)
        loop.add_reader(self._pidfd, self._exited)

    def send(self, kind: Kind, *body: Any) -> None:
        """Send a message; it waits here where the worker does not read."""
        self._main.send(kind, *body)

    def reply(self, *body: Any) -> None:
        """Send a response to a call."""
        self._calls.send(Kind.REPLY, *body)

    def kill(self) -> None:
        """End it at once, whatever it does. Idempotent."""
        if not self.has_ended.is_set():
            self._process.kill()

    async def close(self, grace: float) -> None:
        """Ask it to end, and end it if it has not after ``grace`` seconds. Idempotent."""
        if not self.has_ended.is_set():
            self.send(Kind.END, None)
        try:
            async with asyncio.timeout(grace):
                await self.has_ended.wait()
        except TimeoutError:
            self.kill()
            await self.has_ended.wait()

    def _exited(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        status = self._process.wait()
        for channel in (self._calls, self._main):
            channel.drain()
            channel.close()
        self.arena.release()
        self.has_ended.set()
        self._on_exit(status)


class _Channel:
    """One SEQPACKET socket to the worker."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        arena: Arena,
        on_message: Callable[[list[Any]], bool],
    ) -> None:
        self._loop = loop
        self._sock = sock
        self._arena = arena
        self._on_message = on_message
        self._buffer = bytearray(2 * MAX_PACKET_BYTES)
        self._view = memoryview(self._buffer)
        self._outbox: deque[bytes] = deque()
        sock.setblocking(False)
        loop.add_reader(sock, self._readable)

    def send(self, kind: Kind, *body: Any) -> None:
        packet = encode(self._arena, kind, *body)
        if self._sock.fileno() < 0:
            return
        if not self._outbox and self._try_send(packet):
            return
        if not self._outbox:
            self._loop.add_writer(self._sock, self._write)
        self._outbox.append(packet)

    def _try_send(self, packet: bytes) -> bool:
        try:
            self._sock.send(packet)
        except BlockingIOError:
            return False
        except (BrokenPipeError, ConnectionResetError):
            pass  # it has died, of which there is a notice
        return True

    def _write(self) -> None:
        while self._outbox and self._try_send(self._outbox[0]):
            self._outbox.popleft()
        if not self._outbox:
            self._loop.remove_writer(self._sock)

    def _readable(self) -> None:
        for _ in range(MAX_READS):
            message = self._read()
            if message is None or not self._on_message(message):
                return

    def _read(self) -> list[Any] | None:
        try:
            size = self._sock.recv_into(self._buffer)
        except BlockingIOError:
            return None
        except ConnectionResetError:
            size = 0
        if not size:
            self._loop.remove_reader(self._sock)
            return None
        return decode(self._arena, self._view[:size])

    def drain(self) -> None:
        """Read what it said before it ended."""
        while (message := self._read()) is not None:
            self._on_message(message)

    def close(self) -> None:
        self._loop.remove_reader(self._sock)
        self._loop.remove_writer(self._sock)
        self._sock.close()


def _socketpair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _spawn(fds: tuple[int, ...]) -> "subprocess.Popen[bytes]":
    root = str(Path(disconnect_watch.__file__).parents[1])
    path = os.environ.get("PYTHONPATH")
    return subprocess.Popen(
        [sys.executable, "-m", _WORKER, *map(str, fds)],
        stdin=subprocess.DEVNULL,
        pass_fds=fds,
        process_group=0,  # a Ctrl-C is for the server alone
        env={**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{path}" if path else root},
    )
