"""The loop's end of one request: outputs as they arrive, and the right to stop it."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Self

from disconnect_watch.engine.outcome import RequestOutput
from disconnect_watch.engine.request import Request
from disconnect_watch.token import Reason

__all__ = ["OutputQueue", "RequestStream"]


class OutputQueue(AsyncIterator[RequestOutput]):
    """Outputs of one request, from whoever delivers them to whoever reads them.

    Threads: its loop's only.
    """

    def __init__(self, *, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._outputs: deque[RequestOutput] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._has_ended = False
        self._error: Exception | None = None

    async def __anext__(self) -> RequestOutput:
        while not self._outputs:
            if self._error is not None:
                raise self._error
            if self._has_ended:
                raise StopAsyncIteration
            self._waiter = self.loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._outputs.popleft()

    def deliver(self, output: RequestOutput) -> None:
        """Take one output; called on the loop. A closed stream hears nothing more."""
        if self._has_ended:
            return
        self._outputs.append(output)
        self._has_ended = output.outcome is not None
        self._wake()

    def fail(self, error: Exception) -> None:
        """Raise this behind what was delivered; called on the loop."""
        if not self._has_ended:
            self._has_ended = True
            self._error = error
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class RequestStream(OutputQueue):
    """The outputs of one request, the last of which carries its outcome.

    Whoever has one must read it to its end or close it: until then the request runs on. As an
    asynchronous context manager it closes itself.

    Threads: its loop's only.
    """

    def __init__(self, request: Request, *, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop=loop)
        self.request = request

    @property
    def is_over(self) -> bool:
        """Whether the engine is done with it, though not all of it was read. Threads: any."""
        return self.request.outcome is not None

    def close(self) -> None:
        """Abort the request unless its outcome is known; what was not read yet is dropped."""
        if not self._has_ended:
            self._has_ended = True
            self.request.mark_cancelled(Reason.ABORTED)
        self._outputs.clear()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()
