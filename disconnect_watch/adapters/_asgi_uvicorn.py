"""Requests under uvicorn, which have records of their own, and which kind of call one is.

uvicorn's cycle knows whether its client is there and wakes whoever waits for that: told by
us it does so for the request that runs, also behind others. Under our own protocol an
exchange has the token, and hears of the leave first.
"""

import time
from collections.abc import Awaitable
from typing import Any

from disconnect_watch.adapters._asgi_call import WatchedCall
from disconnect_watch.adapters._fast import Calls, counts
from disconnect_watch.adapters._hang_up import hang_up
from disconnect_watch.adapters._inbox import Message
from disconnect_watch.aio._policy import Policy
from disconnect_watch.token import Reason
from disconnect_watch.watcher import Watcher

__all__ = ["calls"]


class UvicornCall(WatchedCall):
    """Under uvicorn the request's own record takes the news, and hands it on."""

    __slots__ = ()

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
            self._tell_application(self._left[0] if self._left else Reason.OWNER_CLOSED)


class ProtocolCall(UvicornCall):
    """Under our own protocol its exchange has the token, and says when it cancels it."""

    __slots__ = ()

    def _begin(self) -> None:
        counts.protocol += 1
        self._exchange.on_cancel = self._cancelled
        reason = self.token.reason
        if reason is not None:
            self._has_left_before(reason)

    @property
    def _exchange(self) -> Any:
        return self._send.__self__  # type: ignore[attr-defined]

    def _cancelled(self, reason: Reason) -> None:
        self.on_leave(reason, time.monotonic_ns())

    def _unfollow(self) -> None:
        self._exchange.on_cancel = None

    def _tell_application(self, reason: Reason) -> None:
        """The protocol has done so."""

    async def answer_nobody(self) -> None:
        """The protocol closes."""


def calls(policy: Policy, watcher: Watcher | None) -> Calls:
    """What makes the call of each request, as it is served.

    Args:
        policy: what a leave is worth.
        watcher: None for the process-wide one.
    """
    return Calls(policy, watcher, WatchedCall, UvicornCall, ProtocolCall)
