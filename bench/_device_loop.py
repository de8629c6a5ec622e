"""Decode steps in a loop that the host has launched and does not see: a graph, or a thread.

On a GPU it is the graph with its WHILE node. On a CPU a thread runs the same step and latch, which
measures nothing, but runs everything else of a benchmark where there is no GPU.
"""

import threading
from collections.abc import Callable
from typing import Protocol

import torch

from disconnect_watch import kernels
from disconnect_watch.kernels import FlagView, RowState

__all__ = ["DeviceLoop", "make_loop"]

Work = Callable[[], None]


class DeviceLoop(Protocol):
    """A step and a latch in a loop."""

    def launch(self, num_steps: int) -> None:
        """Start a loop of no more than so many steps; returns at once."""
        ...

    def wait(self) -> None:
        """Block until it has ended."""
        ...

    def run_bare(self, num_steps: int) -> None:
        """Run the step alone so many times, with neither latch nor loop, and wait."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...


class GraphLoop:
    """On a GPU."""

    def __init__(self, step: Work | None, latch: Work, rows: RowState) -> None:
        self._loop = kernels.make_loop(step, latch, rows)
        self._bare = torch.cuda.CUDAGraph()
        if step is not None:
            with torch.cuda.graph(self._bare):
                step()

    def launch(self, num_steps: int) -> None:
        self._loop.launch(num_steps)

    def wait(self) -> None:
        torch.cuda.current_stream().synchronize()

    def run_bare(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self._bare.replay()
        self.wait()

    def close(self) -> None:
        self._loop.close()
        self._bare.reset()


class ThreadLoop:
    """On a CPU, to try the benchmarks."""

    def __init__(self, step: Work | None, latch: Work, rows: RowState) -> None:
        self._loop = kernels.make_loop(step, latch, rows)
        self._step: Work = (lambda: None) if step is None else step
        self._thread = threading.Thread()
        self._error: BaseException | None = None

    def launch(self, num_steps: int) -> None:
        self._loop.launch(num_steps)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._loop.wait(lambda: None)
        except BaseException as error:
            self._error = error

    def wait(self) -> None:
        if self._thread.ident is not None:
            self._thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def run_bare(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self._step()

    def close(self) -> None:
        self.wait()


def make_loop(step: Work | None, rows: RowState, flags: FlagView) -> DeviceLoop:
    """Loop over a step, on the device of the rows; without one, over the latch alone."""
    latch = kernels.kernels_for(rows.live.device).latch

    def look() -> None:
        latch(flags, rows)

    kind = GraphLoop if rows.live.is_cuda else ThreadLoop
    return kind(step, look, rows)
