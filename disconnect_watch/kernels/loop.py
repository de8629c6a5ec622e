"""Several steps and the latch between them, for a host that launches once and waits.

graph  a GPU: one launch, and the device decides on each next step (``graph.py``)
host   a CPU: the same step and the same latch, in a loop of this process
"""

import time
import weakref
from collections.abc import Callable
from typing import Protocol

import torch

from disconnect_watch.kernels.graph import WhileGraph, capture_loop
from disconnect_watch.kernels.rows import RowState

__all__ = ["GraphLoop", "HostLoop", "StepLoop", "make_loop"]

#: Between two looks of a host that waits; a step takes longer.
LOOK_SECONDS = 0.0002

Work = Callable[[], None]


class StepLoop(Protocol):
    """A step and a latch, as often as the latch says."""

    def launch(self, num_steps: int) -> None:
        """Start with a latch, and let no more than so many steps follow; returns at once."""

    def wait(self, look: Work) -> None:
        """Return when it has ended.

        Args:
            look: called again and again until then, for what only the host can see, such as the
                time; a flag that it sets ends a row like any other.
        """

    def close(self) -> None:
        """Give everything back; it must not be running. Idempotent."""


class Event(Protocol):
    """A mark in what a device was given to do, as ``torch.cuda.Event``."""

    def record(self) -> None:
        """Set the mark behind all that was launched."""

    def query(self) -> bool:
        """Whether the device has come there."""

    def synchronize(self) -> None:
        """Return when it has."""


class HostLoop:
    """See ``StepLoop``; runs within ``wait``, and looks before each latch."""

    def __init__(self, step: Work | None, latch: Work, rows: RowState) -> None:
        self._step: Work = (lambda: None) if step is None else step
        self._latch = latch
        self._rows = rows

    def launch(self, num_steps: int) -> None:
        self._rows.begin(num_steps)

    def wait(self, look: Work) -> None:
        look()
        self._latch()
        while self._rows.go:
            self._step()
            look()
            self._latch()

    def close(self) -> None:
        """See ``StepLoop.close``: there is nothing to give back."""


class GraphLoop:
    """See ``StepLoop``; one that nobody refers to any more closes itself.

    Args:
        graph: of the step and the latch.
        rows: that they work on.
        stream: names the stream to launch on.
        end: on the same stream.
    """

    def __init__(
        self, graph: WhileGraph, rows: RowState, *, stream: Callable[[], int], end: Event
    ) -> None:
        self._graph = graph
        self._rows = rows
        self._stream = stream
        self._end = end
        self._close = weakref.finalize(self, graph.close)
        # At the end of the process the driver may be gone before it, and takes all back anyhow.
        self._close.atexit = False

    def launch(self, num_steps: int) -> None:
        self._rows.begin(num_steps)
        self._graph.launch(self._stream())
        self._end.record()

    def wait(self, look: Work) -> None:
        while not self._end.query():
            look()
            time.sleep(LOOK_SECONDS)

    def close(self) -> None:
        self._end.synchronize()
        self._close()


def make_loop(step: Work | None, latch: Work, rows: RowState) -> StepLoop:
    """Loop over a step on the device of its rows.

    On a GPU both are called here, to compile and to capture them: no row may be live.

    Args:
        step: of fixed shapes and addresses; waits for nothing. None for a loop that does nothing
            but look.
        latch: ``Kernels.latch`` on the rows.
        rows: whose ``go`` ends the loop.

    Raises:
        UnavailableError, DriverError: see ``graph.capture_loop``.
    """
    if not rows.live.is_cuda:
        return HostLoop(step, latch, rows)
    return GraphLoop(
        capture_loop(step, latch, rows),
        rows,
        stream=lambda: torch.cuda.current_stream().cuda_stream,
        end=torch.cuda.Event(),  # type: ignore[no-untyped-call]
    )
