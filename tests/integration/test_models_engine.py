"""The engine as a model among others: asked with tensors, by models, and in ensembles."""

from collections.abc import Iterator
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest

from disconnect_watch import Reason
from disconnect_watch.backends.engine import EngineBackend
from disconnect_watch.backends.engine_model import EngineModel
from disconnect_watch.backends.infer import Code, InferError, InferRequest, InferTensor
from disconnect_watch.engine import EngineConfig
from tests.support.models import TIME_LIMIT, ModelHost, ended, tensors, until, write_model

pytestmark = pytest.mark.timeout(TIME_LIMIT)

#: Asks the engine, and hands its text on as it comes.
ASKS = """
import numpy as np
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def execute(self, requests):
        for r in requests:
            sender = r.get_response_sender()
            asked = pb_utils.InferenceRequest(
                model_name="llm", inputs=r.inputs(), requested_output_names=["text_output"])
            for answer in asked.exec(decoupled=True):
                if answer.has_error():
                    sender.send(pb_utils.InferenceResponse([], answer.error()))
                elif answer.output_tensors():
                    sender.send(pb_utils.InferenceResponse(answer.output_tensors()))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
CONFIG = """
input { name: "text_input" data_type: TYPE_STRING dims: 1 }
input { name: "max_tokens" data_type: TYPE_INT32 dims: 1 optional: true }
input { name: "ignore_eos" data_type: TYPE_BOOL dims: 1 optional: true }
output { name: "text_output" data_type: TYPE_STRING dims: -1 }
model_transaction_policy { decoupled: true }
"""


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelHost]:
    models = tmp_path_factory.mktemp("models")
    write_model(models, "asks", ASKS, CONFIG)
    backend = EngineBackend.from_pretrained(name="llm", config=EngineConfig(max_model_len=512))
    try:
        with ModelHost(models) as host:
            host.repository.add(EngineModel(backend))
            yield host
    finally:
        backend.close()


def prompt(text: str = "A cat", **inputs: Any) -> InferRequest:
    kinds: dict[type, Any] = {bool: np.bool_, int: np.int32, float: np.float32}
    arrays = {name: np.array([value], kinds[type(value)]) for name, value in inputs.items()}
    return InferRequest("r", tensors(text_input=[text], **arrays))


def text_of(responses: list[Any]) -> str:
    pieces = [t for r in responses for t in r.outputs if t.name == "text_output"]
    return b"".join(piece.to_numpy()[0] for piece in pieces).decode()


def test_engine_answers_tensors_with_tensors(host: ModelHost) -> None:
    model = host.repository.find("llm")
    assert (model.is_ready, model.is_decoupled, model.labels("text_output")) == (True, True, ())
    assert model.config.input[0].name == "text_input"
    request = prompt(max_tokens=8, ignore_eos=True, temperature=0.0)
    responses = host.infer("llm", request)
    assert [response.is_final for response in responses] == [False] * (len(responses) - 1) + [True]
    text = text_of(responses)
    assert text
    # The same through a model that asks for it.
    assert text_of(host.infer("asks", prompt(max_tokens=8, ignore_eos=True))) == text
    statistics = host.repository.statistics("llm")[0]
    assert (statistics.success.count, statistics.fail.count, statistics.cancel.count) == (2, 0, 0)


def test_several_answers_say_which_they_are(host: ModelHost) -> None:
    responses = host.infer("llm", prompt(max_tokens=4, ignore_eos=True, n=2, logprobs=1))
    found = {
        int(tensor.to_numpy()[0])
        for response in responses
        for tensor in response.outputs
        if tensor.name == "index"
    }
    assert found == {0, 1}
    assert any(tensor.name == "logprobs" for tensor in responses[0].outputs)


def test_configuration_says_what_computes_the_model(host: ModelHost) -> None:
    model = host.repository.find("llm")
    assert isinstance(model, EngineModel)
    stats = model._backend.stats()
    told = model.config.parameters
    assert told["arithmetic"].string_value == stats.arithmetic
    assert stats.arithmetic.startswith(("native, ", "torch"))
    assert told["missing"].string_value == "; ".join(stats.missing)


@pytest.mark.parametrize("name", ["llm", "asks"])
def test_cancel_ends_the_engines_work(host: ModelHost, name: str) -> None:
    async def main() -> None:
        model = host.repository.find("llm")
        assert isinstance(model, EngineModel)
        backend = model._backend
        before = model.statistics.cancel.count
        request = prompt(max_tokens=400, ignore_eos=True)
        async with aclosing(host.repository.find(name).infer(request)) as responses:
            await anext(responses)
            request.cancel.cancel(Reason.FIN)
            with pytest.raises(InferError, match="request was cancelled: fin"):
                while True:
                    await ended(anext(responses))
        await until(lambda: model.statistics.cancel.count == before + 1)
        await until(lambda: backend.stats().num_running == 0)

    host.run(main())


def test_leaving_the_responses_cancels_the_request(host: ModelHost) -> None:
    async def main() -> None:
        request = prompt(max_tokens=400, ignore_eos=True)
        async with aclosing(host.repository.find("llm").infer(request)) as responses:
            await anext(responses)
        assert request.cancel.reason is Reason.ABORTED

    host.run(main())


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (prompt(max_tokens=-1), "max_tokens"),
        (prompt("x " * 600), "tokens"),
        (InferRequest("r", [InferTensor("text_input", "BYTES", (1,), b"\1\0\0\0\xff")]), "utf-8"),
        (InferRequest("r"), "missing required input"),
    ],
)
def test_request_that_the_engine_can_not_take_is_refused(
    host: ModelHost, request_: InferRequest, message: str
) -> None:
    with pytest.raises(InferError, match=rf"^\[request id: r\] .*{message}") as caught:
        host.infer("llm", request_)
    assert caught.value.code is Code.INVALID_ARG
