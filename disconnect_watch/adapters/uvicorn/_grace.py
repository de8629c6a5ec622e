"""A request whose client left, for as long as it may go on."""

import asyncio
from collections.abc import Callable
from typing import Any

from disconnect_watch.adapters.uvicorn._exchange import Message
from disconnect_watch.token import CancelToken, Reason

__all__ = ["GracePeriod"]


class GracePeriod:
    """Keeps the news that the client left from the application until the time is over.

    Stands between the watch and the request: ``left`` is armed in place of the request's
    token, and the application gets our ``receive``. What it sends meanwhile still goes to
    a client that only half-closed; uvicorn drops it once the connection is lost.

    Args:
        seconds: how long.
        cycle: uvicorn's, of the request.
        on_over: called with how the client left when the time is over.
    """

    __slots__ = ("_cycle", "_expiry", "_is_over", "_on_over", "_seconds", "left")

    def __init__(self, seconds: float, cycle: Any, on_over: Callable[[Reason], None]) -> None:
        self.left = CancelToken()
        self._seconds = seconds
        self._cycle = cycle
        self._on_over = on_over
        self._is_over = asyncio.Event()
        self._expiry: asyncio.TimerHandle | None = None

    def begin(self, reason: Reason) -> None:
        """The client left. Idempotent: the first news counts."""
        if self._expiry is None:
            loop = asyncio.get_running_loop()
            self._expiry = loop.call_later(self._seconds, self._on_over, reason)

    def end(self) -> None:
        """The request ended, or its time is over. Idempotent."""
        self._is_over.set()
        if self._expiry is not None:
            self._expiry.cancel()

    async def receive(self) -> Message:
        """The ``receive`` of the application: uvicorn's, but for the news of the disconnect."""
        message: Message = await self._cycle.receive()
        if message["type"] == "http.disconnect":
            await self._is_over.wait()
        return message
