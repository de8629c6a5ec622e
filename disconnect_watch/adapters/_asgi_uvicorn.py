"""Requests under uvicorn, which have records of their own, and which kind of call one is.

uvicorn's cycle knows whether its client is there and wakes whoever waits for that: told by
us it does so for the request that runs, also behind others. Under our own protocol an
exchange has the token, and hears of the leave first.
"""

import time
from collections.abc import Awaitable
from typing import Any

from disconnect_watch.adapters._asgi_call import Scope, Send, WatchedCall, counts
from disconnect_watch.adapters._hang_up import hang_up
from disconnect_watch.adapters._inbox import Message, Receive
from disconnect_watch.aio._policy import Policy
from disconnect_watch.token import Reason
from disconnect_watch.watcher import Watcher

__all__ = ["watched_call"]


def watched_call(
    scope: Scope,
    receive: Receive,
    send: Send,
    *,
    policy: Policy,
    watcher: Watcher | None,
) -> "WatchedCall":
    """The call of one request, by the current task, on the connection that is found.

    Args:
        scope: the request's, which gets the token.
        receive: see ``find``.
        send: see ``find``.
        policy: what a leave is worth.
        watcher: None for the process-wide one.
    """
    kind = WatchedCall
    if hasattr(getattr(send, "__self__", None), "on_cancel"):
        kind = ProtocolCall
    elif hasattr(getattr(receive, "__self__", None), "message_event"):
        kind = UvicornCall
    call = kind(None, policy, False, watcher)
    call.take(scope, receive, send)
    return call


class UvicornCall(WatchedCall):
    """Under uvicorn the request's own record takes the news, and hands it on."""

    __slots__ = ()

    def _begin(self) -> None:
        transport = self._receive.__self__.transport  # type: ignore[attr-defined]
        is_plain = self._policy.is_plain and not (self._policy.grace or self.is_borrowed)
        if is_plain and self._arm_shortly(transport, self.token):
            counts["transport"] += 1
            if self.token.cancelled:
                self._has_left_before(self.token.reason or Reason.OWNER_CLOSED)
        else:
            super()._begin()

    @property
    def _cycle(self) -> Any:
        return self._receive.__self__  # type: ignore[attr-defined]

    def _is_unheard(self) -> bool:
        # Its connection_lost, which we follow, is all that its receive() would tell of.
        return self._connection is None and super()._is_unheard()

    def _next_message(self) -> Awaitable[Message]:
        return self._receive() if self.inbox is None else super()._next_message()

    def _tell_application(self, reason: Reason) -> None:
        # uvicorn alone tells the newest request of a pipeline, which may be another.
        cycle = self._cycle
        cycle.disconnected = True
        cycle.message_event.set()
        cycle.flow.resume_writing()
        super()._tell_application(reason)
        hang_up(cycle.transport, reason)

    async def answer_nobody(self) -> None:
        """A disconnected cycle asks for none, and starts nothing behind it."""
        if not self._cycle.disconnected:
            self._tell_application(self.left[0] if self.left else Reason.OWNER_CLOSED)


class ProtocolCall(UvicornCall):
    """Under our own protocol its exchange has the token, and says when it cancels it."""

    __slots__ = ()

    def _begin(self) -> None:
        counts["protocol"] += 1
        self._exchange.on_cancel = self._cancelled
        reason = self.token.reason
        if reason is not None:
            self._has_left_before(reason)

    @property
    def _exchange(self) -> Any:
        return self._send.__self__  # type: ignore[attr-defined]

    def _cancelled(self, reason: Reason) -> None:
        self.on_leave(reason, time.monotonic_ns())

    def _disarm(self) -> None:
        self._is_over = True
        self._exchange.on_cancel = None
        self._exit()

    def _tell_application(self, reason: Reason) -> None:
        """The protocol has done so."""

    async def answer_nobody(self) -> None:
        """The protocol closes."""
