"""Being told of a task's cancel before what it awaits is."""

import asyncio
import types
from collections.abc import Awaitable, Callable, Generator
from typing import Any

__all__ = ["telling"]


@types.coroutine
def telling(awaitable: Awaitable[Any], on_cancel: Callable[[], object]) -> Generator[Any, Any, Any]:
    """Await, and call ``on_cancel`` before the awaitable is told of a cancel.

    A task gives its CancelledError to the innermost ``await``. What handles it there may
    wait for a thread that only the token stops.
    """
    steps = awaitable.__await__()
    try:
        waits_for = next(steps)
        while True:
            try:
                sent = yield waits_for
            except BaseException as error:
                if isinstance(error, asyncio.CancelledError):
                    on_cancel()
                waits_for = steps.throw(error)
            else:
                waits_for = steps.send(sent)
    except StopIteration as stop:
        return stop.value
