"""Models made of models, and models that ask models: one request, one cancel."""

import asyncio
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from disconnect_watch import Reason
from disconnect_watch.backends.infer import Code, InferError, InferRequest
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

TEXT = 'input { name: "text" data_type: TYPE_STRING dims: 1 }'
DELAY = 'input { name: "delay" data_type: TYPE_FP32 dims: 1 optional: true }'
OUT = 'output { name: "out" data_type: TYPE_STRING dims: 1 }'


def step(model: str, inputs: dict[str, str], outputs: dict[str, str]) -> str:
    def mapped(kind: str, names: dict[str, str]) -> str:
        return " ".join(f'{kind} {{ key: "{own}" value: "{name}" }}' for own, name in names.items())

    return (
        f'step {{ model_name: "{model}" model_version: -1 '
        f"{mapped('input_map', inputs)} {mapped('output_map', outputs)} }}"
    )


def ensemble(
    directory: Path, name: str, steps: list[str], tensors_: str = f"{TEXT} {DELAY} {OUT}"
) -> None:
    (directory / name / "1").mkdir(parents=True)
    (directory / name / "config.pbtxt").write_text(
        f'platform: "ensemble" {tensors_} ensemble_scheduling {{ {" ".join(steps)} }}'
    )


def slow(text: str, out: str) -> str:
    return step("slow_one", {"text_input": text, "delay": "delay"}, {"text_output": out})


def echo(text: str, out: str) -> str:
    return step("echo_text", {"text_input": text}, {"text_output": out})


#: Asks other models, in each way there is.
ASKS = """
import asyncio
import numpy as np
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def request(self, r):
        how = pb_utils.get_input_tensor_by_name(r, "how").as_numpy()[0].decode()
        model, _, how = how.partition(" ")
        text = pb_utils.get_input_tensor_by_name(r, "text_input")
        inputs = [text] + [t for t in r.inputs() if t.name() in ("delay", "n", "gap")]
        return how, pb_utils.InferenceRequest(
            model_name=model, inputs=inputs, requested_output_names=["text_output"],
            request_id="asked-" + r.request_id(), parameters={"a": 1},
        )
    async def both(self, request):
        answers = await asyncio.gather(request.async_exec(), request.async_exec())
        return answers[1]
    async def every(self, request):
        texts = []
        async for answer in await request.async_exec(decoupled=True):
            texts += [t.as_numpy()[0] for t in answer.output_tensors()]
        return texts
    def execute(self, requests):
        out = []
        for r in requests:
            how, request = self.request(r)
            texts = None
            if how == "ready":
                answer = pb_utils.InferenceResponse([])
                texts = [str(pb_utils.is_model_ready(request.model_name()))]
            elif how == "both":
                answer = asyncio.run(self.both(request))
            elif how == "every":
                texts = asyncio.run(self.every(request))
            elif how == "each":
                texts = [
                    t.as_numpy()[0]
                    for answer in request.exec(decoupled=True) for t in answer.output_tensors()
                ]
            else:
                answer = request.exec()
            if texts is not None:
                answer = pb_utils.InferenceResponse(
                    [pb_utils.Tensor("text_output", np.array(texts, object))])
            out.append(answer)
        return out
"""
ASKS_CONFIG = """
input { name: "how" data_type: TYPE_STRING dims: 1 }
input { name: "text_input" data_type: TYPE_STRING dims: 1 }
input { name: "delay" data_type: TYPE_FP32 dims: 1 optional: true }
input { name: "n" data_type: TYPE_INT32 dims: 1 optional: true }
input { name: "gap" data_type: TYPE_FP32 dims: 1 optional: true }
output { name: "text_output" data_type: TYPE_STRING dims: -1 }
"""


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> EventLog:
    return EventLog(tmp_path_factory.mktemp("log") / "log")


@pytest.fixture(scope="module")
def host(log: EventLog, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelHost]:
    models = tmp_path_factory.mktemp("ensembles")
    ensemble(models, "chain", [slow("text", "t1"), slow("t1", "t2"), echo("t2", "out")])
    ensemble(models, "late", [echo("text", "t1"), slow("t1", "out")])
    ensemble(
        models,
        "fork",
        [echo("text", "a"), slow("text", "b"), slow("b", "out")],
        f'{TEXT} {DELAY} {OUT} output {{ name: "a" data_type: TYPE_STRING dims: 1 }}',
    )
    fails = step("fails", {"INPUT0": "x"}, {"OUTPUT0": "y"})
    number = (
        'input { name: "x" data_type: TYPE_FP32 dims: -1 } '
        'output { name: "y" data_type: TYPE_FP32 dims: -1 }'
    )
    ensemble(models, "failing", [fails], number)
    ensemble(
        models,
        "streaming",
        [
            echo("text", "t"),
            step(
                "stream",
                {"text_input": "t", "n": "n", "gap": "delay"},
                {"text_output": "out"},
            ),
        ],
        f'{TEXT} {DELAY} {OUT} input {{ name: "n" data_type: TYPE_INT32 dims: 1 }}',
    )
    ensemble(models, "of_itself", [step("of_itself", {"text": "text"}, {"out": "out"})])
    ensemble(models, "no_input", [step("echo_text", {}, {"text_output": "out"})])
    ensemble(models, "no_such", [step("nope", {"x": "text"}, {"y": "out"})])
    ensemble(models, "never", [echo("nowhere", "out")])
    ensemble(models, "no_output", [echo("text", "other")])
    ensemble(models, "no_name", [step("echo_text", {"text_input": "text"}, {"nope": "out"})])
    ensemble(models, "twice", [echo("text", "out"), slow("text", "out")])
    ensemble(
        models,
        "amid",
        [step("stream", {"text_input": "text"}, {"text_output": "t"}), echo("t", "out")],
    )
    write_model(models, "asks", ASKS, ASKS_CONFIG)
    wanted = {path.name for path in models.iterdir()} | {"stream"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MODEL_LOG", str(log.path))
        with ModelHost(TRITON_MODELS, models, mode="explicit", load_models=wanted) as host:
            yield host


def texts_of(result: list[Any]) -> list[list[bytes]]:
    return [response.outputs[0].to_numpy().tolist() for response in result]


def request_of(text: str, **inputs: Any) -> InferRequest:
    request = text_request(text, **inputs)
    request.inputs[0].name = "text"
    return request


def test_steps_run_one_behind_the_other(host: ModelHost) -> None:
    result = host.infer("chain", request_of("x", delay=0.0))
    assert texts_of(result) == [[b"done done x"]]
    statistics = host.repository.statistics("chain")[0]
    assert (statistics.success.count, statistics.execution_count) == (1, 1)
    assert statistics.queue.count == 1


def test_steps_that_need_nothing_of_each_other_run_beside_each_other(host: ModelHost) -> None:
    (response,) = host.infer("fork", request_of("x", delay=0.0))
    found = {tensor.name: tensor.to_numpy().tolist() for tensor in response.outputs}
    assert found == {"a": [b"x"], "out": [b"done done x"]}
    request = request_of("x", delay=0.0)
    request.requested_outputs = ["a"]
    (response,) = host.infer("fork", request)
    assert [tensor.name for tensor in response.outputs] == ["a"]


def test_error_of_a_step_is_the_ensembles(host: ModelHost) -> None:
    (response,) = host.infer("failing", InferRequest(inputs=tensors(x=np.array([3], np.float32))))
    assert response.error is not None
    assert (response.error.code, response.error.message) == (
        Code.NOT_FOUND,
        "in ensemble 'failing', model says no 3",
    )
    assert host.repository.statistics("failing")[0].failures == {"BACKEND": 1}


def test_last_step_may_have_many_responses(host: ModelHost) -> None:
    assert host.repository.find("streaming").is_decoupled
    result = host.infer("streaming", request_of("x", n=3, delay=0.0))
    assert texts_of(result) == [[b"x 0"], [b"x 1"], [b"x 2"]]


@pytest.mark.parametrize("name", ["chain", "late", "fork"])
def test_cancel_ends_the_step_that_runs_and_begins_no_other(
    host: ModelHost, log: EventLog, name: str
) -> None:
    log.path.write_text("")

    async def main() -> None:
        request = request_of("x", delay=1000.0)
        statistics = host.repository.statistics(name)[0]
        task = asyncio.ensure_future(responses_of(host.repository.find(name), request))
        await until(lambda: log.events("start"))
        request.cancel.cancel(Reason.FIN)
        with pytest.raises(InferError, match="request was cancelled: fin") as caught:
            await ended(task)
        assert caught.value.code is Code.CANCELLED
        assert (statistics.cancel.count, statistics.failures) == (1, {"CANCELED": 1})
        await until(lambda: log.events("end"))
        await until(lambda: host.model("slow_one").num_live == 0)

    host.run(main())
    assert len(log.events("start")) == 1
    assert log.events("end")[0]["cancelled"] is not None


def test_leaving_a_streaming_ensemble_cancels_its_step(host: ModelHost, log: EventLog) -> None:
    log.path.write_text("")

    async def main() -> None:
        request = request_of("x", n=1000, delay=0.02)
        async with aclosing(host.repository.find("streaming").infer(request)) as responses:
            await anext(responses)
        await until(lambda: log.events("end"))

    host.run(main())
    assert log.events("end")[0]["cancelled"] is not None


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("of_itself", "ensemble 'of_itself' is a step of itself"),
        ("no_input", "the input 'text_input' is not mapped"),
        ("no_such", "Request for unknown model: 'nope' is not found"),
        ("never", "waits for a tensor that no step before it makes"),
        ("no_output", "no step makes the output 'out'"),
        ("no_name", "the model has no output 'nope'"),
        ("twice", "the tensor 'out' is made twice"),
        ("amid", "the step 'stream' is decoupled, it must come behind all others"),
    ],
)
def test_ensemble_that_makes_no_sense_is_not_loaded(
    host: ModelHost, name: str, message: str
) -> None:
    (entry,) = [entry for entry in host.repository.index() if entry.name == name]
    assert entry.state == "UNAVAILABLE"
    assert entry.reason is not None
    assert message in entry.reason


def ask(host: ModelHost, how: str, text: str = "x", **inputs: Any) -> Any:
    request = text_request(text, request_id="r", **inputs)
    request.inputs += tensors(how=[how])
    return host.infer("asks", request)[0]


@pytest.mark.parametrize(
    ("how", "texts"),
    [
        ("echo_text", [b"x"]),
        ("echo_text both", [b"x"]),
        ("stream each", [b"x 0", b"x 1", b"x 2"]),
        ("stream every", [b"x 0", b"x 1", b"x 2"]),
        ("echo_text ready", [b"True"]),
        ("nope ready", [b"False"]),
    ],
)
def test_model_asks_another(host: ModelHost, how: str, texts: list[bytes]) -> None:
    response = ask(host, how) if "stream" not in how else ask(host, how, n=3, gap=0.0)
    assert response.error is None, response.error
    assert response.outputs[0].to_numpy().tolist() == texts


def test_large_tensors_go_to_another_model_and_back(host: ModelHost) -> None:
    text = "x" * 1_000_000
    assert ask(host, "echo_text", text).outputs[0].to_numpy().tolist() == [text.encode()]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("nope", "Request for unknown model: 'nope' is not found"),
        ("stream", "answered with 3 responses, ask it with decoupled=True"),
        ("fails", "unexpected inference input 'text_input' for model 'fails'"),
    ],
)
def test_error_of_another_model_is_given(host: ModelHost, how: str, message: str) -> None:
    response = ask(host, how) if how != "stream" else ask(host, how, n=3, gap=0.0)
    assert response.error is not None
    assert message in response.error.message


def test_cancel_ends_what_a_model_waits_for(host: ModelHost, log: EventLog) -> None:
    log.path.write_text("")

    async def main() -> None:
        request = text_request("x", request_id="r", delay=1000.0)
        request.inputs += tensors(how=["slow_one"])
        model = host.model("asks")
        task = asyncio.ensure_future(responses_of(model, request))
        await until(lambda: log.events("start"))
        request.cancel.cancel(Reason.FIN)
        with pytest.raises(InferError, match="cancelled: fin"):
            await ended(task)
        await until(lambda: log.events("end"))
        await until(lambda: model.num_live == 0)

    host.run(main())
    assert log.events("end")[0]["cancelled"] is not None


def test_unloading_an_ensemble_may_unload_what_it_was_made_of(host: ModelHost) -> None:
    repository = host.repository
    host.run(repository.unload("failing", unload_dependents=True))
    states = {entry.name: entry.state for entry in repository.index()}
    assert (states["failing"], states["fails"]) == ("UNAVAILABLE", "UNAVAILABLE")
    host.run(repository.load("failing"))
    host.run(repository.unload("fork", unload_dependents=True))
    states = {entry.name: entry.state for entry in repository.index()}
    assert states["slow_one"] == "READY"  # the chain needs it
