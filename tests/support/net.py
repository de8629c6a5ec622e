"""Real connections over loopback, and every way in which a client leaves them."""

import array
import asyncio
import contextlib
import fcntl
import os
import select
import socket
import subprocess
import tempfile
import termios
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import cast

from disconnect_watch import Reason, testing
from disconnect_watch.ports import bind
from disconnect_watch.testing import Way
from disconnect_watch.testing.child import hand_to_child
from disconnect_watch.testing.vanish import vanish
from disconnect_watch.testing.ways import part, parting_bytes

__all__ = [
    "KINDS",
    "LEAVES",
    "PATIENCE",
    "POLLERS",
    "Leave",
    "Pair",
    "connected",
    "dial",
    "fill",
    "held_port",
    "listener",
    "open_fds",
    "options_of",
    "reset",
    "streams",
    "transport_of",
    "unread_bytes",
    "until",
    "vanish",
    "wait_until",
]

#: Seconds for what must come true: so long that only a test that hangs needs them, also
#: on a machine that is shared by many.
PATIENCE = 40.0

KINDS = ("tcp", "tcp6", "unix")
POLLERS = ("epoll", "poll")

_FAMILIES = {"tcp": socket.AF_INET, "tcp6": socket.AF_INET6, "unix": socket.AF_UNIX}
_HOSTS = {"tcp": "127.0.0.1", "tcp6": "::1"}


@dataclass(slots=True)
class Pair:
    """The two ends of one connection; both are closed with the pair."""

    kind: str
    server: socket.socket
    client: socket.socket
    _children: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def leave(self, way: str) -> None:
        """Let the client leave, or half-leave, in one of the ``LEAVES``."""
        LEAVES[way].act(self)

    def hold_in_child(self) -> subprocess.Popen[bytes]:
        """Hand the client's end to a process of its own; returns that process."""
        child = hand_to_child(self.client)
        self._children.append(child)
        return child

    def close(self) -> None:
        for child in self._children:
            child.kill()
            child.wait()
        self.client.close()
        self.server.close()


def wait_until(predicate: Callable[[], object], timeout: float = PATIENCE) -> None:
    """``testing.wait_until`` with our patience."""
    testing.wait_until(predicate, timeout)


async def until(predicate: Callable[[], object], within: float = PATIENCE) -> None:
    """``testing.until`` with our patience."""
    await testing.until(predicate, within)


@contextlib.contextmanager
def listener(kind: str) -> Iterator[socket.socket]:
    """A listening socket of ``kind`` on loopback, port chosen by the kernel.

    Skips the test where a machine has no IPv6, as many a container has none.
    """
    with (
        tempfile.TemporaryDirectory() as directory,
        socket.socket(_FAMILIES[kind]) as listening,
    ):
        try:
            listening.bind(f"{directory}/s" if kind == "unix" else (_HOSTS[kind], 0))
        except OSError as error:
            if kind == "tcp6":
                import pytest  # not for every process that opens a connection

                pytest.skip(f"this machine has no IPv6 loopback: {error}")
            raise
        listening.listen(16)
        yield listening


@contextlib.contextmanager
def held_port() -> Iterator[int]:
    """A TCP port of 127.0.0.1 for a server that can only be told a number.

    A port that is merely known to have been free may be anybody's by the time the server
    is there. One that is bound is given to nobody, but a server that sets ``SO_REUSEADDR``,
    as all do, may bind it, too, and listen, which we do not.
    """
    with bind("127.0.0.1", 0) as held:
        yield held.getsockname()[1]


@contextlib.contextmanager
def connected(kind: str = "tcp") -> Iterator[Pair]:
    """A connected pair of blocking sockets."""
    with listener(kind) as listening:
        client = dial(listening)
        server, _ = listening.accept()
        pair = Pair(kind, server, client)
        try:
            yield pair
        finally:
            pair.close()


def dial(listening: socket.socket) -> socket.socket:
    """A blocking client connected to a listening socket."""
    client = socket.socket(listening.family)
    client.settimeout(PATIENCE)
    client.connect(listening.getsockname())
    return client


@contextlib.asynccontextmanager
async def streams(
    pair: Pair,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """The server's end of a pair as streams of the running loop, closed at the end."""
    open_ = asyncio.open_unix_connection if pair.kind == "unix" else asyncio.open_connection
    reader, writer = await open_(sock=pair.server)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def transport_of(writer: asyncio.StreamWriter) -> asyncio.Transport:
    """A stream's transport, which typeshed takes for one that only writes."""
    return cast("asyncio.Transport", writer.transport)


def unread_bytes(sock: socket.socket | int) -> int:
    """How much waits in the kernel's receive queue."""
    count = array.array("i", [0])
    fcntl.ioctl(sock, termios.FIONREAD, count)
    return count[0]


#: Every option that an opt-in may set, and one that none may; what is missing in
#: ``socket`` is Linux's own number.
_OPTIONS = {
    "SO_KEEPALIVE": (socket.SOL_SOCKET, socket.SO_KEEPALIVE),
    "SO_RCVLOWAT": (socket.SOL_SOCKET, socket.SO_RCVLOWAT),
    "TCP_KEEPIDLE": (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE),
    "TCP_KEEPINTVL": (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL),
    "TCP_KEEPCNT": (socket.IPPROTO_TCP, socket.TCP_KEEPCNT),
    "TCP_RTO_MAX_MS": (socket.IPPROTO_TCP, 44),
    "TCP_USER_TIMEOUT": (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT),
}


def options_of(sock: socket.socket) -> dict[str, bytes]:
    """The options of a TCP socket, byte for byte; those that this kernel has."""
    found = {}
    for name, (level, option) in _OPTIONS.items():
        with contextlib.suppress(OSError):
            found[name] = sock.getsockopt(level, option, 16)
    return found


def fill(sock: socket.socket) -> int:
    """Send until nothing goes any more, and go on while room appears; returns the bytes."""
    num_bytes = 0
    timeout = sock.gettimeout()
    sock.setblocking(False)
    while select.select([], [sock], [], 0.02)[1]:
        with contextlib.suppress(BlockingIOError):
            num_bytes += sock.send(bytes(65536))
    sock.settimeout(timeout)
    return num_bytes


def reset(client: socket.socket, peer: socket.socket | None = None) -> None:
    """Close so that the peer gets a reset.

    On AF_UNIX that needs a byte which the client has not read; ``peer`` sends it.
    """
    if client.family == socket.AF_UNIX and peer is not None:
        peer.send(b".")
    part(client, Way.RST)


def _fin(pair: Pair) -> None:
    part(pair.client, Way.FIN)


def _half_close(pair: Pair) -> None:
    part(pair.client, Way.HALF_CLOSE)


def _rst(pair: Pair) -> None:
    reset(pair.client, pair.server)


def _fin_behind_data(pair: Pair) -> None:
    way = Way.BEHIND_REQUEST
    pair.client.sendall(parting_bytes(way, b"GET /next HTTP/1.1\r\n\r\n"))
    part(pair.client, way)


def _process_kill(pair: Pair) -> None:
    part(pair.client, Way.KILLED)


@dataclass(frozen=True, slots=True)
class Leave:
    """One way to leave.

    Attributes:
        act: does it, from the client's side.
        reason: what a watcher must say of it.
        is_before: it happens before the connection is attached.
        blind: the pairs of poller and kind that cannot see it.
    """

    act: Callable[[Pair], None]
    reason: Reason
    is_before: bool = False
    blind: frozenset[tuple[str, str]] = frozenset()


#: The one table of what each way to leave is called.
LEAVES = {
    "fin": Leave(_fin, Reason.FIN),
    "half_close": Leave(_half_close, Reason.FIN),
    "rst": Leave(_rst, Reason.RESET),
    # A peek stops at the first unread byte; a Unix socket's close shows as POLLHUP too.
    "fin_behind_data": Leave(
        _fin_behind_data, Reason.FIN, blind=frozenset({("poll", "tcp"), ("poll", "tcp6")})
    ),
    "before_add": Leave(_fin, Reason.FIN, is_before=True),
    "process_kill": Leave(_process_kill, Reason.FIN),
}


def open_fds() -> dict[int, str]:
    """The process's sockets, pipes and anonymous files, by fd."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith(("socket:", "pipe:", "anon_inode:", "/memfd:")):
                found[int(name)] = target
    return found
