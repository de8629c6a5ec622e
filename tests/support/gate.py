"""An engine that is held at one moment of a step, so that no test depends on who is faster."""

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from disconnect_watch.engine import Engine
from tests.support.net import PATIENCE

__all__ = ["Gate", "gated", "slowed"]


@contextmanager
def gated(engine: Engine, *, layer: int = 0, after_steps: int = 0) -> Iterator["Gate"]:
    """Hold the engine's thread at a layer of its step until the gate opens."""
    gate = Gate(layer, after_steps)
    engine.layer_hook = gate.on_layer
    try:
        yield gate
    finally:
        gate.open()
        engine.layer_hook = None


@contextmanager
def slowed(engine: Engine, *, seconds: float = 0.01) -> Iterator[None]:
    """Let each step take so long, so that a request runs for as long as a test needs it to."""
    is_over = threading.Event()

    def on_layer(step: int, layer: int) -> None:
        if layer == 0:
            is_over.wait(seconds)

    engine.layer_hook = on_layer
    try:
        yield
    finally:
        is_over.set()
        engine.layer_hook = None


class Gate:
    """Where the engine waits."""

    def __init__(self, layer: int, after_steps: int) -> None:
        self._layer = layer
        self._last: float = after_steps
        self._held_in: int | None = None
        self._changed = threading.Condition()

    def on_layer(self, step: int, layer: int) -> None:
        if layer != self._layer:
            return
        with self._changed:
            if step > self._last:
                self._held_in = step
                self._changed.notify_all()
                self._changed.wait_for(lambda: step <= self._last, PATIENCE)
                self._held_in = None

    def wait(self) -> int:
        """Wait until the engine is held, and return in which step."""
        with self._changed:
            self._changed.wait_for(lambda: self._held_in is not None, PATIENCE)
            assert self._held_in is not None, "the engine did not get to the gate"
            return self._held_in

    @property
    def is_held(self) -> bool:
        """Whether the engine waits there now."""
        return self._held_in is not None

    def pass_steps(self, num_steps: int) -> None:
        """Let it go on from where it is held, and hold it again so many steps later."""
        self._go_on(self.wait() + num_steps - 1)

    def open(self) -> None:
        self._go_on(math.inf)

    def hold(self) -> None:
        """Hold the engine in the next step that comes there."""
        with self._changed:
            self._last = 0

    def _go_on(self, last: float) -> None:
        with self._changed:
            self._last = last
            self._held_in = None
            self._changed.notify_all()
