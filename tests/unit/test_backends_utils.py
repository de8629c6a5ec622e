"""What models import as ``triton_python_backend_utils``, outside of a worker."""

import json
import threading
from typing import Any

import numpy as np
import pytest
import torch

from disconnect_watch.backends.infer import Code, InferTensor
from disconnect_watch.backends.python_model.worker import utils as pb_utils
from disconnect_watch.backends.python_model.worker.auto_config import ModelConfig
from disconnect_watch.backends.python_model.worker.responses import InferenceResponseSender


def test_names_that_models_use_are_there() -> None:
    for name in pb_utils.__all__:
        assert hasattr(pb_utils, name), name
    # A model of the captured answers tells of this one by its absence.
    assert not hasattr(pb_utils.InferenceRequest, "priority")


def test_codes_of_errors_are_tritons() -> None:
    error = pb_utils.TritonError
    assert [error.UNKNOWN, error.INTERNAL, error.NOT_FOUND, error.INVALID_ARG] == [0, 1, 2, 3]
    assert [error.UNAVAILABLE, error.UNSUPPORTED, error.ALREADY_EXISTS] == [4, 5, 6]
    assert error.CANCELLED == 7
    made = error("no", error.CANCELLED)
    assert (made.message(), made.code(), made.to_infer_error().code) == ("no", 7, Code.CANCELLED)
    assert error("no").code() == error.INTERNAL
    with pytest.raises(pb_utils.TritonModelException, match="no error code 8"):
        error("no", 8)


@pytest.mark.parametrize(
    ("number", "name", "kind"),
    [(1, "TYPE_BOOL", np.bool_), (11, "TYPE_FP32", np.float32), (13, "TYPE_STRING", np.object_)],
)
def test_datatypes_are_found_by_number_name_and_numpy_type(
    number: int, name: str, kind: Any
) -> None:
    assert pb_utils.triton_to_numpy_type(number) is kind
    assert pb_utils.triton_string_to_numpy(name) is kind
    assert pb_utils.numpy_to_triton_type(kind) == number
    array = np.zeros(1, kind)
    assert pb_utils.Tensor("x", array).triton_dtype() == number


def test_tensor_shares_its_array_with_torch() -> None:
    array = np.arange(4, dtype=np.float32)
    tensor = pb_utils.Tensor("x", array)
    shared = torch.utils.dlpack.from_dlpack(tensor.to_dlpack())
    shared[0] = 7
    assert array[0] == 7
    other = pb_utils.Tensor.from_dlpack("y", torch.ones(2, 2, requires_grad=True))
    assert (other.name(), other.shape(), other.as_numpy().tolist()) == (
        "y",
        [2, 2],
        [[1, 1], [1, 1]],
    )
    capsule = pb_utils.Tensor.from_dlpack("z", torch.arange(3).__dlpack__())
    assert capsule.as_numpy().tolist() == [0, 1, 2]
    assert torch.utils.dlpack.from_dlpack(tensor)[0] == 7
    assert tensor.is_cpu()


def test_bfloat16_goes_through_dlpack_alone() -> None:
    values = torch.tensor([[1.5, -2.0]], dtype=torch.bfloat16)
    tensor = pb_utils.Tensor.from_dlpack("x", values)
    wire = tensor.to_wire()
    assert (wire.datatype, wire.shape, len(wire.data)) == ("BF16", (1, 2), 4)
    assert torch.utils.dlpack.from_dlpack(pb_utils.Tensor.of_wire(wire)).tolist() == [[1.5, -2.0]]
    with pytest.raises(pb_utils.TritonModelException, match="use to_dlpack"):
        tensor.as_numpy()


def test_text_goes_through_numpy_alone() -> None:
    tensor = pb_utils.Tensor("x", np.array([b"a"], object))
    with pytest.raises(pb_utils.TritonModelException, match="use as_numpy"):
        tensor.to_dlpack()


@pytest.mark.parametrize("value", [[1, 2], "x", None])
def test_tensor_is_made_of_an_array(value: Any) -> None:
    with pytest.raises(pb_utils.TritonModelException, match="must be made of a numpy array"):
        pb_utils.Tensor("x", value)


def test_array_that_no_datatype_fits_is_refused_when_it_is_sent() -> None:
    with pytest.raises(pb_utils.TritonModelException, match=r"tensor 'x': .*complex64"):
        pb_utils.Tensor("x", np.zeros(1, np.complex64)).to_wire()


def test_strings_are_serialized_as_on_the_wire() -> None:
    encoded = pb_utils.serialize_byte_tensor(np.array([b"ab", b""], object))
    assert encoded is not None
    assert encoded.item() == b"\2\0\0\0ab\0\0\0\0"
    assert pb_utils.deserialize_bytes_tensor(encoded.item()).tolist() == [b"ab", b""]
    assert pb_utils.serialize_byte_tensor(np.array([], object)) is None


def test_configuration_is_looked_up_by_name() -> None:
    config = {"input": [{"name": "a", "dims": [1]}], "output": []}
    assert pb_utils.get_input_config_by_name(config, "a") == {"name": "a", "dims": [1]}
    assert pb_utils.get_output_config_by_name(config, "a") is None
    assert not pb_utils.using_decoupled_model_transaction_policy(config)
    decoupled = {"model_transaction_policy": {"decoupled": True}}
    assert pb_utils.using_decoupled_model_transaction_policy(decoupled)


def test_response_is_made_of_tensors_or_an_error() -> None:
    tensor = pb_utils.Tensor("x", np.zeros(1, np.int32))
    response = pb_utils.InferenceResponse([tensor], parameters={"a": 1})
    assert pb_utils.get_output_tensor_by_name(response, "x") is tensor
    assert pb_utils.get_output_tensor_by_name(response, "y") is None
    assert (response.has_error(), response.error(), response.parameters()) == (
        False,
        None,
        {"a": 1},
    )
    failed = pb_utils.InferenceResponse([], error=ValueError("no"))
    error = failed.error()
    assert error is not None
    assert (failed.has_error(), error.message()) == (True, "no")
    with pytest.raises(pb_utils.TritonModelException, match="it must be a Tensor"):
        pb_utils.InferenceResponse([np.zeros(1)])  # type: ignore[list-item]


def test_request_to_another_model_says_what_it_was_given() -> None:
    tensor = pb_utils.Tensor("x", np.zeros(1, np.int32))
    request = pb_utils.InferenceRequest(
        model_name="m",
        inputs=[tensor],
        requested_output_names=["y"],
        request_id="r",
        correlation_id=3,
        flags=pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START,
        timeout=5,
        parameters={"a": 1, "b": "ä"},
        preferred_memory=pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_GPU, 1),
    )
    assert pb_utils.get_input_tensor_by_name(request, "x") is tensor
    assert pb_utils.get_input_tensor_by_name(request, "z") is None
    assert json.loads(request.parameters()) == {"a": 1, "b": "ä"}
    assert (request.request_id(), request.correlation_id(), request.model_name()) == ("r", 3, "m")
    assert (request.model_version(), request.timeout(), request.flags()) == (-1, 5, 1)
    assert request.requested_output_names() == ["y"]
    request.set_flags(2)
    assert (request.flags(), request.is_cancelled()) == (2, False)
    with pytest.raises(pb_utils.TritonModelException, match="from a worker process only"):
        request.exec()
    with pytest.raises(pb_utils.TritonModelException, match="has a response sender"):
        request.get_response_sender()
    with pytest.raises(pb_utils.TritonModelException, match="names no model to ask"):
        pb_utils.InferenceRequest().exec()
    with pytest.raises(pb_utils.TritonModelException, match="parameter 'p' is"):
        pb_utils.InferenceRequest(parameters={"p": [1]})  # type: ignore[dict-item]


def sender(sent: list[Any], *, is_decoupled: bool = True) -> InferenceResponseSender:
    return InferenceResponseSender(
        lambda response, is_final: sent.append((response, is_final)),
        lambda: False,
        is_decoupled=is_decoupled,
    )


def test_sender_sends_until_its_last_response() -> None:
    sent: list[Any] = []
    one = sender(sent)
    response = pb_utils.InferenceResponse([])
    final = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
    one.send(response)
    one.send(flags=final)
    assert sent == [(response, False), (None, True)]
    with pytest.raises(pb_utils.TritonModelException, match="sender has been closed"):
        one.send(response)


@pytest.mark.parametrize(
    ("response", "flags", "message"),
    [
        (None, 0, "must be provided when the response flags is not set"),
        (None, 4, "Unsupported flag"),
        ("text", 0, "a response is str"),
    ],
)
def test_sender_refuses_what_is_no_response(response: Any, flags: int, message: str) -> None:
    sent: list[Any] = []
    one = sender(sent)
    with pytest.raises(pb_utils.TritonModelException, match=message):
        one.send(response, flags)
    assert sent == []
    one.finish()


def test_sender_of_a_model_with_one_response_sends_one() -> None:
    sent: list[Any] = []
    one = sender(sent, is_decoupled=False)
    one.send(pb_utils.InferenceResponse([]))
    with pytest.raises(pb_utils.TritonModelException, match="cannot send more than one"):
        one.send(pb_utils.InferenceResponse([]), flags=1)
    assert len(sent) == 1


def test_threads_that_share_a_sender_send_one_last_response() -> None:
    sent: list[Any] = []
    one = sender(sent)
    refused: list[Exception] = []

    def end() -> None:
        try:
            one.send(flags=1)
        except pb_utils.TritonModelException as error:
            refused.append(error)

    threads = [threading.Thread(target=end) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(sent), len(refused)) == (1, 7)


@pytest.mark.parametrize(
    ("config", "call", "message"),
    [
        ({"max_batch_size": 8}, lambda c: c.set_max_batch_size(4), "specified max_batch_size 8"),
        ({"sequence_batching": {}}, lambda c: c.set_dynamic_batching(), "sequence_batching"),
        ({}, lambda c: c.set_model_transaction_policy({"x": 1}), "other than 'decoupled'"),
        (
            {"model_transaction_policy": {"decoupled": False}},
            lambda c: c.set_model_transaction_policy({"decoupled": True}),
            "has the transaction policy",
        ),
        ({}, lambda c: c.add_input({"name": "x", "dims": [1]}), "is missing 'data_type'"),
        (
            {},
            lambda c: c.add_output({"name": "x", "dims": [1], "data_type": "T", "optional": True}),
            r"not known: \['optional'\]",
        ),
    ],
)
def test_configuration_is_not_completed_with_what_contradicts_it(
    config: dict[str, Any], call: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        call(ModelConfig(json.dumps({"name": "m", **config})))


def test_configuration_keeps_what_it_says_and_gets_what_it_lacks() -> None:
    given = {"name": "x", "data_type": "TYPE_FP32", "dims": ["4"]}
    config = ModelConfig(json.dumps({"max_batch_size": 4, "input": [given]}))
    config.add_input({"name": "x", "data_type": "TYPE_FP32", "dims": [4], "optional": True})
    config.add_input({"name": "y", "data_type": "TYPE_FP32", "dims": [1]})
    config.set_max_batch_size(8)
    config.set_model_transaction_policy({"decoupled": True})
    document = config.as_dict()
    assert [tensor["name"] for tensor in document["input"]] == ["x", "y"]
    assert document["input"][0]["optional"]
    assert document["max_batch_size"] == 8


def test_wire_tensor_is_sent_on_as_it_came() -> None:
    wire = InferTensor("x", "FP32", (2,), memoryview(bytes(8)))
    assert pb_utils.Tensor.of_wire(wire).to_wire() is wire
    assert pb_utils.Tensor.of_wire(wire).renamed("y").to_wire().data is wire.data
