"""What holds a request in a phase, for each of the three that do the work.

No cell depends on who is faster: the worker stands still where the cell wants it, until the end of
the request was asked for and that was counted.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

from disconnect_watch.engine import Embedder
from disconnect_watch.testing import LeavingClient, Way
from tests.abort.kinds import KINDS
from tests.support.bert import held
from tests.support.gate import gated
from tests.support.http import request_bytes
from tests.support.models import write_model
from tests.support.net import wait_until
from tests.support.serve import Serving

__all__ = ["Stage", "stage_of", "write_held_model"]

#: Decode steps before a request is held in one.
NUM_STEPS = 3

_MODEL = '''
import os
import time
import numpy as np
import triton_python_backend_utils as pb

class TritonPythonModel:
    """Says that it has begun, and works until it is told to go on, or cancelled."""

    def execute(self, requests):
        return [self.work(request) for request in requests]

    def work(self, request):
        tensor = pb.get_input_tensor_by_name(request, "PATH").as_numpy()
        path = tensor.flat[0].decode()
        open(path + ".begun", "w").close()
        while not os.path.exists(path + ".go"):
            if request.is_cancelled():
                error = pb.TritonError("cancelled", pb.TritonError.CANCELLED)
                return pb.InferenceResponse([], error=error)
            time.sleep(0.002)
        return pb.InferenceResponse([pb.Tensor("DONE", np.array([1], np.int32))])
'''
_CONFIG = """
backend: "python"
input [ { name: "PATH" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "DONE" data_type: TYPE_INT32 dims: [ 1 ] } ]
instance_group [ { count: 1 kind: KIND_CPU } ]
"""


def write_held_model(repository: Path) -> None:
    """The model that ``infer`` asks."""
    write_model(repository, "held", _MODEL, _CONFIG)


class Stage(Protocol):
    """One request is held in a phase.

    Attributes:
        body: what the request has to be.
    """

    body: Any

    def reach(self) -> None:
        """Wait until the request, which was sent, is in its phase."""

    def release(self, is_over: Callable[[], bool], *, without_holder: bool = False) -> None:
        """Let it go on until that is so.

        Args:
            without_holder: of the place that a queued one waits for: it leaves.
        """

    def open(self) -> None:
        """Hold nobody any more."""


def stage_of(
    work: str, phase: str, serving: Serving, embedder: Embedder | None, folder: Path, body: Any
) -> AbstractContextManager[Stage]:
    """Hold the next request to what does this work in a phase; in ``finished``, hold nothing."""
    if work == "process":
        return _in_process(phase, serving, folder)
    if work == "encoder":
        assert embedder is not None
        return _in_encoder(phase, serving, embedder, dict(body))
    return _in_engine(phase, serving, dict(body))


class _Free:
    """It runs to its end."""

    def __init__(self, body: Any) -> None:
        self.body = body

    def reach(self) -> None:
        pass

    def release(self, is_over: Callable[[], bool], *, without_holder: bool = False) -> None:
        wait_until(is_over)

    def open(self) -> None:
        pass


@contextmanager
def _in_engine(phase: str, serving: Serving, body: Any) -> Iterator[Stage]:
    if phase == "finished":
        limit = next(name for name in ("max_tokens", "max_output_tokens") if name in body)
        yield _Free({**body, limit: 2})
        return
    with ExitStack() as ends:
        if phase == "queued":
            holder = ends.enter_context(_client(serving))
        gate = ends.enter_context(gated(serving.engine, layer=1 if phase == "prefill" else 0))
        if phase == "queued":
            stream = KINDS["completions_stream"]
            holder.send(_request(stream.path, stream.body))
            gate.wait()
            # What is said to wait now is the holder; from the next step on it runs.
            gate.pass_steps(1)
            gate.wait()

        class Held(_Free):
            def reach(self) -> None:
                gate.wait()
                if phase == "decode":
                    gate.pass_steps(NUM_STEPS)
                    gate.wait()
                while phase == "queued" and serving.backend.stats().num_waiting == 0:
                    # It is admitted between two steps.
                    gate.pass_steps(1)
                    gate.wait()

            def release(self, is_over: Callable[[], bool], *, without_holder: bool = False) -> None:
                if without_holder and phase == "queued":
                    holder.leave(Way.HALF_CLOSE)
                if without_holder or phase != "queued":
                    gate.open()
                    wait_until(is_over)
                while not is_over():
                    # The holder must not come to the end of its context meanwhile; with it gone,
                    # there is no further step.
                    if gate.is_held:
                        gate.pass_steps(1)
                    wait_until(lambda: gate.is_held or is_over())
                wait_until(is_over)

            def open(self) -> None:
                gate.open()

        yield Held(body)


@contextmanager
def _in_encoder(phase: str, serving: Serving, embedder: Embedder, body: Any) -> Iterator[Stage]:
    if phase == "finished":
        yield _Free(body)
        return
    with ExitStack() as ends:
        holder = ends.enter_context(_client(serving)) if phase == "queued" else None
        hold = ends.enter_context(held(embedder))
        if holder is not None:
            holder.send(_request(KINDS["embeddings"].path, body))
            hold.wait()

        class Held(_Free):
            def reach(self) -> None:
                hold.wait()
                num = 1 if holder is None else 2
                wait_until(lambda: serving.frontend.stats().num_live == num)

            def release(self, is_over: Callable[[], bool], *, without_holder: bool = False) -> None:
                if holder is None:
                    hold.open()
                wait_until(is_over)  # what waits ends while the other is still held

            def open(self) -> None:
                hold.open()

        yield Held(body)


@contextmanager
def _in_process(phase: str, serving: Serving, folder: Path) -> Iterator[Stage]:
    path = folder / f"request-{len(list(folder.iterdir()))}"
    path.touch()

    class Held(_Free):
        def reach(self) -> None:
            if phase == "queued":
                wait_until(lambda: serving.frontend.stats().num_live == 2)
            elif phase == "decode":
                wait_until(path.with_suffix(".begun").exists)

    if phase == "finished":
        path.with_suffix(".go").touch()
    with ExitStack() as ends:
        if phase == "queued":
            other = folder / f"{path.name}-before"
            ends.callback(other.with_suffix(".go").touch)
            holder = ends.enter_context(_client(serving))
            holder.send(_request(KINDS["infer"].path, _tensor(other)))
            wait_until(other.with_suffix(".begun").exists)
        yield Held(_tensor(path))


def _tensor(path: Path) -> dict[str, Any]:
    return {"inputs": [{"name": "PATH", "datatype": "BYTES", "shape": [1], "data": [str(path)]}]}


def _client(serving: Serving) -> LeavingClient:
    return LeavingClient(f"http://127.0.0.1:{serving.port}")


def _request(path: str, body: Any) -> bytes:
    return request_bytes(path, dict(body), Authorization="Bearer alice-key")
