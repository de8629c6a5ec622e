"""One cell of the matrix, measured: what does the watcher say?"""

import asyncio
import contextlib
import ctypes
import select
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from disconnect_watch import (
    CancelToken,
    ClientDisconnected,
    Connection,
    Reason,
    StaleWatchError,
    Watcher,
    watch,
)
from disconnect_watch.aio._mailbox import loop_mailbox
from tests.matrix import ends
from tests.matrix.cells import Cell, Outcome
from tests.matrix.leaver import Leaver
from tests.support.loops import LOOP_FACTORIES
from tests.support.net import PATIENCE, connected, transport_of, until, wait_until

__all__ = ["measure"]

# A PyDLL's functions are called with the GIL held.
_poll_with_gil = ctypes.PyDLL(None).poll


class _PollFd(ctypes.Structure):
    _fields_ = (("fd", ctypes.c_int), ("events", ctypes.c_short), ("revents", ctypes.c_short))


def hold_gil_until_readable(fd: int) -> bool:
    """Wait in C code that keeps the GIL; whether ``fd`` became readable."""
    poll_fd = _PollFd(fd, select.POLLIN, 0)
    return bool(_poll_with_gil(ctypes.byref(poll_fd), 1, round(PATIENCE * 1000)))


def measure(cell: Cell, leaver: Leaver) -> Outcome:
    """Play the cell and return what was said of the client.

    What the cell must give decides only how long to wait for it.
    """
    driver: Literal["thread", "loop"] = "loop" if cell.driver == "loop" else "thread"
    with (
        Watcher(poller=cell.poller, driver=driver) as watcher,
        ends.connect(cell, leaver) as fd,
    ):
        play = _Play(cell, leaver, watcher, fd)
        return play.in_thread() if cell.owner == "thread" else play.on_loop()


@dataclass(frozen=True, slots=True)
class _Play:
    """One cell and all that take part."""

    cell: Cell
    leaver: Leaver
    watcher: Watcher
    fd: int

    def in_thread(self) -> Outcome:
        """With the socket in this thread, which has no loop."""
        way = self.cell.way
        with ends.thread_end(self.cell, self.leaver, self.fd) as sock:
            if way.when == "attach":
                self.leaver.do(way.act)
            with self.watcher.attach(self.fd) as conn, contextlib.ExitStack() as stack:
                if self.cell.state == "reading":
                    assert sock is not None
                    stack.enter_context(ends.read_by_thread(sock))
                if way.when == "request":
                    conn.disarm(conn.arm(CancelToken()))
                    self.leaver.do(way.act)
                token = CancelToken()
                conn.arm(token)
                self._stand_still(conn, token)
                return _outcome(conn, token.reason)

    def on_loop(self) -> Outcome:
        """With the socket or pipe as a loop's own."""
        reports: list[object] = []

        async def main() -> Outcome:
            asyncio.get_running_loop().set_exception_handler(lambda _, what: reports.append(what))
            async with (
                ends.loop_end(self.cell, self.leaver, self.fd) as end,
                contextlib.AsyncExitStack() as stack,
            ):
                if not isinstance(end, tuple):
                    return await self._by_watch(end)
                reader, writer = end
                if self.cell.state == "reading":
                    await stack.enter_async_context(ends.read_by_task(reader))
                else:
                    transport_of(writer).pause_reading()  # it would read until watched
                return await self._by_watch(writer)

        with asyncio.Runner(loop_factory=LOOP_FACTORIES[self.cell.owner]) as runner:
            outcome = runner.run(main())
        assert not reports, reports
        return outcome

    async def _by_watch(self, target: int | asyncio.Transport | asyncio.StreamWriter) -> Outcome:
        way = self.cell.way
        pauses = self.cell.state != "reading"
        if way.when == "request":
            async with watch(target, pause_reading=pauses, watcher=self.watcher):
                pass
        if way.when in ("attach", "request"):
            self.leaver.order(way.act)
            await self._answered()
        block = watch(target, pause_reading=pauses, watcher=self.watcher)
        conn: Connection | None = None
        try:
            async with asyncio.timeout(PATIENCE), block as w:
                known = loop_mailbox(self.watcher).connections.get(self.fd)
                if known is not None:
                    conn = known.conn
                if not w.token.cancelled:
                    assert conn is not None
                    await self._go_on(conn, w.token)
                if not w.token.cancelled:
                    return _outcome(conn, None)
                await asyncio.get_running_loop().create_future()
        except ClientDisconnected as disconnected:
            told = disconnected.reason
        # A TLS layer closes the fd a turn before it says that the connection is lost; the
        # watcher's look at it may fall in between, and does so once in thousands.
        seen_by_watcher = block.token.reason
        if not (self.cell.is_tls and seen_by_watcher is Reason.OWNER_CLOSED):
            assert told is seen_by_watcher
        return _outcome(conn, told)

    async def _go_on(self, conn: Connection, token: CancelToken) -> None:
        """Let the client act, while the loop runs or not, and wait for what comes of it."""
        cell, leaver = self.cell, self.leaver
        if cell.state in ("blocked", "gil"):
            self._stand_still(conn, token)
            return
        if cell.way.first is not None:
            leaver.order(cell.way.first)
            await self._answered()
            with self._witness() as witness:
                await until(lambda: witness.cancelled)
            assert not token.cancelled, f"after {cell.way.first}"
        self._start(conn)
        if cell.is_told:
            await until(lambda: token.cancelled, PATIENCE)
        await self._answered()
        if not cell.is_told:
            with self._witness() as witness:
                await until(lambda: witness.cancelled)
            await until(lambda: self._has_settled(conn, token))

    def _stand_still(self, conn: Connection, token: CancelToken) -> None:
        """Let the client act while this thread waits, and its loop with it."""
        cell, leaver = self.cell, self.leaver
        is_gil_held = cell.state == "gil"
        if cell.way.first is not None:
            leaver.do(cell.way.first)
            with self._witness() as witness:
                assert self._is_told(witness)
            assert not token.cancelled, f"after {cell.way.first}"
        with self._notified(conn) as notify_fd:
            self._start(conn)
            if cell.is_told:
                assert hold_gil_until_readable(notify_fd) if is_gil_held else self._is_told(token)
            elif is_gil_held:
                assert hold_gil_until_readable(leaver.fileno())
            leaver.answer()
        if not cell.is_told:
            with self._witness() as witness:
                assert self._is_told(witness)
            wait_until(lambda: self._has_settled(conn, token))

    def _is_told(self, token: CancelToken) -> bool:
        """Whether a token is set in the end, this thread driving the watcher if it is to."""
        if self.cell.driver == "thread":
            return token.wait(PATIENCE)
        wait_until(lambda: self.watcher.poll() >= 0 and token.cancelled, PATIENCE)
        return True

    def _start(self, conn: Connection) -> None:
        if self.cell.way.server == "shut_rd":
            ends.shut_reading(conn.fd)
        self.leaver.order(self.cell.way.act if self.cell.way.when == "watched" else "stay")

    async def _answered(self) -> None:
        await until(self.leaver.has_answered)
        self.leaver.answer()

    def _has_settled(self, conn: Connection, token: CancelToken) -> bool:
        return token.cancelled or conn.info().is_blind is ("blind" in self.cell.names)

    @contextlib.contextmanager
    def _notified(self, conn: Connection) -> Iterator[int]:
        """An fd that is readable once the watches of the connection have fired."""
        mailbox = self.watcher.mailbox()
        watch_id = conn.arm(mailbox=mailbox)
        try:
            yield mailbox.fileno()
        finally:
            conn.disarm(watch_id)
            mailbox.close()

    @contextlib.contextmanager
    def _witness(self) -> Iterator[CancelToken]:
        """A client that leaves now: with its token set, an earlier leave would be known."""
        token = CancelToken()
        with connected() as pair, self.watcher.attach(pair.server) as conn:
            conn.arm(token)
            pair.client.close()
            yield token


def _outcome(conn: Connection | None, reason: Reason | None) -> Outcome:
    """What the connection says, and its token must have said the same."""
    info = None
    if conn is not None:
        with contextlib.suppress(StaleWatchError):  # detached with the end of its transport
            info = conn.info()
    if reason is None:
        assert info is not None
        assert info.reason is None
        return Outcome("blind" if info.is_blind else "silent")
    assert info is None or reason in info.seen
    return Outcome(reason.name, info.unread_bytes if info is not None else None)
