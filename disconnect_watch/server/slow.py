"""Requests that do not come to an end: a header without one, a body cut short, a byte a second.

Each holds nothing but its own connection, and that not for ever: a request has a time to
arrive, and the longer it is the longer that lasts. One timer looks at all of them, and none
runs while every request is whole.

Source: Apache's ``mod_reqtimeout``, which bounds a request in the same way.
"""

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from disconnect_watch.server.run import FrontendProtocol

__all__ = ["Arrivals"]

#: Bytes a second that a client must send at least, once its time is over.
MIN_RATE = 500.0


class Arrivals:
    """The connections of a server that owe it the rest of a request.

    Args:
        seconds: that a request has to arrive, beside those for its size.

    Threads: the loop's only.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._tick = min(1.0, seconds / 4)
        self._deadlines: dict[FrontendProtocol, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, protocol: "FrontendProtocol") -> None:
        """A connection was made, or a request began on it."""
        loop = protocol.loop
        self._deadlines[protocol] = loop.time() + self._seconds
        if self._timer is None:
            self._timer = loop.call_later(self._tick, self._look, loop)

    def progress(self, protocol: "FrontendProtocol", num_bytes: int) -> None:
        """Some of it came."""
        deadline = self._deadlines.get(protocol)
        if deadline is not None:
            self._deadlines[protocol] = deadline + num_bytes / MIN_RATE

    def end(self, protocol: "FrontendProtocol") -> None:
        """The request is whole, or its connection is gone."""
        self._deadlines.pop(protocol, None)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        now = loop.time()
        for protocol, deadline in list(self._deadlines.items()):
            if protocol.flow.read_paused or protocol.is_answering:
                # A slow handler does not read, or one that runs must not end with the next.
                self._deadlines[protocol] = deadline + self._tick
            elif deadline < now:
                self.end(protocol)
                protocol.transport.abort()
        self._timer = loop.call_later(self._tick, self._look, loop) if self._deadlines else None
