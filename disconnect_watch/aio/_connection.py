"""One attached connection as the code of its loop shares it.

A transport is attached once, when it is watched first, and stays attached until
its ``connection_lost``; each watch then costs no system call. Two sources tell
that the peer left, and both are needed:

- the watcher, which sees it although nobody reads;
- the transport itself. While it reads it may be the faster one: it takes the end
  of stream or the reset, closes the fd, and the kernel drops our registration
  together with its pending event. So ``connection_lost`` and ``eof_received`` of
  the protocol are shadowed on the instance, and report before the fd closes.
  (Under TLS they are called after it: then the registration is gone already,
  which ``detach`` tolerates.)

What the owner does himself is no leave. Once ``close()`` was called on the
transport, news of the peer's FIN, which is his answer to ours, disturbs nobody;
an error that ends the connection arrives with ``connection_lost``. A TLS transport
closes itself when the peer does, on uvloop without another word to the protocol, so
there ``close`` is shadowed too, on the stream and on the transport if it takes an
attribute; an end without it is the peer's.

Which way the peer left may depend on who looked first: once the owner has taken the
error of a reset, the kernel shows the rest like an orderly end, and the watcher says
FIN.
"""

import asyncio
import contextlib
import errno
import time
from collections.abc import Callable
from typing import Any, Protocol

from disconnect_watch.aio._fast import KNOWN, Attached, Block
from disconnect_watch.aio._mailbox import LoopMailbox
from disconnect_watch.aio._optins import OptIns
from disconnect_watch.aio._policy import Policy
from disconnect_watch.aio._slotted import follow_slotted
from disconnect_watch.errors import ClosedError, UnsupportedSocketError
from disconnect_watch.token import Reason
from disconnect_watch.watcher import Connection, Watcher, default_watcher, is_default, is_gone

__all__ = [
    "LoopConnection",
    "connection_known_to",
    "connection_of_fd",
    "connection_of_transport",
    "reason_of_error",
]

_SILENT_PEER = frozenset({errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH})


class Handler(Protocol):
    """Who watches the connection for its whole life: the protocol of ``start_server``."""

    def on_leave(self, reason: Reason, at_ns: int) -> None: ...

    def block_ended(self, block: Block) -> None: ...


class LoopConnection(Attached):
    """An attached connection, its owner, and who on this loop watches it.

    Args:
        mailbox: of the loop.
        fd: of the connection.
        conn: what its owner has attached already, and detaches; None to attach it.

    Threads: the loop's own only.
    """

    def __init__(self, mailbox: LoopMailbox, fd: int, conn: Connection | None = None) -> None:
        conn = conn or mailbox.watcher.attach(fd)
        # The poller tells of what was before, too, but only in a moment: a token armed
        # on a client that is gone must be fired before any work starts.
        gone = is_gone(fd)
        if gone is not None:
            conn.lost(gone)
        self._join(mailbox, conn, is_default(mailbox.watcher))
        self._was_closed = False
        self._unshadow: Callable[[], object] | None = None
        self._shadowed_closes: list[tuple[dict[str, Any], Callable[[], None]]] = []
        mailbox.connections[fd] = self

    def serve(self, transport: asyncio.Transport, protocol: asyncio.BaseProtocol) -> None:
        """Belong to a protocol that reports ``end_of_stream`` and ``ended`` by itself."""
        self._own(transport)
        self.protocol = protocol
        self.is_followed = self.is_served = True
        attributes: dict[str, Any] = vars(protocol)
        attributes[KNOWN] = self
        # Kept longer it would keep the mailbox, and so its fd, as long as the protocol.
        self._unshadow = lambda: attributes.pop(KNOWN, None)

    def share(self, transport: asyncio.Transport, protocol: asyncio.BaseProtocol) -> None:
        """Belong to a protocol that is known to have attached the connection for itself.

        It calls ``owner_heard`` before it closes the transport, and ``let_go`` in place of
        detaching it.
        """
        self._own(transport)
        self.protocol = protocol
        self.is_followed = self.is_served = True

    def owner_heard(self, reason: Reason, *, is_end: bool = False) -> None:
        """Tell of an end that the owner knows of, and acts on next.

        Args:
            reason: OWNER_CLOSED where he made it himself, which is no news here.
            is_end: it ended the transport; before that, one that closes is the owner's.
        """
        self.has_peer_left |= is_end and reason is not Reason.OWNER_CLOSED
        if self.is_leave(reason):
            self._tell_blocks(reason)

    def let_go(self) -> None:
        """Detach, once all that has fired is delivered."""
        self.mailbox.deliver()
        self.detach()

    def _tell_blocks(self, reason: Reason) -> None:
        at_ns = time.monotonic_ns()
        for block in self.blocks:
            block.on_leave(reason, at_ns)

    def adopt(self, release: Callable[[], object]) -> None:
        """Belong to an owner of the fd who is no transport, and reports ``ended`` by himself.

        Args:
            release: called at the end.
        """
        self.is_followed = True
        self._unshadow = release

    def follow(self, transport: asyncio.Transport, protocol: asyncio.BaseProtocol | None) -> None:
        """Hear from ``protocol`` when the connection ends, if it can be made to tell.

        Called again where the transport got another protocol, or the protocol another
        transport (TLS was started on it).
        """
        self._own(transport)
        if protocol is not self.protocol:
            if self._unshadow is not None:
                self._unshadow()
            self.protocol = protocol
            self._unshadow = None if protocol is None else _shadow(self, protocol)
            self.is_followed = self._unshadow is not None

    def _own(self, transport: asyncio.Transport) -> None:
        if transport is not self.transport:
            self.transport = transport
            self._is_tls = transport.get_extra_info("sslcontext") is not None
            self._is_pipe = transport.get_extra_info("pipe") is not None
            self.note_closer(transport)

    def note_closer(self, closer: asyncio.Transport | asyncio.StreamWriter) -> None:
        """Know of the owner's own ``close``, where the end alone will not tell it apart."""
        attributes: dict[str, Any] | None = getattr(closer, "__dict__", None)
        if not self._is_tls or attributes is None:
            return
        if any(known is attributes for known, _ in self._shadowed_closes):
            return
        own_close = closer.close

        def close() -> None:
            self._was_closed = True
            own_close()

        attributes["close"] = close
        self._shadowed_closes.append((attributes, close))

    def is_of(self, transport: asyncio.Transport, protocol: asyncio.BaseProtocol | None) -> bool:
        """Whether this is that transport's connection, and not one that had its fd before."""
        return self.transport is None or self.transport is transport or self.protocol is protocol

    def opt_in(self, user: object, policy: Policy) -> None:
        """Do what ``policy`` asks of the connection; its partner is ``opt_out``."""
        if policy.is_plain:
            return
        if self._optins is None:
            self._optins = OptIns(self.mailbox, self.conn)
        transport = self.transport
        reader = self.stream_reader()
        self._optins.add(user, policy, transport, reader)

    def opt_out(self, user: object) -> None:
        """Undo what ``user`` alone asked for."""
        if self._optins is not None:
            self._optins.remove(user)

    def is_watched_by(self, task: asyncio.Task[Any]) -> bool:
        """Whether ``task`` is inside a block that watches this connection."""
        return any(block.task is task for block in self.blocks)

    def is_leave(self, reason: Reason) -> bool:
        """Whether the news is of the peer's own leaving, and not the echo of our close."""
        if reason is Reason.OWNER_CLOSED:
            return False
        if self.transport is None or not self.transport.is_closing():
            self.has_peer_left = True
        return self.has_peer_left

    def end_of_stream(self) -> None:
        """The owner read the peer's FIN, or an end that he made himself by a SHUT_RD.

        Of a pipe that he only writes to: that nobody reads it.
        """
        if not self.conn.is_attached:
            return
        # Under TLS it can be the end of that layer, with no FIN of the socket.
        if not self._is_tls and is_gone(self.conn.fd) is None:
            return
        reason = Reason.RESET if self._is_pipe else Reason.FIN
        if self.is_leave(reason):
            with contextlib.suppress(ClosedError):  # the watcher; the owner must not suffer
                self.conn.lost(reason)

    def ended(self, error: BaseException | None) -> None:
        """The owner lost the connection; the fd closes after this. Idempotent."""
        if not self.conn.is_attached:
            return
        reason = reason_of_error(error)
        if reason is Reason.OWNER_CLOSED and self._is_tls and not self._was_closed:
            reason = Reason.FIN
        elif reason is Reason.OWNER_CLOSED and self._is_pipe:
            # asyncio closes a pipe that nobody reads by itself, and names no error.
            reason = is_gone(self.conn.fd) or reason
        self.has_peer_left |= reason is not Reason.OWNER_CLOSED
        with contextlib.suppress(ClosedError):
            self.mailbox.lost(self.conn, reason)
        if reason is not Reason.OWNER_CLOSED:
            # The watcher may have told it before, while the transport was closing for
            # this very reason, which is_leave could not know then.
            self._tell_blocks(reason)
            if self.handler is not None:
                self.handler.on_leave(reason, time.monotonic_ns())
        self.detach()

    def detach(self) -> None:
        """Let go of the fd and of the owner."""
        self.conn.detach()
        if self._unshadow is not None:
            self._unshadow()
            self._unshadow = None
        for attributes, close in self._shadowed_closes:
            if attributes.get("close") is close:
                del attributes["close"]
        self._shadowed_closes.clear()
        self.forget_transport()


def connection_known_to(
    transport: asyncio.Transport, watcher: Watcher | None
) -> LoopConnection | None:
    """The attached connection of a transport, as its protocol knows it from before.

    The short way of each watch but the first. None where the long one must be gone:
    nothing is attached yet, or for another watcher.

    Args:
        watcher: None for the process-wide one, and for whichever serves the transport.
    """
    protocol = transport.get_protocol()
    known: LoopConnection | None = getattr(protocol, KNOWN, None)
    if known is None or not known.conn.is_attached:
        return None
    if known.is_served and watcher is None:
        known.follow(transport, protocol)
        return known
    # A protocol may have another transport by now, or more than one.
    if known.transport is transport and known.mailbox.watcher is (watcher or default_watcher()):
        return known
    return None


def connection_of_fd(mailbox: LoopMailbox, fd: int) -> LoopConnection:
    """The connection of a plain socket, attached unless a block watches it already."""
    known = mailbox.connections.get(fd)
    if known is not None and known.conn.is_attached:
        if known.transport is None or not known.transport.is_closing():
            return known
        known.detach()
    return LoopConnection(mailbox, fd)


def connection_of_transport(
    mailbox: LoopMailbox, transport: asyncio.Transport, fd: int, *, must_follow: bool
) -> LoopConnection:
    """The connection of an open transport, attached and followed once.

    Raises:
        UnsupportedSocketError: it must be followed, and its protocol cannot be.
    """
    protocol = transport.get_protocol()
    known = mailbox.connections.get(fd)
    if known is not None and known.conn.is_attached and not known.is_of(transport, protocol):
        # The fd was closed behind our back and is another socket's by now.
        known.detach()
    if known is None or not known.conn.is_attached:
        known = LoopConnection(mailbox, fd)
    known.follow(transport, protocol)
    if must_follow and not known.is_followed:
        raise UnsupportedSocketError(
            f"watch {transport!r}: it goes on reading, and {type(protocol).__name__} takes neither "
            "an attribute nor another class through which to hear of its end; "
            "pass pause_reading=True and no TLS"
        )
    return known


def reason_of_error(error: BaseException | None) -> Reason:
    """How a connection ended, from what ``connection_lost`` was given."""
    if isinstance(error, OSError):
        is_silent = isinstance(error, TimeoutError) or error.errno in _SILENT_PEER
        return Reason.TIMED_OUT if is_silent else Reason.RESET
    return Reason.OWNER_CLOSED


def _shadow(
    connection: LoopConnection, protocol: asyncio.BaseProtocol
) -> Callable[[], None] | None:
    """Report a protocol's callbacks to ``connection`` first; returns what undoes it.

    Returns None where the protocol neither has a ``__dict__`` to put them in nor lets its
    class be exchanged.
    """
    attributes: dict[str, Any] | None = getattr(protocol, "__dict__", None)
    if attributes is None:
        return follow_slotted(connection, protocol, KNOWN)
    own_connection_lost = protocol.connection_lost
    own_eof_received: Callable[[], bool | None] | None = getattr(protocol, "eof_received", None)

    def connection_lost(error: Exception | None) -> None:
        connection.ended(error)
        own_connection_lost(error)

    def eof_received() -> bool | None:
        connection.end_of_stream()
        assert own_eof_received is not None
        return own_eof_received()

    shadows: dict[str, Any] = {"connection_lost": connection_lost, KNOWN: connection}
    if own_eof_received is not None:
        shadows["eof_received"] = eof_received
    shadowed = {name: attributes[name] for name in shadows if name in attributes}
    attributes.update(shadows)

    def unshadow() -> None:
        for name, shadow in shadows.items():
            # Another wrapper may lie over ours by now, which then only passes through.
            if attributes.get(name) is shadow:
                del attributes[name]
                if name in shadowed:
                    attributes[name] = shadowed[name]

    return unshadow
