"""What a request costs that goes to a model in a worker process and back.

The server's side is its loop's thread, which the model's caller shares; the worker's side
is the whole process, the model's own work included, which hands back what it was given.
No HTTP is in it. Both run on CPU time, so that what else the machine does counts little;
a copy of as many bytes is measured beside the large tensor.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import uvloop

from bench._harness import Report, run_command
from disconnect_watch.backends.infer import InferRequest, InferTensor
from disconnect_watch.backends.python_model.model import PythonModel
from disconnect_watch.backends.repository import ModelRepository

__all__ = ["Config", "run"]

LARGE_BYTES = 16 << 20
NUM_CHUNKS = 20

ECHO = """
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse(
                [pb_utils.Tensor("Y", pb_utils.get_input_tensor_by_name(r, "X").as_numpy())]
            )
            for r in requests
        ]
"""
CHUNKS = """
import numpy as np
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def execute(self, requests):
        for r in requests:
            sender, last = r.get_response_sender(), int(r.inputs()[0].as_numpy()[0, 0]) - 1
            for i in range(last + 1):
                if sender.is_cancelled():
                    break
                tensor = pb_utils.Tensor("Y", np.array([[i]], np.float32))
                sender.send(pb_utils.InferenceResponse([tensor]), flags=int(i == last))
"""
TENSORS = """
input { name: "X" data_type: TYPE_FP32 dims: [-1, -1] }
output { name: "Y" data_type: TYPE_FP32 dims: [-1, -1] }
"""


@dataclass(frozen=True, slots=True)
class Config:
    """How much is measured.

    Attributes:
        num_rounds: one sample each.
        num_small, num_streams, num_large: requests of a kind in one sample.
    """

    num_rounds: int
    num_small: int
    num_streams: int
    num_large: int


FULL = Config(20, 1000, 50, 10)
QUICK = Config(5, 200, 10, 3)


def run(config: Config) -> Report:
    """Measure all of it."""
    report = Report("worker", asdict(config))
    with TemporaryDirectory() as folder:
        root = Path(folder)
        _write(root / "echo", ECHO, TENSORS)
        _write(root / "chunks", CHUNKS, f"{TENSORS} model_transaction_policy {{ decoupled: true }}")
        uvloop.run(_measure(report, config, root))
    return report


def _write(directory: Path, code: str, config: str) -> None:
    (directory / "1").mkdir(parents=True)
    (directory / "1" / "model.py").write_text(code)
    (directory / "config.pbtxt").write_text(config)


async def _measure(report: Report, config: Config, root: Path) -> None:
    async with ModelRepository(root) as repository:
        echo, chunks = (repository.find(name) for name in ("echo", "chunks"))
        assert isinstance(echo, PythonModel)
        assert isinstance(chunks, PythonModel)
        small = np.zeros((1, 16), np.float32)
        large = np.zeros((1, LARGE_BYTES // 4), np.float32)
        stream = np.full((1, 1), NUM_CHUNKS, np.float32)
        kinds = {
            "a request of FP32[1,16]": (echo, small, config.num_small, 1),
            f"a chunk of a stream of {NUM_CHUNKS}": (
                chunks,
                stream,
                config.num_streams,
                NUM_CHUNKS,
            ),
            "a request of 16 MiB": (echo, large, config.num_large, 1),
        }
        samples: dict[str, dict[str, list[float]]] = {
            name: {"server": [], "worker": [], "both": []} for name in kinds
        }
        copies: list[float] = []
        target = np.empty_like(large)
        for round_ in range(config.num_rounds + 1):
            for name, (model, array, count, parts) in kinds.items():

                async def ask(model: PythonModel = model, array: Any = array) -> None:
                    request = InferRequest(inputs=[InferTensor.from_numpy("X", array)])
                    async for response in model.infer(request):
                        assert response.error is None

                server, worker = await _cost(ask, count, model.pids[0])
                if round_:  # the first is the warm-up
                    for side, ns in (
                        ("server", server),
                        ("worker", worker),
                        ("both", server + worker),
                    ):
                        samples[name][side].append(ns / count / parts / 1000)
            began = time.thread_time_ns()
            for _ in range(config.num_large):
                np.copyto(target, large)
            copies.append((time.thread_time_ns() - began) / config.num_large / 1000)
    for name, sides in samples.items():
        for side, values in sides.items():
            report.add(f"{name}, {side}", "us", values)
    report.add("a copy of 16 MiB", "us", copies[1:])


async def _cost(
    ask: Callable[[], Coroutine[Any, Any, None]], count: int, pid: int
) -> tuple[int, int]:
    """Nanoseconds of CPU that so many requests take, one after another, here and there."""
    await asyncio.sleep(0)
    worker, server = _cpu_ns(pid), time.thread_time_ns()
    for _ in range(count):
        await ask()
    return time.thread_time_ns() - server, _cpu_ns(pid) - worker


def _cpu_ns(pid: int) -> int:
    """CPU time of all threads of a process."""
    return sum(
        int((task / "schedstat").read_text().split()[0])
        for task in Path(f"/proc/{pid}/task").iterdir()
    )


def main() -> None:
    run_command("worker", lambda is_quick: run(QUICK if is_quick else FULL))


if __name__ == "__main__":
    main()
