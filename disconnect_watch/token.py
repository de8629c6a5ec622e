"""The cancel token: one flag that watchers set and that engines read.

A token needs no loop, no socket and no watcher. Its word lies in the flag table
of the process group, so native code reads it through ``address``, and another
process or a GPU through the table's memory.
"""

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable
from enum import StrEnum
from typing import Any, Protocol

from disconnect_watch import _core
from disconnect_watch.errors import ClientDisconnected, StaleWatchError

__all__ = ["BorrowedToken", "CancelToken", "FlagSet", "Reason", "adopt_flag_table", "flag_table"]


class Reason(StrEnum):
    """Why a flag was set; also the source of a signal in metrics."""

    FIN = "fin"
    RESET = "reset"
    TIMED_OUT = "timed_out"
    OWNER_CLOSED = "owner_closed"
    ABORTED = "aborted"
    DEADLINE = "deadline"
    SHUTDOWN = "shutdown"

    def __init__(self, value: str) -> None:
        #: The low byte of the flag's word: ``enum dw_reason`` in ``dw_flags.h``, from 1.
        self.code = len(type(self).__members__) + 1


#: In the order of ``enum dw_reason``, which starts at 1.
REASONS = tuple(Reason)


def reason_of(code: int) -> Reason | None:
    """The reason with that code; None for 0, a live flag."""
    return REASONS[code - 1] if code else None


def not_a_reason(value: object) -> TypeError:
    """What to raise where a ``Reason`` was expected."""
    return TypeError(f"reason {value!r}: must be a Reason, such as Reason.{Reason.ABORTED.name}")


def flag_table() -> _core.Flags:
    """The table of this process and its forked children, made on first use."""
    return _core.flag_table()


def adopt_flag_table(memfd: int) -> _core.Flags:
    """Take the table of another process for this one's, before this one has made any flag.

    Args:
        memfd: of that table, see ``Flags.fileno``; a duplicate is kept.

    Raises:
        OSError: it is no flag table.
        RuntimeError: this process has a table already.
    """
    return _core.adopt_flag_table(memfd)


class Loop(Protocol):
    """What ``add_callback`` needs of an event loop."""

    def call_soon_threadsafe(self, callback: Callable[..., object], /, *args: Any) -> object: ...


class CancelToken(_core.Flag):
    """A cancel flag and the right to set it.

    The first ``cancel``, by whoever it is, decides the reason; the flag never
    goes back to live. A read costs one load.

    Threads: every method may be called from any thread.
    """

    # Without a dict of its own a token is made in a third of the time.
    __slots__ = ("__weakref__", "_callbacks")

    _callbacks: list[tuple[Callable[["CancelToken"], object], Loop | None]]

    @property
    def reason(self) -> Reason | None:
        """Why it was cancelled; None while live."""
        return reason_of(self.reason_code)

    @property
    def cancelled_at_ns(self) -> int:
        """When the cause was seen, ``time.monotonic_ns``; 0 while live."""
        return self.times()[0]

    @property
    def cancelled_at(self) -> float | None:
        """When the cause was seen, seconds on ``time.monotonic``; None while live."""
        at_ns = self.cancelled_at_ns
        return at_ns / 1e9 if at_ns else None

    def cancel(self, reason: Reason = Reason.ABORTED) -> bool:
        """Set the flag unless it is set, and wake every waiter of every process.

        Returns:
            True if this call set it.

        Raises:
            TypeError: no ``Reason``.
        """
        try:
            code = reason.code
        except AttributeError:
            raise not_a_reason(reason) from None
        return self.cancel_code(code)

    def raise_if_cancelled(self) -> None:
        """Raise if the flag is set.

        Raises:
            ClientDisconnected: with the reason and the time the cause was seen.
        """
        if self.cancelled:
            reason = self.reason
            assert reason is not None
            # Between the winner's CAS and its timestamp the time reads as 0.
            at = self.cancelled_at
            raise ClientDisconnected(reason, time.monotonic() if at is None else at)

    def wait(self, timeout: float | None = None) -> bool:
        """Block the calling thread until the flag is set.

        Sleeps in the kernel without the GIL; a Ctrl-C in the main thread ends it.

        Args:
            timeout: seconds; None waits for ever, and so does infinity.

        Returns:
            Whether the flag is set.
        """
        if timeout is None or timeout >= threading.TIMEOUT_MAX:
            deadline = None  # nanoseconds of it would fit no 64 bits
        else:
            deadline = _core.clock_ns() + int(timeout * 1e9)
        while True:
            left = -1 if deadline is None else max(0, deadline - _core.clock_ns())
            done = self.wait_ns(left)
            if done is not None:
                return done

    def add_callback(
        self, callback: Callable[["CancelToken"], object], *, loop: Loop | None = None
    ) -> None:
        """Call ``callback(token)`` once, when the flag is set or now if it is.

        It runs on ``loop`` where one is given, else on the process's one callback
        thread; never on the watcher's, and never inside this call.

        Raises:
            TypeError: it cannot be called.
        """
        if not callable(callback):
            raise TypeError(f"callback {callback!r}: must be callable")
        _dispatcher.add(self, callback, loop)

    def remove_callback(self, callback: Callable[["CancelToken"], object]) -> int:
        """Forget ``callback``; returns how many registrations that removed."""
        return _dispatcher.remove(self, callback)

    def __repr__(self) -> str:
        state = self.reason.value if self.reason else "live"
        return f"<CancelToken {self.slot}/{self.generation} {state}>"


class BorrowedToken(CancelToken):
    """A token that another process holds, by its name in the table that both share.

    No reference is taken, so that this process may die at any time and leaves no slot behind.
    Whoever lends it holds it until this process has said that it is done; should it die before,
    and its flags be taken back, the name is stale, which here means cancelled: nobody is left
    who wants the answer.

    Args:
        slot, generation: of a token of the same table.
    """

    __slots__ = ()

    def __init__(self, slot: int, generation: int) -> None:
        self.borrow(slot, generation)

    @property
    def cancelled(self) -> bool:
        """Whether it was cancelled, or nobody holds it any more."""
        try:
            return super().cancelled
        except StaleWatchError:
            return True

    @property
    def reason_code(self) -> int:
        """See ``Reason.code``; that of OWNER_CLOSED where nobody holds it any more."""
        try:
            return super().reason_code
        except StaleWatchError:
            return Reason.OWNER_CLOSED.code

    def times(self) -> tuple[int, int]:
        """See ``Flag.times``; 0 where nobody holds it any more."""
        try:
            return super().times()
        except StaleWatchError:
            return 0, 0

    def cancel_code(self, reason: int) -> bool:
        """See ``CancelToken.cancel``; it is cancelled already where nobody holds it any more."""
        try:
            return super().cancel_code(reason)
        except StaleWatchError:
            return False

    def ack(self, step: int) -> None:
        """See ``Flag.ack``; nobody is told where nobody holds it any more."""
        with contextlib.suppress(StaleWatchError):
            super().ack(step)


class FlagSet(_core.FlagSet):
    """The tokens of many requests, to be looked at together: one call in C, whatever their number.

    For an engine that asks at every step whether anybody has left, and hears no nearly every time.
    ``add`` takes a token, and holds it; ``remove`` gives it back, and is called once for each
    ``add`` of the same one; ``any_fired`` says whether one of those that are held has been
    cancelled.

    Threads: one at a time. Tokens may be cancelled by any thread meanwhile.
    """

    __slots__ = ()


class _Dispatcher:
    """The callback thread: it sleeps on the table's doorbell while callbacks wait.

    Every cancel rings that doorbell, whether it came from the watcher, from
    ``cancel``, from native code or from another process, so one wait covers
    all sources. The thread lives only while some live token has a callback.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tokens: weakref.WeakSet[CancelToken] = weakref.WeakSet()
        self._thread: threading.Thread | None = None

    def add(
        self,
        token: CancelToken,
        callback: Callable[[CancelToken], object],
        loop: Loop | None,
    ) -> None:
        with self._lock:
            if not hasattr(token, "_callbacks"):
                token._callbacks = []
                # The thread must see that its last token died, to end itself.
                weakref.finalize(token, token.table.ring).atexit = False
            token._callbacks.append((callback, loop))
            self._tokens.add(token)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run,
                    args=(token.table,),
                    name="disconnect-watch-callbacks",
                    daemon=True,
                )
                self._thread.start()
        # The token may have been cancelled before it was registered here.
        token.table.ring()

    def remove(self, token: CancelToken, callback: Callable[[CancelToken], object]) -> int:
        with self._lock:
            callbacks = getattr(token, "_callbacks", [])
            kept = [entry for entry in callbacks if entry[0] != callback]
            removed = len(callbacks) - len(kept)
            callbacks[:] = kept
            if not kept:
                self._tokens.discard(token)
        token.table.ring()
        return removed

    def _take_fired(self) -> list[tuple[CancelToken, Callable[[CancelToken], object], Loop | None]]:
        """Remove and return the callbacks that are due; end the thread when none wait."""
        due = []
        with self._lock:
            waiting = list(self._tokens)
            for token in waiting:
                if token.cancelled:
                    self._tokens.discard(token)
                    due += [(token, callback, loop) for callback, loop in token._callbacks]
                    token._callbacks.clear()
            if not waiting:
                self._thread = None
        return due

    def _run(self, table: _core.Flags) -> None:
        me = threading.current_thread()
        while self._thread is me:
            seen = table.bell()
            due = self._take_fired()
            for token, callback, loop in due:
                _call(token, callback, loop)
            # Not a token may stay alive in this frame while it sleeps.
            token = callback = loop = None  # type: ignore[assignment]
            if not due and self._thread is me:
                table.wait_bell(seen, -1)

    def forget(self) -> None:
        """In a forked child: the thread is the parent's, and so are the callbacks."""
        self.__init__()  # type: ignore[misc]


def _call(token: CancelToken, callback: Callable[[CancelToken], object], loop: Loop | None) -> None:
    try:
        if loop is None:
            callback(token)
        else:
            loop.call_soon_threadsafe(callback, token)
    except BaseException as error:
        # A SystemExit, too, must not end the thread on which all callbacks wait.
        is_closed_loop = isinstance(error, RuntimeError) and "closed" in str(error)
        if loop is None or not is_closed_loop:
            _report(error)


def _report(error: BaseException) -> None:
    threading.excepthook(
        threading.ExceptHookArgs(
            (type(error), error, error.__traceback__, threading.current_thread())
        )
    )


_dispatcher = _Dispatcher()
os.register_at_fork(after_in_child=_dispatcher.forget)
