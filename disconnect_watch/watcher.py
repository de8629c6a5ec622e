"""Watchers and connections: who is told when a peer leaves. No event loop needed."""

import atexit
import os
import sys
import threading
import warnings
from types import TracebackType
from typing import Literal, Protocol, Self

from disconnect_watch import _core
from disconnect_watch.errors import UnsupportedSocketError
from disconnect_watch.records import ConnectionInfo, Event, WatcherStats
from disconnect_watch.token import REASONS, Reason, flag_table, not_a_reason, reason_of

__all__ = [
    "MASK_ANY",
    "MASK_FIN",
    "MASK_GONE",
    "Connection",
    "ConnectionInfo",
    "Event",
    "Mailbox",
    "Watcher",
    "WatcherStats",
    "attach",
    "default_watcher",
    "is_gone",
]

#: Every way to leave, a half-close included.
MASK_ANY = _core.MASK_ANY
#: Every way but a FIN: for those who serve half-closed clients.
MASK_GONE = _core.MASK_GONE
#: A FIN alone: a leave, or a half-close.
MASK_FIN = MASK_ANY & ~MASK_GONE

#: Seconds: more milliseconds fit no C int.
MAX_POLL = 2_147_483


class HasFileno(Protocol):
    """A socket, or anything that names its file descriptor."""

    def fileno(self) -> int: ...


class Watcher(_core.Watcher):
    """Watches connections and sets the tokens armed on them.

    With ``driver="thread"`` a native thread, which never takes the GIL, does the
    watching. With ``driver="loop"`` there is no thread: poll ``fileno()`` for
    reading and call ``poll()`` when it is readable.

    Args:
        poller: "epoll", "poll" (portable; blind behind unread bytes), or "auto".
        driver: "thread" or "loop" (which needs epoll).
        vanish_after: seconds, for every connection that asks for no other; see
            ``Connection.set_vanish_after``. None looks for no silence.

    Raises:
        ValueError: no such poller or driver, or no bound that can be kept.
        OSError: the running kernel cannot do it (EOPNOTSUPP), or no fd is left.

    Threads: every method may be called from any thread.
    """

    _pid: int
    _is_closed: bool
    _made_at: str
    #: What ``attach`` sets where it is given none, seconds.
    vanish_after: float | None

    def __new__(
        cls,
        *,
        poller: str = "auto",
        driver: Literal["thread", "loop"] = "thread",
        vanish_after: float | None = None,
    ) -> Self:
        if poller not in ("auto", "epoll", "poll"):
            raise ValueError(f"poller {poller!r}: must be 'auto', 'epoll' or 'poll'")
        if driver not in ("thread", "loop"):
            raise ValueError(f"driver {driver!r}: must be 'thread' or 'loop'")
        vanish_ms(vanish_after)
        self = super().__new__(
            cls, flag_table(), None if poller == "auto" else poller, driver == "loop"
        )
        self._pid = os.getpid()
        self._is_closed = False
        self.vanish_after = vanish_after
        maker = sys._getframe(1)
        self._made_at = f"{maker.f_code.co_filename}:{maker.f_lineno}"
        return self

    @property
    def is_closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._is_closed

    @property
    def is_forked(self) -> bool:
        """Whether this is the copy that a forked child inherited, which cannot be used."""
        return self._pid != os.getpid()

    def attach(self, sock: HasFileno | int, *, vanish_after: float | None = None) -> "Connection":
        """Watch a connection from now until its ``detach``.

        The fd is borrowed: detach before you close it. Of the write end of a pipe
        the reader's leaving is RESET: the next write would raise BrokenPipeError.

        Args:
            sock: a connected stream socket, the write end of a pipe, or the fd.
            vanish_after: see ``Connection.set_vanish_after``; None for the watcher's.

        Raises:
            UnsupportedSocketError: a closed socket object, or none of these.
            OSError: EBADF, a number that names no open file.
            ValueError: vanish_after is no bound that can be kept.
            FileExistsError: this fd is attached already.
            ClosedError: the watcher was closed.
            ForkedError: the watcher was made before a fork.
        """
        bound = self.vanish_after if vanish_after is None else vanish_after
        vanish_ms(bound)
        conn = Connection(self, fd_of(sock))
        if bound is not None:
            conn.set_vanish_after(bound)
        return conn

    def mailbox(self) -> "Mailbox":
        """A place where fired watches wait for one consumer."""
        return Mailbox(self)

    def poll(self, timeout: float = 0.0) -> int:
        """Handle what waits, with ``driver="loop"``.

        Args:
            timeout: seconds to wait for an event; negative waits for ever, and so does
                more than 24 days.

        Returns:
            The number of events handled.

        Raises:
            OSError: EOPNOTSUPP with the thread driver.
        """
        is_endless = timeout < 0 or timeout > MAX_POLL
        return self.poll_ms(-1 if is_endless else round(timeout * 1000))

    def stats(self) -> WatcherStats:
        """A snapshot of the counters.

        Raises:
            ForkedError: the watcher was made before a fork.
        """
        (
            poller,
            is_loop_driven,
            connections,
            armed,
            blind,
            fired,
            stale,
            second,
            wakeups,
            signals,
        ) = self.read_stats()
        return WatcherStats(
            poller=poller,
            driver="loop" if is_loop_driven else "thread",
            num_connections=connections,
            num_armed=armed,
            num_blind=blind,
            num_fired=fired,
            num_stale_events=stale,
            num_second_sources=second,
            num_wakeups=wakeups,
            num_signals=dict(zip(REASONS, signals[1:], strict=True)),
        )

    def close(self) -> None:
        """Stop the thread and forget all watches, unfired. Idempotent."""
        self._is_closed = True
        super().close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_is_closed", True) and not self.is_forked:
            warnings.warn(
                f"unclosed watcher made at {self._made_at}: call close()",
                ResourceWarning,
                source=self,
                stacklevel=1,
            )


class Mailbox(_core.Mailbox):
    """Fired watches wait here for one consumer, whose loop polls ``fileno()``.

    Threads: any may post; one drains.
    """

    def drain(self) -> list[Event]:
        """Take what waits, at most 64 events; with more left the fd stays readable."""
        return [
            Event(cookie, REASONS[code - 1], at_ns, watch_id)
            for cookie, code, at_ns, watch_id in self.drain_codes()
        ]


class Connection(_core.Connection):
    """One attached socket, for as long as it is open.

    ``arm`` and ``disarm`` make no system call. As a context manager it detaches
    at the end of the block.

    Threads: every method may be called from any thread.
    """

    @property
    def reason(self) -> Reason | None:
        """How the peer left, as told by the first source; None while it is there."""
        return reason_of(self.reason_code)

    def info(self) -> ConnectionInfo:
        """All that is known of the connection.

        Raises:
            StaleWatchError: it was detached.
        """
        fd, seen, code, unread, seen_ns, is_blind, bound_ms = self.read_info()
        return ConnectionInfo(
            fd=fd,
            reason=reason_of(code),
            seen=frozenset(reason for reason in REASONS if seen & 1 << reason.code),
            unread_bytes=None if unread < 0 else unread,
            seen_ns=seen_ns,
            is_blind=is_blind,
            vanish_bound=bound_ms / 1000 if bound_ms else None,
        )

    def set_vanish_after(self, seconds: float | None) -> None:
        """Take a peer for gone that vanished without a word: TIMED_OUT.

        It has vanished when probes or retransmissions went unanswered, and nothing at
        all was heard, for ``seconds``. A peer that answers and merely does not read is
        never taken for gone. Looked for while a watch is armed; over TCP only, since
        no other peer can vanish. Sets keepalive options of the socket, which ``detach``
        puts back.

        The worst case, counted from the peer's last segment or from ``arm``, is
        ``info().vanish_bound``: an eighth more than ``seconds``. Before Linux 6.15 it is
        at least 135 s, because the kernel's questions back off to two minutes there
        while bytes wait to be sent.

        Args:
            seconds: 2 to 86,400, or None to look no more.

        Raises:
            ValueError: no such bound.
            StaleWatchError: the connection was detached.
            OSError: EBADF, the owner closed the socket without ``detach``.

        Source: tcp(7), TCP_KEEPIDLE and TCP_INFO.
        """
        self.set_vanish_ms(vanish_ms(seconds))

    def lost(self, reason: Reason = Reason.OWNER_CLOSED) -> bool:
        """Say that the connection ended, as its owner knows it.

        The second source of the same news: whichever comes first fires the
        watches, the other is counted.

        Args:
            reason: FIN, RESET, TIMED_OUT or OWNER_CLOSED.

        Returns:
            Whether it was news.

        Raises:
            StaleWatchError: it was detached.
            TypeError: no ``Reason``.
        """
        try:
            code = reason.code
        except AttributeError:
            raise not_a_reason(reason) from None
        return self.lost_code(code)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.detach()


_core.own_methods(Connection, "arm", "disarm")


def vanish_ms(vanish_after: float | None) -> int:
    """The bound in milliseconds as the core takes it, 0 for None.

    Raises:
        ValueError: it is shorter than two rounds of keepalive, or longer than a day.
    """
    if vanish_after is None:
        return 0
    if not 2 <= vanish_after <= 86_400:
        raise ValueError(f"vanish_after {vanish_after!r}: must be 2 to 86400 seconds, or None")
    return round(vanish_after * 1000)


def fd_of(sock: HasFileno | int) -> int:
    """The file descriptor of a socket or of itself.

    Raises:
        TypeError: neither an int nor anything with a fileno().
        UnsupportedSocketError: the socket is closed.
    """
    if isinstance(sock, int):
        fd = sock
    elif callable(getattr(sock, "fileno", None)):
        fd = sock.fileno()
    else:
        raise TypeError(f"expected a socket or a file descriptor, got {type(sock).__name__}")
    if fd < 0:
        raise UnsupportedSocketError(f"file descriptor {fd}: the socket is closed")
    return fd


_default_lock = threading.Lock()
_default: Watcher | None = None


def default_watcher() -> Watcher:
    """The process-wide watcher, made on first use and anew in a forked child."""
    global _default
    # Asked without the lock first: a watch asks for each block. A forked child forgot it.
    watcher = _default
    if watcher is not None and not watcher.is_closed:
        return watcher
    with _default_lock:
        if _default is None or _default.is_closed or _default.is_forked:
            _default = Watcher()
        return _default


def is_default(watcher: Watcher) -> bool:
    """Whether that is the process-wide watcher, which this makes none of.

    Once it is, it stays so until it is closed or forked away, when it takes no watch.
    """
    return watcher is _default


def attach(sock: HasFileno | int, *, vanish_after: float | None = None) -> Connection:
    """Watch a connection with the process-wide watcher; see ``Watcher.attach``."""
    return default_watcher().attach(sock, vanish_after=vanish_after)


def is_gone(sock: HasFileno | int) -> Reason | None:
    """One look at a socket, registered nowhere and consuming nothing.

    Returns:
        How the peer left, or None while nothing says so.

    Raises:
        UnsupportedSocketError: a closed socket object, or neither a connected stream
            socket nor the write end of a pipe.
        OSError: EBADF, a number that names no open file.

    Threads: any.
    """
    return reason_of(_core.is_gone(fd_of(sock)))


def _close_default() -> None:
    if _default is not None and not _default.is_forked:
        _default.close()


def _forget_default() -> None:
    global _default, _default_lock
    _default_lock = threading.Lock()
    _default = None


atexit.register(_close_default)
os.register_at_fork(after_in_child=_forget_default)
