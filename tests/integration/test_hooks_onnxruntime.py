"""Runs of ONNX Runtime that end before their next node."""

import threading

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, ValueInfoProto, helper
from onnxruntime.capi.onnxruntime_pybind11_state import Fail

from disconnect_watch import CancelToken, ClientDisconnected, Reason
from disconnect_watch.backends.hooks.onnxruntime import cancel_with
from tests.support.net import PATIENCE

FOR_EVER = 1 << 62


@pytest.fixture(scope="module")
def session() -> onnxruntime.InferenceSession:
    """Multiplies ``x`` [4, 4] by 1, ``n`` times: a loop whose body is one product."""

    def value(name: str, kind: int, shape: list[int]) -> ValueInfoProto:
        return helper.make_tensor_value_info(name, kind, shape)

    body = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "one"], ["y"]),
            helper.make_node("Identity", ["goes_on"], ["still_goes_on"]),
        ],
        "body",
        [
            value("step", TensorProto.INT64, []),
            value("goes_on", TensorProto.BOOL, []),
            value("x", TensorProto.FLOAT, [4, 4]),
        ],
        [value("still_goes_on", TensorProto.BOOL, []), value("y", TensorProto.FLOAT, [4, 4])],
    )
    graph = helper.make_graph(
        [helper.make_node("Loop", ["n", "", "x0"], ["result"], body=body)],
        "loop",
        [value("n", TensorProto.INT64, []), value("x0", TensorProto.FLOAT, [4, 4])],
        [value("result", TensorProto.FLOAT, [4, 4])],
        [
            helper.make_tensor(
                "one", TensorProto.FLOAT, [4, 4], np.eye(4, dtype=np.float32).tobytes(), raw=True
            )
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4  # a run that ends early is an error to it
    return onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def feeds(num_steps: int) -> dict[str, np.ndarray]:
    return {"n": np.array(num_steps), "x0": np.ones((4, 4), np.float32)}


def test_a_run_ends_when_its_client_has_left(session: onnxruntime.InferenceSession) -> None:
    token = CancelToken()
    begun = threading.Event()

    def leave() -> None:
        begun.wait(PATIENCE)
        token.cancel(Reason.FIN)

    thread = threading.Thread(target=leave)
    thread.start()
    try:
        with pytest.raises(ClientDisconnected) as raised, cancel_with(token) as options:
            begun.set()
            session.run(None, feeds(FOR_EVER), options)
    finally:
        begun.set()
        thread.join(PATIENCE)
    assert raised.value.reason is Reason.FIN
    assert "terminate" in str(raised.value.__context__)


def test_a_run_whose_client_stays_gives_what_it_did(session: onnxruntime.InferenceSession) -> None:
    token = CancelToken()
    with cancel_with(token) as options:
        (result,) = session.run(None, feeds(10), options)
    assert np.array_equal(result, np.ones((4, 4)))
    seen = threading.Event()
    token.add_callback(lambda _: seen.set())  # called behind ours, were it still there
    token.cancel()
    assert seen.wait(PATIENCE)
    assert not options.terminate


def test_no_run_is_begun_for_a_client_that_has_left(session: onnxruntime.InferenceSession) -> None:
    token = CancelToken()
    token.cancel()
    with pytest.raises(ClientDisconnected), cancel_with(token) as options:
        session.run(None, feeds(FOR_EVER), options)


def test_a_run_that_fails_by_itself_says_so_though_the_client_has_left() -> None:
    token = CancelToken()
    with pytest.raises(Fail, match="no memory"), cancel_with(token):
        token.cancel()
        raise Fail("no memory for the output of MatMul")


def test_a_run_that_somebody_else_ends_is_no_disconnect(
    session: onnxruntime.InferenceSession,
) -> None:
    with pytest.raises(Fail, match="terminate flag"), cancel_with(CancelToken()) as options:
        options.terminate = True
        session.run(None, feeds(FOR_EVER), options)


def test_options_of_the_users_own_are_used(session: onnxruntime.InferenceSession) -> None:
    own = onnxruntime.RunOptions()
    with cancel_with(CancelToken(), own) as options:
        assert options is own
