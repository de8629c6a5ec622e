"""What a model may return, send and raise, and what its requests are answered."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from disconnect_watch.backends.infer import Code, InferError, InferRequest, InferTensor
from tests.support.models import TIME_LIMIT, ModelHost, tensors, write_model

pytestmark = pytest.mark.timeout(TIME_LIMIT)

#: Does what its input names, for each request or for all.
ODD = """
import asyncio, json, threading
import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL

def text(value):
    return pb_utils.InferenceResponse(
        [pb_utils.Tensor("out", np.array([value], object))])

class TritonPythonModel:
    def initialize(self, args):
        self.args = args
        self.is_decoupled = pb_utils.using_decoupled_model_transaction_policy(
            json.loads(args["model_config"]))
    def execute(self, requests):
        how = [pb_utils.get_input_tensor_by_name(r, "how").as_numpy()[0].decode() for r in requests]
        return getattr(self, how[0])(requests)
    def args_(self, requests):
        return [text(json.dumps({**self.args, "model_config": ""}))]
    def directory(self, requests):
        return [text(pb_utils.get_model_dir())]
    def too_few(self, requests):
        return []
    def no_list(self, requests):
        return 7
    def no_response(self, requests):
        return ["text"]
    def nothing(self, requests):
        return None
    def bad_tensor(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("out", np.zeros(1, complex))])]
    def parameters(self, requests):
        response = text("x")
        return [pb_utils.InferenceResponse(
            response.output_tensors(), parameters={"a": 1, "b": 1.5, "c": "d", "e": True})]
    def bad_parameters(self, requests):
        return [pb_utils.InferenceResponse([], parameters={"a": [1]})]
    def huge_parameters(self, requests):
        return [pb_utils.InferenceResponse([], parameters={"a": 1 << 64})]
    def log(self, requests):
        for level in (pb_utils.Logger.log_info, pb_utils.Logger.log_warn, pb_utils.Logger.log_error,
                      pb_utils.Logger.log_verbose):
            level("said so")
        return [text("x")]
    def more_outputs(self, requests):
        more = pb_utils.Tensor("more", np.zeros(1, np.float32))
        return [pb_utils.InferenceResponse(text("x").output_tensors() + [more])]
    async def coroutine(self, requests):
        await asyncio.sleep(0)
        return [text("awaited")]
    async def failing_coroutine(self, requests):
        raise ValueError("blew up later")
    def sender(self, requests):
        requests[0].get_response_sender().send(text("sent"), flags=FINAL)
    def sender_in_two(self, requests):
        sender = requests[0].get_response_sender()
        sender.send(text("sent"))
        sender.send(flags=FINAL)
        return [None]
    def sender_of_a_thread(self, requests):
        sender = requests[0].get_response_sender()
        threading.Timer(0.01, lambda: sender.send(text("late"), flags=FINAL)).start()
    def dropped(self, requests):
        requests[0].get_response_sender()
    def sends_what_can_not_be_sent(self, requests):
        sender = requests[0].get_response_sender()
        try:
            sender.send(pb_utils.InferenceResponse(
                [pb_utils.Tensor("out", np.zeros(1, complex))]), flags=FINAL)
        except pb_utils.TritonModelException:
            sender.send(text("instead"), flags=FINAL)
    def returns_amid(self, requests):
        return [text("x")]
    def raises_amid(self, requests):
        requests[0].get_response_sender().send(text("first"))
        raise ValueError("blew up amid")
    async def streams(self, requests):
        sender = requests[0].get_response_sender()
        for i in range(3):
            await asyncio.sleep(0)
            sender.send(text(str(i)), flags=FINAL if i == 2 else 0)
    def ping(self, requests):
        if self.is_decoupled:
            requests[0].get_response_sender().send(text("pong"), flags=FINAL)
            return None
        return [text("pong")]
"""
CONFIG = """
input { name: "how" data_type: TYPE_STRING dims: 1 }
output { name: "out" data_type: TYPE_STRING dims: 1 }
output { name: "more" data_type: TYPE_FP32 dims: 1 }
"""
DECOUPLED = "model_transaction_policy { decoupled: true }"

#: Hands BF16 on through torch, which knows it.
BF16 = """
import torch
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def execute(self, requests):
        out = []
        for r in requests:
            x = torch.from_dlpack(r.inputs()[0])
            assert x.dtype == torch.bfloat16
            out.append(pb_utils.InferenceResponse([pb_utils.Tensor.from_dlpack("y", x * 2)]))
        return out
"""
BF16_CONFIG = """
input { name: "x" data_type: TYPE_BF16 dims: -1 }
output { name: "y" data_type: TYPE_BF16 dims: -1 }
"""


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelHost]:
    models = tmp_path_factory.mktemp("backend")
    write_model(models, "odd", ODD, CONFIG)
    write_model(models, "many", ODD, f"{CONFIG} {DECOUPLED}")
    write_model(models, "bf16", BF16, BF16_CONFIG)
    with ModelHost(models) as host:
        yield host


@pytest.fixture(autouse=True)
def models_go_on(host: ModelHost) -> Iterator[None]:
    """Whatever a request has done, the next is answered by the same process."""
    pids = [host.model(name).pids for name in ("odd", "many")]
    yield
    for name in ("odd", "many"):
        assert texts_of(host, name, "ping") == ["pong"]
        assert host.model(name).num_live == 0
    assert pids == [host.model(name).pids for name in ("odd", "many")]


def ask(host: ModelHost, name: str, how: str, **options: Any) -> Any:
    return host.infer(name, InferRequest("r", tensors(how=[how]), **options))


def texts_of(host: ModelHost, name: str, how: str) -> list[str]:
    responses = ask(host, name, how)
    assert [r.error for r in responses] == [None] * len(responses)
    return [r.outputs[0].to_numpy()[0].decode() for r in responses if r.outputs]


@pytest.mark.parametrize(
    ("name", "how", "texts"),
    [
        ("odd", "coroutine", ["awaited"]),
        ("odd", "sender", ["sent"]),
        ("odd", "sender_in_two", ["sent"]),
        ("odd", "sender_of_a_thread", ["late"]),
        ("odd", "sends_what_can_not_be_sent", ["instead"]),
        ("many", "sender", ["sent"]),
        ("many", "sender_of_a_thread", ["late"]),
        ("many", "streams", ["0", "1", "2"]),
    ],
)
def test_each_way_to_answer(host: ModelHost, name: str, how: str, texts: list[str]) -> None:
    assert texts_of(host, name, how) == texts


@pytest.mark.parametrize(
    ("name", "how", "message"),
    [
        ("odd", "too_few", "Expected 1, got 0"),
        ("odd", "no_list", "Expected 1, got int"),
        ("odd", "no_response", "found type '<class 'str'>'"),
        ("odd", "nothing", "Expected 1, got NoneType"),
        ("odd", "bad_tensor", "complex128 has no datatype on the wire"),
        ("odd", "bad_parameters", "response parameter 'a' is [1]"),
        ("odd", "huge_parameters", "no more than 64 bits"),
        ("odd", "failing_coroutine", "ValueError: blew up later"),
        ("odd", "dropped", "let go of its response sender before the last response"),
        ("many", "dropped", "let go of its response sender before the last response"),
        ("many", "nothing", "let go of its response sender before the last response"),
        (
            "many",
            "returns_amid",
            "is using the decoupled mode and the execute function must return",
        ),
        ("many", "raises_amid", "ValueError: blew up amid"),
        ("many", "failing_coroutine", "ValueError: blew up later"),
    ],
)
def test_each_way_to_fail_is_told(host: ModelHost, name: str, how: str, message: str) -> None:
    *_, response = ask(host, name, how)
    assert response.is_final
    assert response.error is not None
    assert response.error.code is Code.INTERNAL
    assert message in response.error.message


def test_response_has_the_models_parameters(host: ModelHost) -> None:
    (response,) = ask(host, "odd", "parameters")
    assert response.parameters == {"a": 1, "b": 1.5, "c": "d", "e": True}


def test_only_outputs_that_were_asked_for_are_given(host: ModelHost) -> None:
    (response,) = ask(host, "odd", "more_outputs")
    assert [tensor.name for tensor in response.outputs] == ["out", "more"]
    (response,) = ask(host, "odd", "more_outputs", requested_outputs=["more"])
    assert [tensor.name for tensor in response.outputs] == ["more"]


def test_model_is_told_what_it_is(host: ModelHost) -> None:
    (text,) = texts_of(host, "odd", "args_")
    directory = host.model("odd")._directory
    for part in (
        '"model_instance_kind": "CPU"',
        '"model_instance_name": "odd_0_0"',
        '"model_instance_device_id": "0"',
        f'"model_repository": "{directory}"',
        '"model_version": "1"',
        '"model_name": "odd"',
    ):
        assert part in text
    assert texts_of(host, "odd", "directory") == [f"{directory}/1"]


def test_log_of_a_model_is_the_servers(host: ModelHost, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "disconnect_watch.models"):
        ask(host, "odd", "log")
    assert [
        (record.levelname, record.getMessage())
        for record in caplog.records
        if "said so" in record.getMessage()
    ] == [(level, "odd_0_0: said so") for level in ("INFO", "WARNING", "ERROR", "DEBUG")]


def test_bfloat16_goes_there_and_back(host: ModelHost) -> None:
    words = np.array([0x3FC0, 0xC000], "<u2")  # 1.5 and -2.0
    request = InferRequest(inputs=[InferTensor("x", "BF16", (2,), words.tobytes())])
    (response,) = host.infer("bf16", request)
    assert response.error is None, response.error
    assert (response.outputs[0].datatype, response.outputs[0].shape) == ("BF16", (2,))
    assert response.outputs[0].to_numpy().tolist() == [0x4040, 0xC080]  # 3.0 and -4.0


@pytest.mark.parametrize("value", [1 << 64, -(1 << 63) - 1, "\ud800"])
def test_parameter_that_can_not_be_sent_is_refused(host: ModelHost, value: Any) -> None:
    with pytest.raises(InferError, match=r"\[request id: r\] the request can't be sent") as caught:
        ask(host, "odd", "ping", parameters={"a": value})
    assert caught.value.code is Code.INVALID_ARG


def test_envelope_that_is_too_long_for_a_packet_goes_through_the_memory(host: ModelHost) -> None:
    for _ in range(3):
        (response,) = ask(host, "odd", "ping", parameters={"a": "x" * 300_000})
        assert response.error is None


SHAPES = """
import numpy as np
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
            assert x.shape == (x.size // 4, 2, 2), x.shape
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", x[..., :1])]))
        return answers
"""


def test_a_model_sees_the_shapes_of_its_reshape(tmp_path: Path) -> None:
    write_model(
        tmp_path,
        "shapes",
        SHAPES,
        'max_batch_size: 2 input { name: "x" data_type: TYPE_FP32 dims: 4 reshape { shape: [2, 2] }'
        '} output { name: "y" data_type: TYPE_FP32 dims: 2 reshape { shape: [2, 1] } } '
        'model_warmup { name: "w" batch_size: 1 inputs { key: "x" value { data_type: TYPE_FP32 '
        "dims: 4 zero_data: true } } }",
    )
    with ModelHost(tmp_path) as host:
        given = np.arange(8, dtype=np.float32).reshape(2, 4)
        (response,) = host.infer("shapes", InferRequest("r", tensors(x=given)))
    assert response.error is None
    assert response.outputs[0].to_numpy().tolist() == [[0, 2], [4, 6]]
