"""Requests that share a batch, and those that belong to one sequence."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from disconnect_watch import Reason
from disconnect_watch.backends.infer import Code, InferError, InferRequest
from tests.support.models import (
    TIME_LIMIT,
    EventLog,
    ModelHost,
    ended,
    responses_of,
    tensors,
    until,
    write_model,
)

pytestmark = pytest.mark.timeout(TIME_LIMIT)

#: Says which requests came together, and holds a batch until a file is there.
BATCHED = """
import json, os, time
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def execute(self, requests):
        event = {"ev": "batch", "ids": [r.request_id() for r in requests]}
        with open(os.environ["MODEL_LOG"], "a") as log:
            log.write(json.dumps(event) + "\\n")
        if requests[0].request_id() == "first":
            while not os.path.exists(os.environ["GO"]):
                time.sleep(0.01)
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("Y", r.inputs()[0].as_numpy() + 1)])
            for r in requests
        ]
"""
BATCHED_CONFIG = """
max_batch_size: 4
input { name: "X" data_type: TYPE_FP32 dims: 2 }
output { name: "Y" data_type: TYPE_FP32 dims: 2 }
dynamic_batching {
  default_queue_policy {
    max_queue_size: 6 allow_timeout_override: true default_timeout_microseconds: 60000000
  }
}
"""

#: Adds up what a sequence has sent it.
SUM = """
import numpy as np
import os
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def initialize(self, args):
        self.sums = {}
        self.name = args["model_instance_name"]
    def execute(self, requests):
        out = []
        for r in requests:
            get = lambda name: pb_utils.get_input_tensor_by_name(r, name).as_numpy().flat[0]
            assert bool(get("START")) == bool(
                r.flags() & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START
            )
            assert bool(get("END")) == bool(
                r.flags() & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END
            )
            assert get("READY") == 1
            key = int(get("CORRID"))
            assert key == r.correlation_id()
            if get("START"):
                self.sums[key] = 0
            self.sums[key] += float(get("X"))
            value = np.array([[self.sums[key], os.getpid()]], np.float64)
            out.append(pb_utils.InferenceResponse([pb_utils.Tensor("Y", value)]))
        return out
"""
SUM_CONFIG = """
max_batch_size: 1
input { name: "X" data_type: TYPE_FP32 dims: 1 }
output { name: "Y" data_type: TYPE_FP64 dims: 2 }
instance_group { count: 2 }
sequence_batching {
  max_sequence_idle_microseconds: 60000000
  control_input { name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: [0, 1] } }
  control_input {
    name: "END" control { kind: CONTROL_SEQUENCE_END bool_false_true: [false, true] }
  }
  control_input { name: "READY" control { kind: CONTROL_SEQUENCE_READY fp32_false_true: [0, 1] } }
  control_input { name: "CORRID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } }
}
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("batching")


@pytest.fixture(scope="module")
def host(directory: Path) -> Iterator[ModelHost]:
    models = directory / "models"
    write_model(models, "batched", BATCHED, BATCHED_CONFIG)
    write_model(models, "sum", SUM, SUM_CONFIG)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MODEL_LOG", str(directory / "log"))
        patch.setenv("GO", str(directory / "go"))
        with ModelHost(models) as host:
            yield host


@pytest.fixture
def log(directory: Path) -> EventLog:
    log = EventLog(directory / "log")
    log.path.write_text("")
    (directory / "go").unlink(missing_ok=True)
    return log


def row(value: float, request_id: str, **options: Any) -> InferRequest:
    array = np.full((1, 2), value, np.float32)
    return InferRequest(request_id, tensors(X=array), **options)


async def behind_first(
    host: ModelHost, log: EventLog, requests: list[InferRequest]
) -> tuple[list["asyncio.Task[Any]"], Any]:
    """Have requests wait behind one that holds the instance until the file is there."""
    model = host.model("batched")
    tasks = [asyncio.ensure_future(responses_of(model, row(0, "first")))]
    await until(lambda: log.events("batch"))
    tasks += [asyncio.ensure_future(responses_of(model, request)) for request in requests]
    await until(lambda: model.statistics.num_pending == len(requests))
    return tasks, model


def test_requests_that_wait_run_together_and_each_has_its_own_answer(
    host: ModelHost, log: EventLog, directory: Path
) -> None:
    async def main() -> None:
        requests = [row(value, str(value)) for value in range(6)]
        tasks, model = await behind_first(host, log, requests)
        executions = model.statistics.execution_count
        (directory / "go").touch()
        _, *results = await ended(asyncio.gather(*tasks))
        values = [response.outputs[0].to_numpy()[0, 0] for (response,) in results]
        assert values == [1, 2, 3, 4, 5, 6]
        assert model.statistics.execution_count == executions + 3
        assert model.statistics.batches[4].compute_infer.count >= 1

    host.run(main())
    assert [event["ids"] for event in log.events("batch")] == [
        ["first"],
        ["0", "1", "2", "3"],
        ["4", "5"],
    ]


def test_client_that_leaves_while_it_waits_disturbs_nobody(
    host: ModelHost, log: EventLog, directory: Path
) -> None:
    async def main() -> None:
        requests = [row(value, str(value)) for value in range(4)]
        tasks, _ = await behind_first(host, log, requests)
        requests[1].cancel.cancel(Reason.FIN)
        with pytest.raises(InferError, match="cancelled: fin"):
            await ended(tasks[2])
        (directory / "go").touch()
        await ended(asyncio.gather(*(task for task in tasks if task is not tasks[2])))

    host.run(main())
    assert log.events("batch")[1]["ids"] == ["0", "2", "3"]


def test_queue_that_is_full_refuses_and_who_waits_too_long_is_told(
    host: ModelHost, log: EventLog, directory: Path
) -> None:
    async def main() -> None:
        requests = [row(value, str(value), timeout_us=2_000_000) for value in range(6)]
        tasks, model = await behind_first(host, log, requests)
        rejected = model.statistics.failures.get("REJECTED", 0)
        with pytest.raises(InferError) as caught:
            await responses_of(model, row(0, "q3"))
        assert caught.value.message == "[request id: q3] Exceeds maximum queue size"
        for task in tasks[1:]:
            # No instance is idle: a timer tells them.
            with pytest.raises(InferError) as caught:
                await ended(task)
            assert (caught.value.code, caught.value.message) == (
                Code.UNAVAILABLE,
                "Request timeout expired",
            )
        assert model.statistics.failures["REJECTED"] == rejected + 7
        (directory / "go").touch()
        await ended(tasks[0])

    host.run(main())


def step(value: float, sequence: int, *, start: bool = False, end: bool = False) -> InferRequest:
    return InferRequest(
        inputs=tensors(X=np.array([[value]], np.float32)),
        sequence_id=sequence,
        sequence_start=start,
        sequence_end=end,
    )


def test_sequence_stays_with_its_instance(host: ModelHost) -> None:
    async def ask(request: InferRequest) -> tuple[float, float]:
        (response,) = await responses_of(host.repository.find("sum"), request)
        assert response.error is None, response.error
        total, pid = response.outputs[0].to_numpy()[0]
        return total, pid

    async def main() -> None:
        one, first = await ask(step(1, 7, start=True))
        two, second = await ask(step(10, 8, start=True))
        assert (one, two) == (1, 10)
        assert first != second  # each instance has one slot
        # A third sequence has no slot until one of the others has ended.
        third = asyncio.ensure_future(ask(step(100, 9, start=True)))
        for _ in range(3):
            one, pid = await ask(step(1, 7))
            assert pid == first
        two, pid = await ask(step(5, 8, end=True))
        assert (one, two, pid) == (4, 15, second)
        assert await ended(third) == (100, second)
        # Many of one sequence at once keep their order.
        totals = await ended(asyncio.gather(*(ask(step(1, 9)) for _ in range(5))))
        assert totals == [(101 + i, second) for i in range(5)]
        await ask(step(0, 9, end=True))
        await ask(step(0, 7, end=True))

    host.run(main())


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (
            step(1, 0),
            "[request id: <id_unknown>] inference request to model 'sum' must specify a non-zero "
            "or non-empty correlation ID",
        ),
        (
            step(1, 5),
            "[request id: <id_unknown>] inference request for sequence 5 to model 'sum' must "
            "specify the START flag on the first request of the sequence",
        ),
    ],
)
def test_request_of_no_sequence_is_refused(
    host: ModelHost, request_: InferRequest, message: str
) -> None:
    with pytest.raises(InferError) as caught:
        host.infer("sum", request_)
    assert (caught.value.code, caught.value.message) == (Code.INVALID_ARG, message)
