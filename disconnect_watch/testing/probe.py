"""How many requests a server has begun or cancelled, asked of whatever the user has."""

from collections.abc import Callable, Sized
from typing import Protocol

__all__ = ["HasCancelled", "HasIsSet", "Probe", "count_of"]


class HasCancelled(Protocol):
    """As ``CancelToken``."""

    @property
    def cancelled(self) -> bool: ...


class HasIsSet(Protocol):
    """As the events of asyncio and threading."""

    def is_set(self) -> bool: ...


Probe = Callable[[], int] | HasCancelled | HasIsSet | Sized


def count_of(probe: Probe) -> int:
    """What a probe says now.

    Args:
        probe: a callable that returns a number or a bool, a ``CancelToken``, an event, or
            what has a length, such as the list to which a server adds what it cancelled.

    Returns:
        The number; a bool as it is.

    Raises:
        TypeError: none of these, or it returns no number.
    """
    if callable(is_set := getattr(probe, "is_set", None)):
        value = is_set()
    elif isinstance(cancelled := getattr(probe, "cancelled", None), bool):
        value = cancelled
    elif isinstance(probe, Sized):
        value = len(probe)
    elif callable(probe):
        value = probe()
    else:
        raise TypeError(
            f"cannot count with {probe!r}: give a callable, a token, an event or a list"
        )
    if not isinstance(value, int):
        raise TypeError(f"cannot count with {value!r}: the probe must return a number")
    return value
