"""Delivery to a loop: one mailbox for each pair of loop and watcher.

Who watches something holds the ``LoopMailbox``; the loop and the registry below
refer to it only weakly. So it is opened by the first user, shared by all, and
closed, fd and reader, when the last lets go: at the end of the last connection,
or with the garbage of a loop that was closed over open connections. Nothing
counts references, and an idle loop has no fd of ours in its selector.
"""

import asyncio
import contextlib
import os
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from disconnect_watch.errors import ClosedError, DisconnectWatchError, StaleWatchError
from disconnect_watch.token import REASONS, CancelToken, Reason
from disconnect_watch.watcher import MASK_ANY, Connection, Mailbox, Watcher, default_watcher

if TYPE_CHECKING:
    from disconnect_watch.aio._connection import LoopConnection
    from disconnect_watch.aio._watch import Watch

__all__ = ["LoopMailbox", "loop_mailbox"]

#: Called with how the peer left and when that was seen (``time.monotonic_ns``).
OnLeave = Callable[[Reason, int], object]

#: Called with the same, and with the id of the watch that fired.
OnFired = Callable[[Reason, int, int], object]


class LoopMailbox:
    """Calls functions on one event loop when the connections they are armed on end.

    Get it from ``loop_mailbox()`` and hold it while something is armed.

    Threads: the loop's own only.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, watcher: Watcher) -> None:
        self.loop = loop
        self.watcher = watcher
        #: By fd: what blocks and servers of this loop have attached and share.
        self.connections: weakref.WeakValueDictionary[int, LoopConnection] = (
            weakref.WeakValueDictionary()
        )
        #: Those that nothing of their transport holds: the loop does, by its reader.
        self.held: set[LoopConnection] = set()
        #: By the id of a connection, which is valid while the value holds it, and the watch.
        self._entries: dict[tuple[int, int], tuple[Connection, OnLeave]] = {}
        #: By their ids: those that keep an account of their blocks by themselves.
        self.attached: weakref.WeakValueDictionary[int, LoopConnection] = (
            weakref.WeakValueDictionary()
        )
        self._delivered: set[tuple[int, int]] = set()
        #: By the id of a connection, likewise.
        self._listeners: dict[int, tuple[Connection, OnFired]] = {}
        self._thread_id = threading.get_ident()
        self._reader = _Reader(loop, watcher)
        self._reader.open(weakref.ref(self), self.held)

    @property
    def is_loop_driven(self) -> bool:
        """Whether this loop polls for the watcher, which then has no thread."""
        return self._reader.is_loop_driven

    @property
    def core(self) -> Mailbox:
        """What ``conn.arm(mailbox=...)`` takes, for watches that a listener hears of."""
        return self._reader.mailbox

    def listen(self, conn: Connection, on_fired: OnFired) -> int:
        """Call ``on_fired(reason, at_ns, watch_id)`` for watches that the caller arms itself.

        For who arms one watch after the other on the same connection: it pays only for
        ``conn.arm(token, mailbox=mailbox.core, cookie=cookie)`` and ``conn.disarm``. A watch
        that was disarmed may still be told of, if it fired within the same turn of the
        loop: the caller knows by the id which one it has armed.

        Args:
            conn: a connection of this mailbox's watcher.
            on_fired: gets the reason, when it was seen, ``time.monotonic_ns``, and the id.

        Returns:
            The cookie. Every ``listen`` has its ``forget``.
        """
        cookie = id(conn)
        self._listeners[cookie] = conn, on_fired
        return cookie

    def forget(self, conn: Connection) -> None:
        """Call the listener of ``conn`` no more. Idempotent."""
        self._listeners.pop(id(conn), None)

    def arm(
        self,
        conn: Connection,
        token: CancelToken | None,
        on_leave: OnLeave,
        *,
        mask: int = MASK_ANY,
    ) -> int:
        """Set ``token`` and call ``on_leave(reason, at_ns)`` when the peer of ``conn`` leaves.

        It is called once at most and from the loop, never inside ``arm``; where the
        peer has left before, ``token`` is set at once and the call follows.

        Args:
            conn: a connection of this mailbox's watcher.
            token: the flag to set; None for the call alone.
            on_leave: gets the reason and when it was seen, ``time.monotonic_ns``.
            mask: the ways to leave that count; ``MASK_GONE`` lets a half-close pass.

        Returns:
            The watch id. Every ``arm`` has its ``disarm``.

        Raises:
            StaleWatchError: the connection was detached.
            ClosedError: the watcher was closed.
        """
        cookie = id(conn)
        watch_id = conn.arm(token, mask=mask, mailbox=self._reader.mailbox, cookie=cookie)
        self._entries[cookie, watch_id] = conn, on_leave
        return watch_id

    def disarm(self, conn: Connection, watch_id: int) -> bool:
        """End the watch: its function is not called after this.

        Works after ``conn.detach()`` and after the watcher was closed, too.

        Returns:
            Whether it had fired, delivered or not; False means that it never will.

        Raises:
            StaleWatchError: no such watch, or it was disarmed before.
        """
        key = id(conn), watch_id
        if self._entries.pop(key, None) is None:
            raise StaleWatchError(f"disarm watch {watch_id}: not armed in this mailbox")
        was_delivered = key in self._delivered
        self._delivered.discard(key)
        try:
            return conn.disarm(watch_id)
        except DisconnectWatchError:  # detached, or its watcher closed or forked away
            return was_delivered

    def lost(self, conn: Connection, reason: Reason = Reason.OWNER_CLOSED) -> bool:
        """Say that ``conn`` ended, as its owner knows it, and deliver that now.

        For ``connection_lost``: ``detach`` follows, and would drop what is not
        delivered yet.

        Args:
            conn: a connection of this mailbox's watcher.
            reason: FIN, RESET, TIMED_OUT or OWNER_CLOSED.

        Returns:
            Whether it was news.

        Raises:
            StaleWatchError: the connection was detached.
        """
        was_news = conn.lost(reason)
        self.deliver()
        return was_news

    def deliver(self) -> None:
        """Call the functions of all watches that have fired by now."""
        try:
            while codes := self._reader.mailbox.drain_codes():
                self._call_all(codes)
        except ClosedError:
            self.close()  # the watcher was; it woke us for this once, and never will again

    def _call_all(self, codes: list[tuple[int, int, int, int]]) -> None:
        # Look all of them up before the first call: what is called may detach a
        # connection and attach another, whose id() could be the same.
        batch = []
        for cookie, code, at_ns, watch_id in codes:
            key = cookie, watch_id
            batch.append((key, self._found(key), REASONS[code - 1], at_ns))
        for key, found, reason, at_ns in batch:
            # What is called may disarm others of the batch, or forget them.
            if found is None or self._found(key) is not found:
                continue
            if not isinstance(found, tuple):
                self._call(found.on_leave, reason, at_ns)
            elif key in self._entries:
                self._delivered.add(key)
                self._call(found[1], reason, at_ns)
            else:
                self._call(found[1], reason, at_ns, key[1])

    def _found(
        self, key: tuple[int, int]
    ) -> "Watch | tuple[Connection, Callable[..., object]] | None":
        """Who is to hear of a watch, by its cookie and id."""
        connection = self.attached.get(key[0])
        if connection is not None:
            return connection.armed(key[1])
        return self._entries.get(key) or self._listeners.get(key[0])

    def _call(self, function: Callable[..., object], reason: Reason, *details: int) -> None:
        try:
            function(reason, *details)
        except Exception as error:
            # One function's failure must not lose the news of the others.
            self.loop.call_exception_handler(
                {"message": f"{function!r} failed on {reason.value}", "exception": error}
            )

    def close(self) -> None:
        """Take the notify fd out of the loop and close it. Idempotent."""
        self._reader.close()

    def __del__(self) -> None:
        reader: _Reader | None = getattr(self, "_reader", None)
        if reader is None:
            return  # the watcher was closed before we began
        if self._thread_id == threading.get_ident() or not self.loop.is_running():
            reader.close()
            return
        # Collected in another thread, while the loop may be polling the fd.
        with contextlib.suppress(RuntimeError):  # the loop was closed just now
            self.loop.call_soon_threadsafe(reader.close)


class _Reader:
    """The mailbox's place in the loop's selector, and the poll of a loop-driven watcher."""

    def __init__(self, loop: asyncio.AbstractEventLoop, watcher: Watcher) -> None:
        self.mailbox = watcher.mailbox()
        self.is_loop_driven = watcher.stats().driver == "loop"
        self._loop = loop
        self._pid = os.getpid()
        self._fds: list[int] = []

    def open(self, weak: weakref.ref[LoopMailbox], held: "set[LoopConnection]") -> None:
        # A bound method would let the loop keep the LoopMailbox alive.
        self._add(self.mailbox.fileno(), _deliver, weak, held)
        if self.is_loop_driven:
            self._add(self.mailbox.watcher.fileno(), _poll, weak, held)

    def _add(self, fd: int, callback: Callable[..., None], *arguments: object) -> None:
        self._loop.add_reader(fd, callback, *arguments)
        self._fds.append(fd)

    def close(self) -> None:
        fds, self._fds = self._fds, []
        # A forked child shares the loop's epoll set with its parent: what it removed
        # there would be gone for both.
        if not self._loop.is_closed() and self._pid == os.getpid():
            for fd in fds:
                self._loop.remove_reader(fd)
        self.mailbox.close()


def _deliver(weak: weakref.ref[LoopMailbox], held: object) -> None:
    mailbox = weak()
    if mailbox is not None:
        mailbox.deliver()


def _poll(weak: weakref.ref[LoopMailbox], held: object) -> None:
    mailbox = weak()
    if mailbox is not None and not mailbox.watcher.is_closed:
        mailbox.watcher.poll()
        mailbox.deliver()


_lock = threading.Lock()
#: By the ids of loop and watcher, which cannot be reused while the value lives.
_mailboxes: weakref.WeakValueDictionary[tuple[int, int], LoopMailbox] = (
    weakref.WeakValueDictionary()
)


def loop_mailbox(watcher: Watcher | None = None) -> LoopMailbox:
    """The mailbox of the running loop, opened on first use.

    Hold on to it: it closes itself when nobody does.

    Args:
        watcher: None for the process-wide one.

    Raises:
        RuntimeError: no loop is running here, or the watcher is driven by another loop.
        ClosedError: the watcher was closed.
        ForkedError: the watcher was made before a fork.
    """
    loop = asyncio.get_running_loop()
    if watcher is None:
        watcher = default_watcher()
    with _lock:
        mailbox = _mailboxes.get((id(loop), id(watcher)))
        if mailbox is None:
            if _is_driven(watcher):
                raise RuntimeError(
                    f"{watcher!r} is driven by another loop: use driver='thread' to share it"
                )
            mailbox = _mailboxes[id(loop), id(watcher)] = LoopMailbox(loop, watcher)
        return mailbox


def _is_driven(watcher: Watcher) -> bool:
    """Whether a loop polls for ``watcher``."""
    return any(
        mailbox.is_loop_driven and mailbox.watcher is watcher
        for mailbox in list(_mailboxes.values())
    )


def _forget_lock() -> None:
    """In a forked child: another thread of the parent may have held it."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forget_lock)
