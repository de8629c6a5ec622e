"""One request on its way through a model: where it stands, and what its caller waits for."""

import asyncio
import time
from collections import deque
from collections.abc import Hashable, Iterator
from typing import Any

from disconnect_watch.backends.infer import Code, InferError, InferRequest, InferResponse
from disconnect_watch.backends.validate import prefix_of
from disconnect_watch.token import Reason

__all__ = ["LiveSet", "Pending", "cancelled_error"]


class Pending:
    """A request that was taken, until it has exactly one outcome.

    Args:
        batch_size: of this request; 1 without batches.
        key: equal for requests that may share a batch.

    Attributes:
        outcome: ``success``, ``fail`` or ``cancel``; None while there is none.
        number: by which the worker knows it.
        arrived_ns, dispatched_ns, started_ns, ended_ns: on ``time.monotonic_ns``; when it
            came, was sent to the model, was begun by it, and when ``execute`` returned.
        deadline_ns: when it has waited too long; 0 for never.
        controls: tensors that tell the model where in its sequence the request stands.

    Threads: the loop's only.
    """

    __slots__ = (
        "_error",
        "_loop",
        "_responses",
        "_waiter",
        "arrived_ns",
        "batch_size",
        "cancelled_ns",
        "controls",
        "deadline_ns",
        "dispatched_ns",
        "ended_ns",
        "held",
        "key",
        "level",
        "num_responses",
        "number",
        "outcome",
        "request",
        "started_ns",
    )

    def __init__(
        self,
        request: InferRequest,
        batch_size: int,
        key: Hashable,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.request = request
        self.batch_size = batch_size
        self.key = key
        self.outcome: str | None = None
        self.number = 0
        self.arrived_ns = time.monotonic_ns()
        self.dispatched_ns = 0
        self.started_ns = 0
        self.ended_ns = 0
        self.cancelled_ns = 0
        self.deadline_ns = 0
        self.level = 0
        self.num_responses = 0
        self.held: InferResponse | None = None
        self.controls: tuple[Any, ...] = ()
        self._loop = loop
        self._responses: deque[InferResponse] = deque()
        self._error: InferError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def give(self, response: InferResponse) -> None:
        """Hand a response to the caller."""
        self._responses.append(response)
        self._wake()

    def fail(self, error: InferError) -> None:
        """End the caller's wait; what was given before comes to it first."""
        self._error = error
        self._wake()

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def next(self) -> InferResponse:
        """Wait for the next response.

        Raises:
            InferError: there will be none.
        """
        while not self._responses:
            if self._error is not None:
                raise self._error
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._responses.popleft()


class LiveSet:
    """The requests of a model that have no outcome yet.

    Threads: the loop's only.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._live: set[Pending] = set()
        self._drained: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Pending]:
        """Those of now; they may end meanwhile."""
        return iter(tuple(self._live))

    def add(self, pending: Pending) -> None:
        """One more."""
        self._live.add(pending)

    def discard(self, pending: Pending) -> None:
        """It has an outcome, or is about to."""
        self._live.discard(pending)
        if not self._live and self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    async def drain(self, grace: float) -> None:
        """Wait until there are none, for no more than ``grace`` seconds."""
        if self._live:
            self._drained = self._loop.create_future()
            await asyncio.wait([self._drained], timeout=grace)


def cancelled_error(request: InferRequest) -> InferError:
    """What the caller of a cancelled request is told."""
    reason = request.cancel.reason or Reason.ABORTED
    return InferError(Code.CANCELLED, f"{prefix_of(request)}request was cancelled: {reason}")
