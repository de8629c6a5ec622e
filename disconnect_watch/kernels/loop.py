"""Several steps and the latch between them, for a host that launches once and waits.

graph  a GPU: one launch, and the device decides on each next step (``graph.py``)
host   a CPU: the same step and the same latch, in a loop of this process
"""

import time
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


class HostLoop:
    """See ``StepLoop``; runs within ``wait``, and looks before each latch."""

    def __init__(self, step: Work, latch: Work, rows: RowState) -> None:
        self._step = step
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
    """See ``StepLoop``; on torch's current stream.

    Args:
        graph: of the step and the latch.
        rows: that they work on.
    """

    def __init__(self, graph: WhileGraph, rows: RowState) -> None:
        self._graph = graph
        self._rows = rows
        self._end = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def launch(self, num_steps: int) -> None:
        stream = torch.cuda.current_stream()
        self._rows.begin(num_steps)
        self._graph.launch(stream.cuda_stream)
        self._end.record(stream)

    def wait(self, look: Work) -> None:
        while not self._end.query():  # type: ignore[no-untyped-call]
            look()
            time.sleep(LOOK_SECONDS)

    def close(self) -> None:
        self._end.synchronize()
        self._graph.close()


def make_loop(step: Work, latch: Work, rows: RowState) -> StepLoop:
    """Loop over a step on the device of its rows.

    On a GPU both are called here, to compile and to capture them: no row may be live.

    Args:
        step: of fixed shapes and addresses; waits for nothing.
        latch: ``Kernels.latch`` on the rows.
        rows: whose ``go`` ends the loop.

    Raises:
        UnavailableError, DriverError: see ``graph.capture_loop``.
    """
    if rows.live.is_cuda:
        return GraphLoop(capture_loop(step, latch, rows), rows)
    return HostLoop(step, latch, rows)
