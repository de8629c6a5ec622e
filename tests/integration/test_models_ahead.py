"""Short batches are sent ahead to a process that still works, and lose nothing by it."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from disconnect_watch import Reason
from disconnect_watch.backends.infer import Code, InferError, InferRequest, InferResponse
from disconnect_watch.backends.python_model import instance
from tests.support.models import (
    TIME_LIMIT,
    ModelHost,
    ended,
    responses_of,
    tensors,
    until,
    write_model,
)

pytestmark = pytest.mark.timeout(TIME_LIMIT)

#: Tells that it begins; with an input that is not 0 it ends when there is a file, not before.
MODEL = """
import os, time
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def execute(self, requests):
        for r in requests:
            with open(os.environ["STARTED"], "a") as file:
                file.write(r.request_id() + "\\n")
            while r.inputs()[0].as_numpy()[0] and not os.path.exists(os.environ["GO"]):
                time.sleep(0.005)
        return [pb_utils.InferenceResponse([]) for r in requests]
"""
CONFIG = """
input { name: "X" data_type: TYPE_INT32 dims: [1] }
output { name: "Y" data_type: TYPE_INT32 dims: [1] }
"""
FOR_EVER_NS = 1 << 62


class Tried:
    """A model, its log, and what lets its long requests end."""

    def __init__(self, host: ModelHost, folder: Path) -> None:
        self.host = host
        self.model = host.model("m")
        self._folder = folder

    def started(self) -> list[str]:
        file = self._folder / "started"
        return file.read_text().split() if file.exists() else []

    def go(self) -> None:
        (self._folder / "go").touch()

    def num_ahead(self) -> int:
        return sum(one.num_ahead for one in self.model._instances)

    def ask(
        self, name: str, *, is_long: bool = False, **parameters: int
    ) -> tuple[InferRequest, "asyncio.Task[list[InferResponse]]"]:
        request = InferRequest(name, tensors(X=np.array([is_long], np.int32)))
        request.parameters.update(parameters)
        return request, asyncio.ensure_future(responses_of(self.model, request))

    @asynccontextmanager
    async def busy(self, num: int = 1) -> AsyncIterator[InferRequest]:
        """Known for a short model, with a long request in each process."""
        await ended(self.ask("short")[1])
        asked = [self.ask(f"long{number}", is_long=True) for number in range(num)]
        names = {request.id for request, _ in asked}
        await until(lambda: names <= set(self.started()))
        yield asked[0][0]
        self.go()
        for _, task in asked:
            await asyncio.wait([task])
            task.exception()


@pytest.fixture
def config() -> str:
    return CONFIG


@pytest.fixture
def tried(tmp_path: Path, config: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tried]:
    monkeypatch.setenv("STARTED", str(tmp_path / "started"))
    monkeypatch.setenv("GO", str(tmp_path / "go"))
    # However slow the machine is, what the model did first was short.
    monkeypatch.setattr(instance, "MAX_AHEAD_NS", FOR_EVER_NS)
    write_model(tmp_path / "models", "m", MODEL, config)
    with ModelHost(tmp_path / "models") as host:
        yield Tried(host, tmp_path)


def test_what_is_cancelled_ahead_never_runs(tried: Tried) -> None:
    async def main() -> None:
        async with tried.busy():
            asked = [tried.ask("a")]
            await until(lambda: tried.num_ahead() == 1)
            # The process has enough to do: these are kept until it has not.
            asked += (tried.ask(name) for name in ("b", "c"))
            await until(lambda: tried.num_ahead() == 3)
            assert tried.model.statistics.num_pending == 3
            assert asked[1][0].phase == "waiting"
            asked[1][0].cancel.cancel(Reason.FIN)
            with pytest.raises(InferError, match="cancelled: fin"):
                await ended(asked[1][1])
            tried.go()
            for at in (0, 2):
                assert (await ended(asked[at][1]))[0].error is None
        assert tried.started() == ["short", "long0", "a", "c"]
        await until(lambda: tried.model.num_live == 0)
        statistics = tried.model.statistics
        assert (statistics.success.count, statistics.cancel.count) == (4, 1)
        assert statistics.num_pending == 0

    tried.host.run(main())


def test_what_was_sent_ahead_is_served_by_the_next_process(tried: Tried) -> None:
    async def main() -> None:
        async with tried.busy():
            asked = [tried.ask(name) for name in ("a", "b")]
            await until(lambda: tried.num_ahead() == 2)
            (pid,) = tried.model.pids
            os.kill(pid, signal.SIGKILL)
            for _, task in asked:
                assert (await ended(task))[0].error is None
        assert tried.started() == ["short", "long0", "a", "b"]
        statistics = tried.model.statistics
        assert (statistics.success.count, statistics.fail.count) == (3, 1)

    tried.host.run(main())


@pytest.mark.parametrize(
    "config", [CONFIG + 'parameters { key: "kill_after" value { string_value: "0.05" } }']
)
def test_who_waits_ahead_keeps_no_process_alive_that_ignores_its_flag(tried: Tried) -> None:
    async def main() -> None:
        async with tried.busy() as running:
            _, task = tried.ask("a")
            await until(lambda: tried.num_ahead() == 1)
            running.cancel.cancel(Reason.FIN)
            assert (await ended(task))[0].error is None
        assert tried.model.statistics.fail.count == 0

    tried.host.run(main())


def test_what_can_not_be_sent_ahead_fails_alone(tried: Tried) -> None:
    async def main() -> None:
        async with tried.busy():
            _, bad = tried.ask("bad", number=1 << 70)
            with pytest.raises(InferError, match="can't be sent") as caught:
                await ended(bad)
            assert caught.value.code is Code.INVALID_ARG
            _, good = tried.ask("good", number=1)
            await until(lambda: tried.num_ahead() == 1)
            tried.go()
            assert (await ended(good))[0].error is None

    tried.host.run(main())


def test_nothing_is_sent_ahead_of_a_slow_model(
    tried: Tried, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instance, "MAX_AHEAD_NS", 1)

    async def main() -> None:
        async with tried.busy():
            _, task = tried.ask("a")
            await until(lambda: tried.model.statistics.num_pending == 1)
            assert tried.num_ahead() == 0
            tried.go()
            await ended(task)

    tried.host.run(main())


@pytest.mark.parametrize("config", [CONFIG + "instance_group { count: 2 kind: KIND_CPU }"])
def test_who_may_be_served_by_another_process_is_bound_to_none(tried: Tried) -> None:
    async def main() -> None:
        async with tried.busy(2):
            _, task = tried.ask("a")
            await until(lambda: tried.model.statistics.num_pending == 1)
            assert tried.num_ahead() == 0
            tried.go()
            await ended(task)

    tried.host.run(main())
