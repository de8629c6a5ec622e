"""``watch``: a block of code that is cancelled when its client leaves.

The rules are those of ``asyncio.timeout``. The task is cancelled once; at the end
of the block that cancel is taken back (``uncancel``), and the ``CancelledError``
becomes ``ClientDisconnected`` only if no other cancel is asked for: one from
outside that came at the same time propagates as it is. Of nested blocks that were
cancelled together the outermost converts it.

The cancel is never made while a task runs, but from the loop, and taken off the
loop at the end of the block: set inside the running task it would strike at the
first ``await`` *after* a block that has none left.
"""

import asyncio
import time
from typing import cast

from disconnect_watch.aio._connection import (
    LoopConnection,
    connection_known_to,
    connection_of_fd,
    connection_of_transport,
    reason_of_error,
)
from disconnect_watch.aio._fast import Block
from disconnect_watch.aio._mailbox import loop_mailbox
from disconnect_watch.aio._policy import PLAIN, HalfClose, OnDisconnect, Probe, policy
from disconnect_watch.errors import ClientDisconnected, UnsupportedSocketError
from disconnect_watch.token import CancelToken, Reason
from disconnect_watch.watcher import HasFileno, Watcher, fd_of

__all__ = ["Watch", "watch"]

_LEAVES = (Reason.FIN, Reason.RESET, Reason.TIMED_OUT)

Target = asyncio.StreamWriter | asyncio.BaseTransport | HasFileno | int


def watch(
    target: Target,
    *,
    half_close: HalfClose = "disconnect",
    probe: Probe | None = None,
    vanish_after: float | None = None,
    unblind: int | None = None,
    on_disconnect: OnDisconnect = "cancel",
    pause_reading: bool = True,
    watcher: Watcher | None = None,
) -> "Watch":
    """Cancel a block of code when the client of ``target`` leaves.

    ``async with watch(writer) as w:`` gives the block ``w.token``, which fires at
    once, whatever the loop is doing. Then the task is cancelled at its ``await``,
    and ``ClientDisconnected`` leaves the block. Where the client has left before,
    the token is fired on entry and the first ``await`` that waits is cancelled; a
    transport that is closing or closed has no client any more.

    While the block runs, reading is paused: what the client sends next stays in the
    kernel, unread and unharmed, for the owner to read afterwards. Closing the
    connection inside the block fires the token (work for it is pointless), but
    cancels nobody: who closed it knows.

    Args:
        target: a StreamWriter, a Transport, a connected stream socket, the write end of
            a pipe, or the fd. A plain one must stay open until the end of the block.
        half_close: what the client's FIN means. "disconnect": it left. "ignore": it
            may still read, until a reset. "probe": find out, by keepalive each second,
            which a client that closed answers with a reset once its kernel has
            forgotten the connection (a minute on Linux; at once over AF_UNIX).
        probe: with "probe", called once with the transport after the FIN, to find out
            sooner: writes what does no harm to this protocol, such as a comment line.
        vanish_after: seconds of silence, though asked, after which a client that left
            without a word is gone; see ``Connection.set_vanish_after``.
        unblind: bytes; while reading is paused, lets a FIN in behind so many that
            nobody has read. For when the request is complete: in the block only a
            StreamReader may read on.
        on_disconnect: "cancel", or ``grace(seconds)`` to let the block go on for a while.
        pause_reading: False lets the transport read on, as a body must that expects
            more of its request from a protocol of its own. A StreamReader resumes
            by itself when it is read inside the block.
        watcher: None for the process-wide one.

    Returns:
        An async context manager, for one use.

    Raises:
        ValueError: an option has a value that is none of these.
        TypeError: on entry; ``target`` is none of these.
        UnsupportedSocketError: on entry; no connected stream socket, a closed one,
            or a transport whose end cannot be followed.
        OSError: on entry; EBADF, a number that names no open file.
        ClientDisconnected: at the end of the block; the client left inside it.

    Threads: inside a task of a running loop.
    """
    if (
        half_close == "disconnect"
        and probe is None
        and vanish_after is None
        and unblind is None
        and on_disconnect == "cancel"
    ):
        return Watch(target, PLAIN, pause_reading, watcher)
    checked = policy(
        half_close=half_close,
        probe=probe,
        vanish_after=vanish_after,
        unblind=unblind,
        on_disconnect=on_disconnect,
    )
    return Watch(target, checked, pause_reading, watcher)


class Watch(Block):
    """What ``watch`` returns."""

    __slots__ = ()

    @property
    def token(self) -> CancelToken:
        """The token that fires when the client leaves."""
        return self._token

    @property
    def reason(self) -> Reason | None:
        """How the client left, or why the token was cancelled; None while neither."""
        return self._left[0] if self._left else self._token.reason

    @property
    def has_left(self) -> bool:
        """Whether the client left; at the start of the block: before it.

        Known also during a grace, while the token has not fired.
        """
        return self._left is not None

    def _enter(self) -> None:
        target = self._target
        if hasattr(target, "get_extra_info"):
            transport = cast("asyncio.Transport", getattr(target, "transport", target))
            if transport.is_closing():
                self._leave(_reason_of_closed(target), time.monotonic_ns())
                return
            connection = self._connection_of(transport)
            if isinstance(target, asyncio.StreamWriter):
                connection.note_closer(target)
        elif isinstance(target, int) or hasattr(target, "fileno"):
            connection = connection_of_fd(loop_mailbox(self._watcher), fd_of(target))
        else:
            raise TypeError(
                f"watch {target!r}: expected a StreamWriter, a Transport, a socket or its fd, "
                f"got {type(target).__name__}"
            )
        token = None if self._policy.grace else self._token
        connection.arm(self, token, self._policy.mask)
        self._connection = connection
        connection.opt_in(self, self._policy)
        reason = self._token.reason
        if self._policy.grace:  # the token is not armed
            reason = connection.conn.reason
            if reason is Reason.FIN and self._policy.half_close != "disconnect":
                reason = None
        if reason is not None:
            self._left_before(reason)
        elif self._pause_reading:
            self._is_pausing = True
            connection.pause()

    def _left_before(self, reason: Reason) -> None:
        # Between the flag's CAS and its timestamp the time reads as 0.
        self.on_leave(reason, self._token.cancelled_at_ns or time.monotonic_ns())

    def _connection_of(self, transport: asyncio.Transport) -> LoopConnection:
        known = connection_known_to(transport, self._watcher)
        if known is not None:
            return known
        sock = transport.get_extra_info("socket") or transport.get_extra_info("pipe")
        if sock is None:
            raise UnsupportedSocketError(
                f"watch {transport!r}: no socket or pipe is behind it; watch the fd itself"
            )
        # Under TLS a transport reads on while it is paused.
        is_tls = transport.get_extra_info("sslcontext") is not None
        return connection_of_transport(
            loop_mailbox(self._watcher),
            transport,
            sock.fileno(),
            must_follow=is_tls or not self._pause_reading,
        )

    def disarm(self) -> None:
        """Let the rest of the block run whatever the client does. Idempotent.

        For when all that the client waits for is about to be written: it may leave as
        soon as it has that. A cancel that was made before stands.
        """
        self._exit()

    def on_leave(self, reason: Reason, at_ns: int) -> None:
        """The connection ended: cancel the block, once, if it was the client's doing."""
        connection = self._connection
        if self._left is None and connection is not None and connection.is_leave(reason):
            self._leave(reason, at_ns)

    def _leave(self, reason: Reason, at_ns: int) -> None:
        assert self.task is not None
        told = self._token.reason
        # The token may have been set by another source, with another reason.
        self._left = (told if told in _LEAVES else reason, at_ns)
        loop = self.task.get_loop()
        if self._policy.grace:
            self._soon = loop.call_later(self._policy.grace, self._cancel)
            return
        self._token.cancel(reason)
        if asyncio.current_task(loop) is None:
            self._cancel()
        else:
            self._soon = loop.call_soon(self._cancel)

    def _cancel(self) -> None:
        assert self.task is not None
        assert self._left is not None
        self._token.cancel(self._left[0])
        self.was_cancelled = True
        self.task.cancel()

    async def _end(self, error: BaseException | None) -> None:
        """The end of a block that was cancelled."""
        assert self.task is not None
        assert self._left is not None
        is_ours_alone = self.task.uncancel() <= self._cancels_before
        if is_ours_alone and isinstance(error, asyncio.CancelledError):
            reason, at_ns = self._left
            raise ClientDisconnected(reason, at_ns / 1e9) from error


def _reason_of_closed(target: object) -> Reason:
    """How a closing transport ended, as far as its stream knows."""
    reader = getattr(target, "_reader", None)
    error = reader.exception() if isinstance(reader, asyncio.StreamReader) else None
    return reason_of_error(error)
