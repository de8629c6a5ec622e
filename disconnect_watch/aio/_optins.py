"""What the users of one connection opted in to, put together, and put back.

Several blocks and a handler can watch one connection, each with a policy of its own:

- the shortest ``vanish_after`` of all holds, the watcher's own included;
- the peer is probed from its FIN on while anybody wants that;
- while nobody reads, the largest ``unblind`` of all is set.

The last is the delicate one: a socket that is unblinded is not readable, so whoever
begins to read must come by here first. A StreamReader resumes its transport by itself;
so it is handed a ``FlowTransport`` in its place.
"""

import asyncio
import contextlib
from functools import partial
from typing import Any

from disconnect_watch.aio._mailbox import LoopMailbox
from disconnect_watch.aio._policy import Policy, Probe
from disconnect_watch.errors import DisconnectWatchError
from disconnect_watch.token import Reason
from disconnect_watch.watcher import MASK_FIN, Connection

__all__ = ["FlowTransport", "OptIns"]


class OptIns:
    """The opt-ins of one connection's users.

    Threads: the loop's own only.
    """

    def __init__(self, mailbox: LoopMailbox, conn: Connection) -> None:
        self._mailbox = mailbox
        self._conn = conn
        self._users: dict[object, tuple[Policy, int]] = {}
        self._flow: FlowTransport | None = None
        self._is_unblind = False

    def add(
        self, user: object, policy: Policy, transport: asyncio.Transport | None, reader: Any
    ) -> None:
        """Do what ``policy`` asks for until ``remove(user)``.

        Args:
            user: whose policy it is.
            policy: not a plain one.
            transport: to probe through; None for a bare socket.
            reader: the StreamReader that controls the flow of ``transport``, if one does.
        """
        watch_id = 0
        if policy.half_close == "probe":
            on_fin = partial(self._probe, policy.probe, transport)
            watch_id = self._mailbox.arm(self._conn, None, on_fin, mask=MASK_FIN)
        self._users[user] = policy, watch_id
        if policy.vanish_after is not None:
            self._set_bound()
        if policy.unblind and reader is not None and self._flow is None:
            self._flow = FlowTransport(reader, self)

    def remove(self, user: object) -> None:
        """Undo it, but for what others ask. A user who asked for nothing may come, too."""
        policy, watch_id = self._users.pop(user, (None, 0))
        if policy is None:
            return
        if watch_id:
            self._mailbox.disarm(self._conn, watch_id)
        with _unless_gone():
            if policy.vanish_after is not None:
                self._set_bound()
            if watch_id and not any(watch_id for _, watch_id in self._users.values()):
                self._conn.set_probing(False)
        if policy.unblind and not self._num_bytes():
            self.reblind()
            if self._flow is not None:
                self._flow.return_transport()
                self._flow = None

    def unblind(self) -> None:
        """Nobody reads from now on."""
        num_bytes = self._num_bytes()
        if num_bytes:
            with _unless_gone():
                self._conn.unblind(num_bytes)
                self._is_unblind = True

    def reblind(self) -> None:
        """Somebody is about to read."""
        if self._is_unblind:
            self._is_unblind = False
            with _unless_gone():
                self._conn.reblind()

    def _num_bytes(self) -> int:
        return max((policy.unblind or 0 for policy, _ in self._users.values()), default=0)

    def _set_bound(self) -> None:
        bounds = [policy.vanish_after for policy, _ in self._users.values()]
        bounds.append(self._mailbox.watcher.vanish_after)
        asked = [bound for bound in bounds if bound is not None]
        self._conn.set_vanish_after(min(asked, default=None))

    def _probe(
        self, probe: Probe | None, transport: asyncio.Transport | None, reason: Reason, at_ns: int
    ) -> None:
        if transport is not None and transport.is_closing():
            return
        with _unless_gone():
            self._conn.set_probing(True)
        if probe is not None and transport is not None:
            probe(transport)


class FlowTransport:
    """A transport as its StreamReader sees it: each pause and resume comes by the opt-ins."""

    def __init__(self, reader: Any, optins: OptIns) -> None:
        self.transport: asyncio.Transport = reader._transport
        self._reader = reader
        self._optins = optins
        reader._transport = self

    def pause_reading(self) -> None:
        self.transport.pause_reading()
        self._optins.unblind()

    def resume_reading(self) -> None:
        self._optins.reblind()
        self.transport.resume_reading()

    def return_transport(self) -> None:
        """Give the reader its transport back, unless it has got another one."""
        if self._reader._transport is self:
            self._reader._transport = self.transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self.transport, name)


def _unless_gone() -> contextlib.AbstractContextManager[None]:
    """With the socket, or with its watcher, the options are gone that there are to set."""
    return contextlib.suppress(DisconnectWatchError, OSError)
