"""One generation while it runs, as the routes see it."""

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Self

from disconnect_watch.backends import OutputStream
from disconnect_watch.engine import AbortResult, Outcome, RequestOutput
from disconnect_watch.engine.errors import EngineClosedError, EngineLostError
from disconnect_watch.server.errors import FailedError, UnavailableError
from disconnect_watch.token import CancelToken

if TYPE_CHECKING:
    from disconnect_watch.engine.outcome import Phase

__all__ = ["Running"]


class Running(AsyncIterator[RequestOutput]):
    """The outputs of one generation, the last of which carries its outcome.

    To be read to its end or closed; as a context manager it closes itself.

    Attributes:
        token: fires when nobody wants it any more.
        deadline_ns: when its time is over; 0 for never.
    """

    def __init__(
        self,
        outputs: OutputStream,
        *,
        abort: Callable[[], Awaitable[AbortResult]],
        token: CancelToken,
        prefix: str,
        on_first: Callable[[], None],
        on_end: Callable[["Running", Outcome | None], None],
        on_lost: Callable[[Outcome], None] = lambda _: None,
        deadline_ns: int = 0,
    ) -> None:
        self.token = token
        self._outputs = outputs
        self._abort = abort
        self._prefix = prefix
        self._on_first = on_first
        self._on_end = on_end
        self._on_lost = on_lost
        self._deadline_ns = deadline_ns
        self._asked_at_ns = 0
        self._has_begun = False
        self._has_ended = False

    async def __anext__(self) -> RequestOutput:
        """The next output.

        Raises:
            FailedError: the engine died underneath it.
            UnavailableError: so did the engine's process.
        """
        try:
            output = await anext(self._outputs)
        except EngineLostError as error:
            phase: Phase = "decode" if self._has_begun else "waiting"
            outcome = Outcome("failed", phase=phase, error=str(error))
            self._end(outcome)
            self._on_lost(outcome)
            raise UnavailableError(f"{self._prefix}{error}") from error
        except EngineClosedError as error:
            raise FailedError(f"{self._prefix}{error}") from error
        if not self._has_begun and output.token_ids:
            self._has_begun = True
            self._on_first()
        if output.outcome is not None:
            self._end(output.outcome)
        return output

    async def abort(self) -> AbortResult:
        """Cancel it from elsewhere; returns when its blocks are free. Its outputs tell of it."""
        self._asked_at_ns = self._asked_at_ns or time.monotonic_ns()
        return await self._abort()

    @property
    def is_over(self) -> bool:
        """Whether the work has its outcome, read or not."""
        return self._outputs.is_over

    @property
    def due_at_ns(self) -> int:
        """From when on it should have ended, by whatever means; 0 if nobody wants that.

        By its deadline that may be in the future.
        """
        by_token = self.token.cancelled_at_ns if self.token.cancelled else 0
        asked = (by_token, self._asked_at_ns, self._deadline_ns)
        return min((at_ns for at_ns in asked if at_ns), default=0)

    def close(self) -> None:
        """Abort it unless its outcome is known. Idempotent."""
        self._asked_at_ns = self._asked_at_ns or time.monotonic_ns()
        self._outputs.close()
        self._end(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _end(self, outcome: Outcome | None) -> None:
        if not self._has_ended:
            self._has_ended = True
            self._on_end(self, outcome)
