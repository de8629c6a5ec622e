"""How far the host may run ahead of a device."""

from collections import deque
from collections.abc import Callable
from typing import Protocol

__all__ = ["Event", "Pace"]


class Event(Protocol):
    """A mark in what a device was given to do, as ``torch.cuda.Event``."""

    def record(self) -> None:
        """Set the mark behind all that was launched."""

    def synchronize(self) -> None:
        """Return when the device has come there."""


class Pace:
    """Lets the host launch one piece of work while the one before it runs, and no more.

    Args:
        make_event: for each piece.
    """

    def __init__(self, make_event: Callable[[], Event]) -> None:
        self._make_event = make_event
        self._launched: deque[Event] = deque()

    def launched(self) -> None:
        """Call this behind each piece: waits for the end of the one before it."""
        event = self._make_event()
        event.record()
        self._launched.append(event)
        if len(self._launched) > 1:
            self._launched.popleft().synchronize()
