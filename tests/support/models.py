"""Models for the tests, served in worker processes, and what was said of them."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
import uvloop

from disconnect_watch.backends.infer import InferRequest, InferResponse, InferTensor, ServedModel
from disconnect_watch.backends.python_model.model import PythonModel
from disconnect_watch.backends.repository import ModelRepository

#: A repository that the real Triton answered the captured requests with.
TRITON_MODELS = Path(__file__).parents[1] / "triton" / "models"

#: Seconds that worker processes may take for anything on a loaded machine, their start included;
#: modules that have some give their tests ``TIME_LIMIT`` of their own.
PATIENCE = 100.0
TIME_LIMIT = 300

Result = TypeVar("Result")


class ModelHost(AbstractContextManager["ModelHost"]):
    """A loop of its own with a repository; runs coroutines until it is left."""

    def __init__(self, *directories: Path, **options: Any) -> None:
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self._directories = directories
        self._options = options

    def __enter__(self) -> Self:
        self._runner.__enter__()
        try:
            self.run(self._start())
        except BaseException:
            self._runner.close()
            raise
        return self

    async def _start(self) -> None:
        self.repository = ModelRepository(*self._directories, **self._options)
        await self.repository.__aenter__()

    def __exit__(self, *_: object) -> None:
        try:
            self.run(self.repository.close())
        finally:
            self._runner.close()

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Run it to its end, which must come."""
        return self._runner.run(asyncio.wait_for(coroutine, PATIENCE))

    def infer(self, name: str, request: InferRequest) -> list[InferResponse]:
        """All responses to a request."""
        return self.run(responses_of(self.repository.find(name), request))

    def model(self, name: str) -> PythonModel:
        """A model that is served by processes."""
        model = self.repository.find(name)
        assert isinstance(model, PythonModel)
        return model

    def num_blocks(self, name: str) -> int:
        """Blocks of memory that are handed out to a model's processes."""
        processes = [instance._process for instance in self.model(name)._instances]
        return sum(process.arena.num_used for process in processes if process is not None)


async def responses_of(model: ServedModel, request: InferRequest) -> list[InferResponse]:
    return [response async for response in model.infer(request)]


async def until(condition: Callable[[], object]) -> None:
    """Wait for a condition that the loop, a process or a file brings about."""
    async with asyncio.timeout(PATIENCE):
        while not condition():  # noqa: ASYNC110  what is waited for has no event
            await asyncio.sleep(0.01)


async def ended(awaitable: Awaitable[Result]) -> Result:
    """Wait for what must end."""
    async with asyncio.timeout(PATIENCE):
        return await awaitable


def tensors(**arrays: Any) -> list[InferTensor]:
    """Inputs by name; text becomes BYTES."""
    return [InferTensor.from_numpy(name, np.asarray(array)) for name, array in arrays.items()]


def text_request(text: str, *, request_id: str = "", **inputs: Any) -> InferRequest:
    """A request to one of the models that take ``text_input``, with float inputs as FP32."""
    arrays = {
        name: np.array([value], np.float32 if isinstance(value, float) else np.int32)
        for name, value in inputs.items()
    }
    return InferRequest(id=request_id, inputs=tensors(text_input=[text], **arrays))


def write_model(repository: Path, name: str, code: str, config: str = "", version: int = 1) -> Path:
    """Put a model into a repository; returns its directory."""
    directory = repository / name
    (directory / str(version)).mkdir(parents=True, exist_ok=True)
    (directory / str(version) / "model.py").write_text(code)
    if config:
        (directory / "config.pbtxt").write_text(config)
    return directory


class EventLog:
    """What models wrote of their doings, a JSON document a line."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def events(self, kind: str | None = None) -> Sequence[dict[str, Any]]:
        """All events, or those of one kind, whose lines are complete."""
        try:
            text = self.path.read_text()
        except FileNotFoundError:
            return []
        whole, _, _ = text.rpartition("\n")
        found = [json.loads(line) for line in whole.splitlines()]
        return [event for event in found if kind in (None, event["ev"])]
