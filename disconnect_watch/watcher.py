"""Watchers and connections: who is told when a peer leaves. No event loop needed."""

import atexit
import os
import sys
import threading
import warnings
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, NamedTuple, Protocol, Self

from disconnect_watch import _core
from disconnect_watch.errors import UnsupportedSocketError
from disconnect_watch.token import REASONS, Reason, flag_table, reason_of

__all__ = [
    "MASK_ANY",
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


class HasFileno(Protocol):
    """A socket, or anything that names its file descriptor."""

    def fileno(self) -> int: ...


class Event(NamedTuple):
    """One fired watch, as a mailbox delivers it."""

    cookie: int
    reason: Reason
    at_ns: int
    watch_id: int


@dataclass(frozen=True, slots=True)
class ConnectionInfo:
    """What is known of a connection.

    Attributes:
        fd: the borrowed file descriptor.
        reason: of the first source that told of the end; None while it lasts.
        seen: all reasons told so far.
        unread_bytes: in the receive queue when the FIN was seen; None if unknown.
        seen_ns: when the first source spoke, ``time.monotonic_ns``; 0 while it lasts.
        is_blind: unread bytes hide the peer from this poller.
    """

    fd: int
    reason: Reason | None
    seen: frozenset[Reason]
    unread_bytes: int | None
    seen_ns: int
    is_blind: bool


@dataclass(frozen=True, slots=True)
class WatcherStats:
    """Counters of one watcher; the first three are of now, the rest since it was made.

    Attributes:
        poller: "epoll" or "poll".
        driver: "thread" or "loop".
        num_connections: attached.
        num_armed: watches armed and not fired.
        num_blind: connections that unread bytes hide from the poller.
        num_fired: watches that fired.
        num_stale_events: events of connections that were detached before.
        num_second_sources: ends that were told again by another source.
        num_wakeups: returns from the poller's wait.
        num_signals: connections that ended, by the reason told first.
    """

    poller: str
    driver: str
    num_connections: int
    num_armed: int
    num_blind: int
    num_fired: int
    num_stale_events: int
    num_second_sources: int
    num_wakeups: int
    num_signals: dict[Reason, int]


class Watcher(_core.Watcher):
    """Watches connections and sets the tokens armed on them.

    With ``driver="thread"`` a native thread, which never takes the GIL, does the
    watching. With ``driver="loop"`` there is no thread: poll ``fileno()`` for
    reading and call ``poll()`` when it is readable.

    Args:
        poller: "epoll", "poll" (portable; blind behind unread bytes), or "auto".
        driver: "thread" or "loop" (which needs epoll).

    Raises:
        ValueError: no such poller or driver.
        OSError: the running kernel cannot do it (EOPNOTSUPP), or no fd is left.

    Threads: every method may be called from any thread.
    """

    _pid: int
    _is_closed: bool
    _made_at: str

    def __new__(cls, *, poller: str = "auto", driver: Literal["thread", "loop"] = "thread") -> Self:
        if poller not in ("auto", "epoll", "poll"):
            raise ValueError(f"poller {poller!r}: must be 'auto', 'epoll' or 'poll'")
        if driver not in ("thread", "loop"):
            raise ValueError(f"driver {driver!r}: must be 'thread' or 'loop'")
        self = super().__new__(
            cls, flag_table(), None if poller == "auto" else poller, driver == "loop"
        )
        self._pid = os.getpid()
        self._is_closed = False
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

    def attach(self, sock: HasFileno | int) -> "Connection":
        """Watch a connection from now until its ``detach``.

        The fd is borrowed: detach before you close it.

        Args:
            sock: a connected stream socket, or its fd.

        Raises:
            UnsupportedSocketError: closed, or no connected stream socket.
            FileExistsError: this fd is attached already.
            ClosedError: the watcher was closed.
            ForkedError: the watcher was made before a fork.
        """
        return Connection(self, fd_of(sock))

    def mailbox(self) -> "Mailbox":
        """A place where fired watches wait for one consumer."""
        return Mailbox(self)

    def poll(self, timeout: float = 0.0) -> int:
        """Handle what waits, with ``driver="loop"``.

        Args:
            timeout: seconds to wait for an event; negative waits for ever.

        Returns:
            The number of events handled.

        Raises:
            OSError: EOPNOTSUPP with the thread driver.
        """
        return self.poll_ms(-1 if timeout < 0 else round(timeout * 1000))

    def stats(self) -> WatcherStats:
        """A snapshot of the counters."""
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
        return reason_of(self.read_info()[2])

    def info(self) -> ConnectionInfo:
        """All that is known of the connection.

        Raises:
            StaleWatchError: it was detached.
        """
        fd, seen, code, unread, seen_ns, is_blind = self.read_info()
        return ConnectionInfo(
            fd=fd,
            reason=reason_of(code),
            seen=frozenset(reason for reason in REASONS if seen & 1 << reason.code),
            unread_bytes=None if unread < 0 else unread,
            seen_ns=seen_ns,
            is_blind=is_blind,
        )

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
        """
        return self.lost_code(reason.code)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.detach()


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
    with _default_lock:
        if _default is None or _default.is_closed or _default.is_forked:
            _default = Watcher()
        return _default


def attach(sock: HasFileno | int) -> Connection:
    """Watch a connection with the process-wide watcher; see ``Watcher.attach``."""
    return default_watcher().attach(sock)


def is_gone(sock: HasFileno | int) -> Reason | None:
    """One look at a socket, registered nowhere and consuming nothing.

    Returns:
        How the peer left, or None while nothing says so.

    Raises:
        UnsupportedSocketError: closed, or no connected stream socket.

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
