"""Wait for what must come true, and no longer."""

import asyncio
import time
from collections.abc import Callable

__all__ = ["until", "wait_until"]

_PERIOD = 0.001


def wait_until(predicate: Callable[[], object], timeout: float = 10.0) -> None:
    """Return as soon as ``predicate()`` is true.

    Raises:
        AssertionError: it was not within ``timeout`` seconds; says where it is written.
    """
    deadline = time.monotonic() + timeout
    while not predicate():
        assert time.monotonic() < deadline, f"not within {timeout} s: {_source_of(predicate)}"
        time.sleep(_PERIOD)


async def until(predicate: Callable[[], object], within: float = 10.0) -> None:
    """``wait_until`` for code on a loop, which goes on running meanwhile."""
    deadline = time.monotonic() + within
    while not predicate():
        assert time.monotonic() < deadline, f"not within {within} s: {_source_of(predicate)}"
        await asyncio.sleep(_PERIOD)


def _source_of(predicate: Callable[[], object]) -> str:
    code = predicate.__code__ if hasattr(predicate, "__code__") else None
    return f"{code.co_filename}:{code.co_firstlineno}" if code else repr(predicate)
