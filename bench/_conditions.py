"""What else the process does while a client leaves."""

import asyncio
import ctypes
import random
import threading
import time
from enum import StrEnum
from types import TracebackType
from typing import Self

from bench._build import build_library
from bench._leaver import Leaver

__all__ = ["Condition", "Conditions"]

#: How long the loop's thread is held, and when within it the client leaves.
HOLD = 0.004
DELAY = (0.0008, 0.0014)
#: The client answers this much later, so that nothing else wakes meanwhile.
SETTLE = 0.001
NUM_SPINNERS = 2


class Condition(StrEnum):
    """The state of the process at the moment of the close."""

    IDLE = "idle"
    """The loop waits in its poller."""
    LOOP_BLOCKED = "loop blocked"
    """A handler sleeps in ``time.sleep``: no GIL held, no CPU used, no loop."""
    GIL_BUSY = "GIL busy"
    """Two pure-Python threads never wait; the loop waits for its turn at the GIL."""
    GIL_HELD = "GIL held"
    """A handler is in C code that keeps the GIL and a CPU."""


class Conditions:
    """Brings a condition about, for the time in which the client leaves.

    Of this machine's CPUs the spinning conditions take one for themselves; the
    bare loop is measured under each as well, so that what is the scheduler's
    share can be told from ours.
    """

    def __init__(self, leaver: Leaver, *, seed: int = 0) -> None:
        self._leaver = leaver
        self._random = random.Random(seed)
        # PyDLL, not CDLL: it calls without releasing the GIL.
        self._library = ctypes.PyDLL(str(build_library("bare_loop")))
        self._library.hold.argtypes = (ctypes.c_uint64,)
        self._library.hold.restype = ctypes.c_uint64
        self._may_spin = threading.Event()
        self._is_spinning = False
        self._is_closed = False
        self._spinners = [
            threading.Thread(target=self._spin, name=f"spinner-{i}") for i in range(NUM_SPINNERS)
        ]
        for spinner in self._spinners:
            spinner.start()

    async def leave_under(self, condition: Condition) -> int:
        """Have the client leave while `condition` holds.

        Returns:
            The time right before its close, ``time.monotonic_ns``.
        """
        loop = asyncio.get_running_loop()
        answered = loop.create_future()

        def take_answer() -> None:
            loop.remove_reader(self._leaver.fileno())
            answered.set_result(self._leaver.closed_ns())

        loop.add_reader(self._leaver.fileno(), take_answer)
        if condition is Condition.GIL_BUSY:
            self._is_spinning = True
            self._may_spin.set()
        try:
            self._leaver.order_close(delay=self._random.uniform(*DELAY), settle=SETTLE)
            if condition is Condition.LOOP_BLOCKED:
                time.sleep(HOLD)  # noqa: ASYNC251 blocking the loop is what is measured
            elif condition is Condition.GIL_HELD:
                self._library.hold(round(HOLD * 1e9))
            closed_ns: int = await answered
        finally:
            self._may_spin.clear()
            self._is_spinning = False
        return closed_ns

    def _spin(self) -> None:
        while True:
            self._may_spin.wait()
            if self._is_closed:
                return
            while self._is_spinning:
                pass

    def close(self) -> None:
        """End the spinning threads. Idempotent."""
        self._is_closed = True
        self._may_spin.set()
        for spinner in self._spinners:
            spinner.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
