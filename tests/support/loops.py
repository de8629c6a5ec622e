"""Run a coroutine on every kind of loop, and let no error pass unseen."""

import asyncio
import gc
import sys
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import uvloop

T = TypeVar("T")

LOOP_FACTORIES: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}

if sys.version_info >= (3, 12):

    def _new_eager_loop() -> asyncio.AbstractEventLoop:
        loop = asyncio.new_event_loop()
        loop.set_task_factory(asyncio.eager_task_factory)
        return loop

    #: Tasks run to their first wait within ``create_task``.
    LOOP_FACTORIES["eager"] = _new_eager_loop

LOOP_KINDS = tuple(LOOP_FACTORIES)


class LoopRunner:
    """Runs coroutine functions, each on a new loop of one kind.

    Attributes:
        kind: "asyncio", "uvloop", or from Python 3.12 on "eager".
        reports: what reached the loop's exception handler in the last run.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.reports: list[dict[str, Any]] = []

    def __call__(self, main: Callable[[], Awaitable[T]], *, reports: int = 0) -> T:
        """Run ``main`` to its end, within two minutes.

        Args:
            main: the coroutine function.
            reports: how many errors it must leave with the loop's exception handler.
        """
        self.reports = []

        async def bounded() -> T:
            loop = asyncio.get_running_loop()
            loop.set_exception_handler(lambda _, context: self.reports.append(context))
            async with asyncio.timeout(120):
                return await main()

        with asyncio.Runner(debug=False, loop_factory=LOOP_FACTORIES[self.kind]) as runner:
            result = runner.run(bounded())
        gc.collect()  # errors of tasks that nobody awaited come with their end
        assert len(self.reports) == reports, self.reports
        return result


async def cancelled(coroutine: Coroutine[Any, Any, Any]) -> None:
    """Await ``coroutine``, which must end by a plain CancelledError."""
    try:
        await coroutine
    except asyncio.CancelledError:
        return
    raise AssertionError("it was not cancelled")
