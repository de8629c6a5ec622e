"""Python models in worker processes: what goes in and out, cancels, and deaths."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path

import numpy as np
import pytest

from disconnect_watch import Reason
from disconnect_watch.backends.infer import Buffer, Code, InferError, InferRequest, InferTensor
from disconnect_watch.backends.python_model.arena import Arena
from tests.support.models import (
    TIME_LIMIT,
    TRITON_MODELS,
    EventLog,
    ModelHost,
    ended,
    responses_of,
    tensors,
    text_request,
    until,
    write_model,
)

pytestmark = pytest.mark.timeout(TIME_LIMIT)

WANTED = ("echo_text", "fails", "identity_bytes", "identity_fp32", "slow_one", "stream")


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> EventLog:
    return EventLog(tmp_path_factory.mktemp("log") / "model.log")


@pytest.fixture(scope="module")
def host(log: EventLog) -> Iterator[ModelHost]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MODEL_LOG", str(log.path))
        with ModelHost(TRITON_MODELS, mode="explicit", load_models=WANTED) as host:
            yield host


@pytest.fixture(autouse=True)
def everything_is_given_back(host: ModelHost) -> Iterator[None]:
    """No request is left in a process, and each that was taken has one outcome."""
    yield

    async def settle() -> None:
        for name in WANTED:
            model = host.model(name)
            await until(lambda model=model: model.num_live == 0)  # type: ignore[misc]
            statistics = model.statistics
            assert statistics.num_pending == 0
            assert sum(statistics.failures.values()) == (
                statistics.fail.count + statistics.cancel.count
            )
            assert statistics.queue.count == statistics.success.count

    host.run(settle())


def test_models_are_ready_in_processes_of_their_own(host: ModelHost) -> None:
    pids = [pid for name in WANTED for pid in host.model(name).pids]
    assert len(set(pids)) == len(WANTED)
    assert os.getpid() not in pids
    assert [entry.name for entry in host.repository.index(ready=True)] == sorted(WANTED)


@pytest.mark.parametrize("num_elements", [16, 5000, 4 << 20])
def test_array_comes_back_as_it_went(host: ModelHost, num_elements: int) -> None:
    array = np.arange(num_elements, dtype=np.float32).reshape(1, -1)
    (response,) = host.infer("identity_fp32", InferRequest("r", tensors(INPUT0=array)))
    (output,) = response.outputs
    assert (response.id, response.is_final, response.error) == ("r", True, None)
    assert np.array_equal(output.to_numpy(), array)


def test_large_answer_lies_in_shared_memory_for_as_long_as_it_is_used(host: ModelHost) -> None:
    array = np.ones((1, 1 << 20), np.float32)
    request = InferRequest(inputs=tensors(INPUT0=array))
    first = host.infer("identity_fp32", request)[0].outputs[0].to_numpy()
    second = host.infer("identity_fp32", request)[0].outputs[0].to_numpy()
    assert not np.shares_memory(first, second)
    addresses = {first.ctypes.data, second.ctypes.data}
    del first, second
    # What was freed is told with the next request and is used again for its answer.
    host.infer("identity_fp32", request)
    third = host.infer("identity_fp32", request)[0].outputs[0].to_numpy()
    assert third.ctypes.data in addresses


def test_a_body_that_was_read_into_its_memory_is_not_copied_for_a_model(
    host: ModelHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[int] = []
    put = Arena.put

    def spy(arena: Arena, data: Buffer) -> int:
        copied.append(len(data))
        return put(arena, data)

    monkeypatch.setattr(Arena, "put", spy)
    model = host.model("identity_fp32")
    before = host.num_blocks("identity_fp32")
    head, array = b"{...}", np.arange(1 << 20, dtype=np.float32)
    body = model.room_for(len(head) + array.nbytes, len(head))
    assert body is not None
    body[:] = head + array.tobytes()
    tensor = InferTensor("INPUT0", "FP32", (1, array.size), body[len(head) :])
    assert tensor.to_numpy().ctypes.data % 64 == 0
    (response,) = host.infer("identity_fp32", InferRequest("r", [tensor]))
    assert np.array_equal(response.outputs[0].to_numpy()[0], array)
    assert copied == []
    del body, tensor, response
    host.infer("identity_fp32", InferRequest(inputs=tensors(INPUT0=array[None, :1])))
    assert host.num_blocks("identity_fp32") == before


def test_what_is_cancelled_on_its_way_gives_its_memory_back(host: ModelHost) -> None:
    array = np.ones((1, 1 << 16), np.float32)

    async def main() -> None:
        model = host.model("identity_fp32")
        before = host.num_blocks("identity_fp32")
        (pid,) = model.pids
        request = InferRequest(inputs=tensors(INPUT0=array))
        os.kill(pid, signal.SIGSTOP)
        try:
            task = asyncio.ensure_future(responses_of(model, request))
            await until(lambda: model.num_live == 2)
            request.cancel.cancel(Reason.FIN)
            with pytest.raises(InferError, match="cancelled: fin"):
                await ended(task)
        finally:
            os.kill(pid, signal.SIGCONT)
        # What was freed is told with the next answer.
        await responses_of(model, InferRequest(inputs=tensors(INPUT0=array[:, :1])))
        assert host.num_blocks("identity_fp32") == before

    host.run(main())


def test_strings_come_back_as_they_went(host: ModelHost) -> None:
    texts = np.array([[b"\xff\0", b""], [b"x" * 100_000, b"y"]], object)
    (response,) = host.infer("identity_bytes", InferRequest(inputs=tensors(INPUT0=texts)))
    assert response.outputs[0].to_numpy().tolist() == texts.tolist()


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (0, Code.INTERNAL),
        (2, Code.INVALID_ARG),
        (3, Code.NOT_FOUND),
        (4, Code.UNAVAILABLE),
        (5, Code.UNSUPPORTED),
        (6, Code.ALREADY_EXISTS),
        (7, Code.UNKNOWN),
        (8, Code.CANCELLED),
    ],
)
def test_error_of_a_model_has_its_code(host: ModelHost, value: int, code: Code) -> None:
    request = InferRequest(inputs=tensors(INPUT0=np.array([value], np.float32)))
    (response,) = host.infer("fails", request)
    assert response.error is not None
    assert (response.error.code, response.error.message) == (code, f"model says no {value}")


def test_exception_of_a_model_is_told_with_its_place(host: ModelHost) -> None:
    request = InferRequest(inputs=tensors(INPUT0=np.array([1], np.float32)))
    (response,) = host.infer("fails", request)
    assert response.error is not None
    path = TRITON_MODELS / "fails" / "1" / "model.py"
    assert response.error.message == (
        "Failed to process the request(s) for model 'fails_0_0', message: ValueError: model blew "
        f"up\n\nAt:\n  {path}(7): execute\n"
    )


def test_request_that_does_not_fit_reaches_no_model(host: ModelHost) -> None:
    before = host.model("fails").statistics.execution_count
    with pytest.raises(InferError, match="missing required input") as caught:
        host.infer("fails", InferRequest())
    assert caught.value.code is Code.INVALID_ARG
    assert host.model("fails").statistics.execution_count == before


def test_decoupled_model_answers_as_often_as_it_likes(host: ModelHost) -> None:
    responses = host.infer("stream", text_request("tok", n=3, gap=0.0))
    texts = [response.outputs[0].to_numpy()[0] for response in responses]
    assert texts == [b"tok 0", b"tok 1", b"tok 2"]
    assert [response.is_final for response in responses] == [False, False, True]


def test_decoupled_model_may_answer_with_nothing(host: ModelHost) -> None:
    (response,) = host.infer("stream", text_request("tok", n=0))
    assert (response.outputs, response.error, response.is_final) == ([], None, True)


def test_error_amid_a_stream_does_not_end_it(host: ModelHost) -> None:
    responses = host.infer("stream", text_request("tok", n=3, gap=0.0, fail_at=1))
    assert [response.error and response.error.message for response in responses] == [
        None,
        "chunk 1 failed",
        None,
    ]


def test_cancel_ends_a_running_request_at_once_and_its_model_soon(
    host: ModelHost, log: EventLog
) -> None:
    async def main() -> None:
        request = text_request("running", request_id="running", delay=1000.0)
        task = asyncio.ensure_future(responses_of(host.repository.find("slow_one"), request))
        await until(lambda: [e for e in log.events("start") if e["id"] == "running"])
        before = host.model("slow_one").statistics.cancel.count
        request.cancel.cancel(Reason.FIN)
        with pytest.raises(InferError, match="request was cancelled: fin") as caught:
            await ended(task)
        assert caught.value.code is Code.CANCELLED
        await until(lambda: [e for e in log.events("end") if e["id"] == "running"])
        statistics = host.model("slow_one").statistics
        assert statistics.cancel.count == before + 1
        assert statistics.responses[0].cancel.count == before + 1

    host.run(main())
    (end,) = [event for event in log.events("end") if event["id"] == "running"]
    assert end["cancelled"] is not None


def test_request_cancelled_while_it_waits_never_runs(host: ModelHost, log: EventLog) -> None:
    async def main() -> None:
        model = host.repository.find("slow_one")
        first = text_request("first", request_id="first", delay=1000.0)
        queued = text_request("queued", request_id="queued", delay=0.0)
        third = text_request("third", request_id="third", delay=0.0)
        tasks = [asyncio.ensure_future(responses_of(model, r)) for r in (first, queued, third)]
        await until(lambda: [e for e in log.events("start") if e["id"] == "first"])
        queued.cancel.cancel(Reason.RESET)
        with pytest.raises(InferError, match="cancelled: reset"):
            await ended(tasks[1])
        first.cancel.cancel()
        with pytest.raises(InferError, match="cancelled: aborted"):
            await ended(tasks[0])
        assert await ended(tasks[2])

    host.run(main())
    assert "third" in [event["id"] for event in log.events("start")]
    assert "queued" not in [event["id"] for event in log.events("start")]


def test_request_cancelled_on_its_way_to_the_process_never_runs(
    host: ModelHost, log: EventLog
) -> None:
    async def main() -> None:
        model = host.model("slow_one")
        (pid,) = model.pids
        request = text_request("sent", request_id="sent", delay=0.0)
        os.kill(pid, signal.SIGSTOP)
        try:
            task = asyncio.ensure_future(responses_of(model, request))
            await until(lambda: model.num_live == 2)  # it waits, and the process has it
            request.cancel.cancel(Reason.FIN)
            with pytest.raises(InferError, match="cancelled: fin"):
                await ended(task)
        finally:
            os.kill(pid, signal.SIGCONT)
        executions = model.statistics.execution_count
        assert await responses_of(model, text_request("next", delay=0.0))
        assert model.statistics.execution_count == executions + 1

    host.run(main())
    assert "sent" not in [event["id"] for event in log.events("start")]


def test_request_that_was_cancelled_before_it_came_never_runs(
    host: ModelHost, log: EventLog
) -> None:
    request = text_request("late", request_id="late", delay=0.0)
    request.cancel.cancel(Reason.FIN)
    with pytest.raises(InferError, match="cancelled: fin"):
        host.infer("slow_one", request)
    assert "late" not in [event["id"] for event in log.events("start")]


def test_leaving_the_responses_cancels_the_request(host: ModelHost, log: EventLog) -> None:
    request = text_request("left", request_id="left", n=1000, gap=0.02)

    async def main() -> None:
        async with aclosing(host.repository.find("stream").infer(request)) as responses:
            assert (await anext(responses)).outputs
        assert request.cancel.reason is Reason.ABORTED
        await until(lambda: [e for e in log.events("end") if e["id"] == "left"])

    host.run(main())
    (end,) = [event for event in log.events("end") if event["id"] == "left"]
    assert end["cancelled"] is not None


def test_one_of_many_streams_is_cancelled_alone(host: ModelHost) -> None:
    async def main() -> None:
        model = host.repository.find("stream")
        requests = [text_request(f"s{i}", n=20, gap=0.02) for i in range(4)]
        tasks = [asyncio.ensure_future(responses_of(model, request)) for request in requests]
        requests[1].cancel.cancel(Reason.FIN)
        results = await ended(asyncio.gather(*tasks, return_exceptions=True))
        assert isinstance(results[1], InferError)
        assert [len(r) for i, r in enumerate(results) if i != 1] == [20, 20, 20]  # type: ignore[arg-type]

    host.run(main())


def test_process_that_dies_fails_its_own_requests_alone_and_is_started_again(
    host: ModelHost, log: EventLog
) -> None:
    async def main() -> None:
        model = host.model("slow_one")
        (pid,) = model.pids
        request = text_request("doomed", request_id="doomed", delay=1000.0)
        doomed = asyncio.ensure_future(responses_of(model, request))
        await until(lambda: [e for e in log.events("start") if e["id"] == "doomed"])
        queued = asyncio.ensure_future(responses_of(model, text_request("next", delay=0.0)))
        other = host.repository.find("echo_text")
        os.kill(pid, signal.SIGKILL)
        assert await responses_of(other, text_request("beside"))
        with pytest.raises(InferError) as caught:
            await ended(doomed)
        assert caught.value.code is Code.INTERNAL
        assert caught.value.message == (
            "the process of 'slow_one_0_0' ended (signal SIGKILL) while it worked on the request"
        )
        # Who only waited for it is served by the next.
        (response,) = await ended(queued)
        assert response.outputs[0].to_numpy()[0] == b"done next"
        assert model.pids != [pid]
        assert not request.cancel.cancelled

    host.run(main())


CRASHES = """
import os
class TritonPythonModel:
    def execute(self, requests):
        os._exit(3)
"""

DIES_AT_FIRST = """
class TritonPythonModel:
    def initialize(self, args):
        import os
        os.kill(os.getpid(), 9)
    def execute(self, requests):
        return []
"""

NO_CLASS = "x = 1"
SYNTAX = "def"
NO_EXECUTE = "class TritonPythonModel: pass"


def test_process_that_exits_says_how(host: ModelHost, tmp_path: Path) -> None:
    write_model(tmp_path, "crashes", CRASHES)
    with ModelHost(tmp_path) as other:
        for _ in range(2):
            with pytest.raises(InferError, match=r"ended \(exit status 3\) while it worked"):
                other.infer("crashes", InferRequest())
            other.run(until(lambda: other.model("crashes").is_ready))


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (DIES_AT_FIRST, r"ended \(signal SIGKILL\) while it was loaded"),
        (NO_CLASS, "has no attribute 'TritonPythonModel'"),
        (SYNTAX, "SyntaxError"),
        (NO_EXECUTE, "has no method 'execute'"),
    ],
)
def test_model_that_can_not_be_made_says_why(
    host: ModelHost, tmp_path: Path, code: str, message: str
) -> None:
    write_model(tmp_path, "bad", code)
    with ModelHost(tmp_path) as other:
        (entry,) = other.repository.index()
        assert (entry.version, entry.state) == ("1", "UNAVAILABLE")
        assert entry.reason is not None
        assert message.replace("\\", "") in entry.reason
        assert not other.repository.is_ready()
        assert other.repository.is_ready(strict=False)
        with pytest.raises(InferError, match="Request for unknown model: 'bad' is not found"):
            other.repository.find("bad")


IGNORES = """
import time
class TritonPythonModel:
    def execute(self, requests):
        while True:
            time.sleep(0.01)
"""


def test_model_that_ignores_its_cancel_is_stopped_for_good(tmp_path: Path, host: ModelHost) -> None:
    config = 'parameters { key: "kill_after" value { string_value: "0.2" } }'
    write_model(tmp_path, "ignores", IGNORES, config)

    async def main(other: ModelHost) -> None:
        model = other.model("ignores")
        (pid,) = model.pids
        request = InferRequest()
        task = asyncio.ensure_future(responses_of(model, request))
        await until(lambda: model.num_live == 2)  # it waits, and the process has it
        request.cancel.cancel(Reason.FIN)
        with pytest.raises(InferError, match="cancelled: fin"):
            await ended(task)
        await until(lambda: model.pids != [pid] and model.is_ready)
        assert model.num_live == 0
        assert (model.statistics.cancel.count, model.statistics.fail.count) == (1, 0)

    with ModelHost(tmp_path) as other:
        other.run(main(other))


#: Ignores its flag, and answers who asks for it when a file is there.
IGNORES_AMID = """
import os, threading, time
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def execute(self, requests):
        for r in requests:
            threading.Thread(target=self.run, args=[r.get_response_sender()], daemon=True).start()
    def run(self, sender):
        while not os.path.exists(os.environ["GO"]):
            time.sleep(0.01)
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


def test_process_that_somebody_waits_for_is_not_stopped(
    tmp_path: Path, host: ModelHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = tmp_path / "go"
    monkeypatch.setenv("GO", str(go))
    config = "model_transaction_policy { decoupled: true }"
    write_model(tmp_path / "models", "ignores", IGNORES_AMID, config)

    async def main(other: ModelHost) -> None:
        model = other.model("ignores")
        (pid,) = model.pids
        requests = [InferRequest(), InferRequest()]
        tasks = [asyncio.ensure_future(responses_of(model, request)) for request in requests]
        await until(lambda: model.num_live == 4 and model.statistics.execution_count == 2)
        requests[0].cancel.cancel(Reason.FIN)
        with pytest.raises(InferError, match="cancelled: fin"):
            await ended(tasks[0])
        at = requests[0].cancel.cancelled_at
        assert at is not None
        await until(lambda: time.monotonic() > at + 0.3)  # it would have been stopped by now
        go.touch()
        assert len(await ended(tasks[1])) == 1
        assert model.pids == [pid]
        await until(lambda: model.num_live == 0)

    with ModelHost(tmp_path / "models", kill_after=0.1) as other:
        other.run(main(other))
