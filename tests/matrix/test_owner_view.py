"""What the owner gets of its connection, watched and unwatched: the same."""

import asyncio
import contextlib
import errno
import fcntl
import socket
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from disconnect_watch import CancelToken, ClientDisconnected, Watcher, watch
from tests.matrix import ends
from tests.matrix.cells import Cell
from tests.matrix.leaver import Leaver
from tests.matrix.ways import WAYS
from tests.support.loops import LOOP_FACTORIES
from tests.support.net import Pair, transport_of, until

KINDS = ("tcp", "tcp6", "tls13", "unix")
LEAVES = (
    "fin",
    "rst",
    "fin_1",
    "fin_get",
    "fin_40",
    "fin_300k",
    "rst_get",
    "half_close",
    "half_close_rst",
    "fin_unread",
    "killed",
)

_ENDS = {"FIN": "end of stream", "RESET": "ECONNRESET"}

#: Options that change by themselves, and the error, which asking takes away.
_OF_THEIR_OWN = {
    "SO_ERROR",
    "SO_INCOMING_CPU",
    "SO_RCVBUF",  # grows with what is read
    "SO_SNDBUF",
    "TCP_INFO",
    "TCP_QUICKACK",
    "TCP_TIMESTAMP",  # a clock; named from Python 3.12 on
}
#: Their numbers are those of other options here.
_OF_OTHER_PROTOCOLS = ("SO_J1939", "SO_VM")


@dataclass(frozen=True, slots=True)
class View:
    """All that reading to the end brings.

    Attributes:
        num_bytes: before the end.
        end: "end of stream", or the name of the error.
        after: the same of another read.
    """

    num_bytes: int
    end: str
    after: str


@pytest.fixture(scope="module")
def leaver() -> Iterator[Leaver]:
    with Leaver() as leaver:
        yield leaver


def cells(owners: tuple[str, ...], pollers: tuple[str, ...]) -> list[Cell]:
    return [
        Cell(name, kind, owner, "paused", poller)
        for name in LEAVES
        for kind in KINDS
        for owner in owners
        for poller in pollers
        # The portable poller's peek may take the error of a reset: declared in csrc.
        if poller == "epoll" or WAYS[name].outcome == "FIN"
    ]


def name_of(error: OSError) -> str:
    return errno.errorcode.get(error.errno or 0, type(error).__name__)


def thread_view(cell: Cell, leaver: Leaver, watcher: Watcher | None) -> View:
    """Let the client leave, then read as the thread that owns the socket."""
    with ends.connect(cell, leaver) as fd, ends.thread_end(cell, leaver, fd) as sock:
        assert sock is not None
        sock.settimeout(40)
        with contextlib.ExitStack() as stack:
            if watcher is not None:
                token = CancelToken()
                conn = stack.enter_context(watcher.attach(fd))
                conn.arm(token)
            leaver.do(cell.way.act)
            if watcher is not None and cell.is_told:
                assert token.wait(40)
            num_bytes, end = _read_to_end(sock)
            return View(num_bytes, end, _read_to_end(sock)[1])


def _read_to_end(sock: socket.socket) -> tuple[int, str]:
    num_bytes = 0
    try:
        while data := sock.recv(1 << 16):
            num_bytes += len(data)
    except OSError as error:
        return num_bytes, name_of(error)
    return num_bytes, "end of stream"


def streams_view(cell: Cell, leaver: Leaver, watcher: Watcher | None) -> View:
    """Let the client leave during a block of work, then read on."""

    async def main() -> View:
        async with ends.streams_end(cell, leaver, fd) as (reader, writer):
            transport_of(writer).pause_reading()
            if watcher is None:
                leaver.order(cell.way.act)
                await until(leaver.has_answered)
                leaver.answer()
            else:
                await _watched(cell, leaver, watcher, writer)
            transport_of(writer).resume_reading()
            num_bytes, end = await _read_streams_to_end(reader)
            return View(num_bytes, end, (await _read_streams_to_end(reader))[1])

    with (
        ends.connect(cell, leaver) as fd,
        asyncio.Runner(loop_factory=LOOP_FACTORIES[cell.owner]) as runner,
    ):
        return runner.run(main())


async def _watched(
    cell: Cell, leaver: Leaver, watcher: Watcher, writer: asyncio.StreamWriter
) -> None:
    async with asyncio.timeout(40):
        with contextlib.suppress(ClientDisconnected):
            async with watch(writer, watcher=watcher) as w:
                leaver.order(cell.way.act)
                if not cell.is_told:
                    await until(leaver.has_answered)
                    return
                await asyncio.get_running_loop().create_future()
        assert w.token.cancelled
    await until(leaver.has_answered)
    leaver.answer()


async def _read_streams_to_end(reader: asyncio.StreamReader) -> tuple[int, str]:
    num_bytes = 0
    try:
        async with asyncio.timeout(40):
            while data := await reader.read(1 << 16):
                num_bytes += len(data)
    except OSError as error:
        return num_bytes, name_of(error)
    return num_bytes, "end of stream"


@pytest.mark.parametrize("cell", cells(("thread",), ("epoll", "poll")), ids=str)
def test_thread_reads_the_same_as_unwatched(cell: Cell, leaver: Leaver) -> None:
    unwatched = thread_view(cell, leaver, None)
    with Watcher(poller=cell.poller) as watcher:
        assert thread_view(cell, leaver, watcher) == unwatched
    if not cell.is_tls and cell.way.outcome in _ENDS:
        assert (unwatched.num_bytes, unwatched.end) == (cell.way.unread, _ENDS[cell.way.outcome])


@pytest.mark.parametrize(
    "cell", [cell for cell in cells(("asyncio", "uvloop"), ("epoll",)) if not cell.is_tls], ids=str
)
def test_streams_read_the_same_as_unwatched(cell: Cell, leaver: Leaver) -> None:
    unwatched = streams_view(cell, leaver, None)
    with Watcher() as watcher:
        assert streams_view(cell, leaver, watcher) == unwatched


def options_of(sock: socket.socket) -> dict[str, int]:
    """All that can be set of a socket and does not change by itself."""
    found = {}
    for name in dir(socket):
        level = {"SO_": socket.SOL_SOCKET, "TCP": socket.IPPROTO_TCP}.get(name[:3])
        if level is None or name in _OF_THEIR_OWN or name.startswith(_OF_OTHER_PROTOCOLS):
            continue
        with contextlib.suppress(OSError):  # none of this kind of socket
            found[name] = sock.getsockopt(level, getattr(socket, name))
    for name in ("F_GETFL", "F_GETFD", "F_GETOWN", "F_GETSIG"):
        found[name] = fcntl.fcntl(sock, getattr(fcntl, name))
    return found


def test_options_and_flags_of_the_socket_stay_as_they_were(
    watcher: Watcher, pair: Pair, leave: str
) -> None:
    before = options_of(pair.server)
    assert len(before) > 20
    with watcher.attach(pair.server) as conn:
        conn.disarm(conn.arm(CancelToken()))
        conn.arm(CancelToken())
        assert options_of(pair.server) == before
        pair.leave(leave)
    after = options_of(pair.server)
    assert after == before


@pytest.mark.parametrize("loop_kind", ["asyncio", "uvloop"])
def test_options_and_flags_stay_through_a_watched_block(loop_kind: str, pair: Pair) -> None:
    async def main() -> None:
        reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        loop = asyncio.get_running_loop()
        pair.server.setblocking(False)
        transport, _ = await loop.connect_accepted_socket(lambda: protocol, pair.server)
        before = options_of(pair.server)
        async with watch(transport):
            assert options_of(pair.server) == before
        assert options_of(pair.server) == before
        transport.abort()

    with asyncio.Runner(loop_factory=LOOP_FACTORIES[loop_kind]) as runner:
        runner.run(main())
