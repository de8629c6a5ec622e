"""Renewing the leases of tickets that wait for their pull, so long as we live."""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from disconnect_watch.disagg.errors import PeerLostError
from disconnect_watch.disagg.records import Ticket

__all__ = ["Heartbeat"]

_logger = logging.getLogger("disconnect_watch.disagg")

#: How often in a lease: two may be lost.
PER_LEASE = 3


@dataclass(slots=True)
class _Held:
    on_gone: Callable[[Ticket], object]
    due_ns: int
    heard_ns: int


class Heartbeat:
    """The tickets of one other node, and a thread while there are any.

    Args:
        extend: renews a ticket's lease and says whether it was there to be renewed.

    Threads: any.
    """

    def __init__(self, extend: Callable[[Ticket], bool]) -> None:
        self._extend = extend
        self._changed = threading.Condition()
        self._held: dict[Ticket, _Held] = {}
        self._thread: threading.Thread | None = None

    def hold(self, ticket: Ticket, on_gone: Callable[[Ticket], object]) -> None:
        """Renew from now on."""
        now = time.monotonic_ns()
        with self._changed:
            self._held[ticket] = _Held(on_gone, now, now)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="disconnect-watch-heartbeat", daemon=True
                )
                self._thread.start()
            self._changed.notify_all()

    def let_go(self, ticket: Ticket) -> None:
        """Renew no more. One renewal may be under way still."""
        with self._changed:
            self._held.pop(ticket, None)
            self._changed.notify_all()

    def close(self) -> None:
        """Let go of all, and wait for the thread. Idempotent."""
        with self._changed:
            self._held.clear()
            thread = self._thread
            self._changed.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _run(self) -> None:
        while (ticket := self._next()) is not None:
            try:
                is_there = self._extend(ticket)
            except PeerLostError:
                is_there = None
            except Exception:  # no file descriptor is left, say: the next renewal may have one
                _logger.exception("renew a lease at %s", ticket.address)
                is_there = None
            self._note(ticket, is_there)

    def _next(self) -> Ticket | None:
        """Wait until a renewal is due; None, and no thread any more, when nothing is held."""
        with self._changed:
            while self._held:
                ticket, held = min(self._held.items(), key=lambda item: item[1].due_ns)
                left_ns = held.due_ns - time.monotonic_ns()
                if left_ns <= 0:
                    return ticket
                self._changed.wait(left_ns / 1e9)
            self._thread = None
            return None

    def _note(self, ticket: Ticket, is_there: bool | None) -> None:
        """Note the answer; None is that there was none."""
        now = time.monotonic_ns()
        with self._changed:
            held = self._held.get(ticket)
            if held is None:
                return
            held.due_ns = now + ticket.lease_ns // PER_LEASE
            if is_there:
                held.heard_ns = now
                return
            if is_there is None and now < held.heard_ns + ticket.lease_ns:
                return
            del self._held[ticket]
        try:
            held.on_gone(ticket)
        except Exception:  # it is one request's; the leases of others go on
            _logger.exception("on_gone of a ticket")
