"""The work that each server of ``side_by_side`` does for a request: steps in one of few places.

As in an engine, only so many requests run at a time, and one that nobody waits for any more keeps
its place until it is cancelled or done.
"""

import asyncio
from collections.abc import Awaitable, Callable

__all__ = ["PLACES", "STEP", "Work"]

#: Seconds that a step takes, and how many requests take theirs at a time.
STEP = 0.005
PLACES = 4


class Work:
    """All that one server does.

    Attributes:
        num_running: requests that were begun, those that wait for a place among them.
        num_steps: done.
    """

    def __init__(self) -> None:
        self.num_running = 0
        self.num_steps = 0
        self._places = asyncio.Semaphore(PLACES)

    async def run(
        self, num_steps: int, is_over: Callable[[], Awaitable[bool]] | None = None
    ) -> bool:
        """Do so many steps; ends where ``is_over`` says so, and where the task is cancelled.

        Args:
            num_steps: to do.
            is_over: asked before each.

        Returns:
            Whether all were done.
        """
        self.num_running += 1
        try:
            async with self._places:
                for _ in range(num_steps):
                    if is_over is not None and await is_over():
                        return False
                    await asyncio.sleep(STEP)
                    self.num_steps += 1
            return True
        finally:
            self.num_running -= 1

    def counts(self) -> dict[str, int]:
        """For JSON."""
        return {"running": self.num_running, "steps": self.num_steps}
