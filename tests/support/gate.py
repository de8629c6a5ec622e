"""An engine that is held at one moment of a step, so that no test depends on who is faster."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from disconnect_watch.engine import Engine

__all__ = ["Gate", "gated"]


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


class Gate:
    """Where the engine waits. ``step`` is the one that it was held in."""

    def __init__(self, layer: int, after_steps: int) -> None:
        self._layer = layer
        self._after = after_steps
        self._reached = threading.Event()
        self._opened = threading.Event()
        self.step = 0

    def on_layer(self, step: int, layer: int) -> None:
        if layer == self._layer and step > self._after and not self._reached.is_set():
            self.step = step
            self._reached.set()
            self._opened.wait(30)

    def wait(self) -> int:
        assert self._reached.wait(15), "the engine did not get to the gate"
        return self.step

    def open(self) -> None:
        self._opened.set()
