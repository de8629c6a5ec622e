"""What a watcher tells: events, and what is known of connections and of itself."""

from dataclasses import dataclass
from typing import NamedTuple

from disconnect_watch.token import Reason

__all__ = ["ConnectionInfo", "Event", "WatcherStats"]


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
        is_blind: a leave may be hidden now: unread bytes stop this poller's look, or
            the receive window is closed, and no FIN behind more can come in.
        vanish_bound: seconds, see ``Connection.set_vanish_after``; None if off.
    """

    fd: int
    reason: Reason | None
    seen: frozenset[Reason]
    unread_bytes: int | None
    seen_ns: int
    is_blind: bool
    vanish_bound: float | None


@dataclass(frozen=True, slots=True)
class WatcherStats:
    """Counters of one watcher; the first three are of now, the rest since it was made.

    Attributes:
        poller: "epoll" or "poll".
        driver: "thread" or "loop".
        num_connections: attached.
        num_armed: watches armed and not fired.
        num_blind: connections whose leave may be hidden now, see ``ConnectionInfo``;
            the receive window is asked about where a watch is armed.
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
