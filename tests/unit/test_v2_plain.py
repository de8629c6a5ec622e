"""The short way through plain requests and answers comes to what the long way comes to."""

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from disconnect_watch import CancelToken
from disconnect_watch.backends.infer import InferError, InferRequest, InferResponse, InferTensor
from disconnect_watch.backends.model_config import complete, from_document
from disconnect_watch.backends.validate import Validator
from disconnect_watch.errors import DisconnectWatchError
from disconnect_watch.server.v2 import parse, render
from disconnect_watch.server.v2.parse import ParsedInfer, parse_infer
from disconnect_watch.server.v2.render import render_infer
from disconnect_watch.server.v2.shared_memory import SharedMemory
from tests.support.function_models import identity

MODEL = identity()
FLOAT_TYPES = ("FP32", "FP64")
INTEGER_TYPES = ("INT32", "INT64")

integers = st.one_of(
    st.integers(-3, 3), st.integers(-(1 << 63), (1 << 63) - 1), st.integers(-(1 << 70), 1 << 70)
)
numbers = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False), integers, st.sampled_from([1e39, -1e39, True])
)
odd: st.SearchStrategy[Any] = st.sampled_from(
    [None, "1", [], {}, True, 1.5, -1, 1 << 64, [[1, 2]], 0]
)
tensors = st.fixed_dictionaries(
    {
        "name": st.one_of(st.sampled_from(["INPUT0", "X"]), odd),
        "datatype": st.one_of(
            st.sampled_from([*FLOAT_TYPES, *INTEGER_TYPES, "INT8", "BOOL", "BYTES", "FP16"]), odd
        ),
        "shape": st.one_of(
            st.sampled_from([[2], [1, 2], [2, 1], [], [0], [3], [1 << 62, 4]]),
            st.lists(odd, max_size=2),
            odd,
        ),
        "data": st.one_of(
            st.lists(numbers, min_size=2, max_size=2),
            st.lists(integers, min_size=2, max_size=2),
            st.lists(odd, max_size=3),
            odd,
        ),
    },
    optional={"parameters": st.sampled_from([{}, {"binary_data_size": 8}])},
)
documents = st.fixed_dictionaries(
    {"inputs": st.one_of(st.lists(tensors, max_size=2), odd)},
    optional={
        "id": st.one_of(st.just("a"), odd),
        "outputs": st.sampled_from([[], [{"name": "OUTPUT0"}]]),
        "unknown": odd,
    },
)


def no_short_way(_: object) -> None:
    return None


def outcome(of: Callable[[], Any]) -> Any:
    try:
        return of()
    except DisconnectWatchError as error:
        return type(error), str(error)


def parsed(document: Any) -> Any:
    token = CancelToken()

    def of() -> tuple[Any, ...]:
        memory = SharedMemory(is_allowed=False)
        body = json.dumps(document).encode()
        found = parse_infer(body, len(body), MODEL, memory=memory, cancel=token)
        assert found.request.cancel is token
        given = [(t.name, t.datatype, t.shape, bytes(t.data)) for t in found.request.inputs]
        return found.request.id, given, found.wanted, found.is_binary

    return outcome(of)


def floats(shape: list[int], *data: float) -> dict[str, Any]:
    return {"name": "INPUT0", "datatype": "FP32", "shape": shape, "data": data}


@given(documents)
@example({"inputs": [floats([1], 1.5, 2.5)]})
@example({"inputs": [floats([2], 1.5)]})
@example({"inputs": [floats([1], 1e39)]})
@example({"inputs": [floats([1], 1.5)], "outputs": [{"name": "OUTPUT0"}]})
def test_a_request_is_understood_alike_on_both_ways(document: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        shortly = parsed(document)
        patch.setattr(parse, "plain_inputs", no_short_way)
        assert shortly == parsed(document)


@pytest.mark.parametrize("datatype", [*FLOAT_TYPES, *INTEGER_TYPES])
def test_a_plain_request_goes_the_short_way(datatype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the long way")

    monkeypatch.setattr(parse, "_input", refuse)
    tensor = {"name": "X", "datatype": datatype, "shape": [1, 2], "data": [1, -2]}
    expected = np.array([1, -2], dict(FP32="<f4", FP64="<f8", INT32="<i4", INT64="<i8")[datatype])
    _, ((*_, data),), _, _ = parsed({"id": "a", "inputs": [tensor]})
    assert data == expected.tobytes()


def rendered(response: InferResponse, *, strict: bool) -> Any:
    def of() -> bytes:
        (body,) = render_infer(ParsedInfer(InferRequest()), response, MODEL, strict=strict).pieces
        return bytes(body)

    return outcome(of)


arrays = st.one_of(
    st.lists(st.floats(width=32), max_size=3).map(lambda values: np.array(values, np.float32)),
    st.lists(st.floats(), max_size=3).map(lambda values: np.array([values], np.float64)),
    st.lists(st.integers(-(1 << 31), (1 << 31) - 1), max_size=3).map(
        lambda values: np.array(values, np.int32)
    ),
    st.lists(st.integers(-(1 << 63), (1 << 63) - 1), max_size=3).map(
        lambda values: np.array([[value] for value in values], np.int64).reshape(-1, 1)
    ),
    st.lists(st.booleans(), max_size=3).map(lambda values: np.array(values, np.bool_)),
    st.lists(st.binary(max_size=3), max_size=2).map(lambda values: np.array(values, object)),
)


@given(
    st.lists(arrays, max_size=2),
    st.sampled_from(["", "an id", 'a "quote"']),
    st.sampled_from([{}, {"a": 1}]),
    st.booleans(),
)
@example([np.array([math.nan], np.float32)], "", {}, True)
@example([np.array([math.inf])], "", {}, True)
def test_an_answer_is_written_alike_on_both_ways(
    outputs: "list[np.ndarray[Any, Any]]", name: str, parameters: dict[str, Any], strict: bool
) -> None:
    given_ = [InferTensor.from_numpy(f"Y{at}", array) for at, array in enumerate(outputs)]
    response = InferResponse("m", "1", name, parameters, given_)
    with pytest.MonkeyPatch.context() as patch:
        shortly = rendered(response, strict=strict)
        patch.setattr(render, "plain_document", no_short_way)
        assert shortly == rendered(response, strict=strict)


def test_an_output_that_is_not_what_it_says_is_told_of() -> None:
    response = InferResponse("m", "1", outputs=[InferTensor("Y", "FP32", (3,), bytes(8))])
    with pytest.raises(InferError, match="is not what its 8 bytes are"):
        render_infer(ParsedInfer(InferRequest()), response, MODEL)


def test_numbers_may_lie_at_any_address() -> None:
    values = np.array([1.5, math.pi], np.float64)
    view = memoryview(b"?" + values.tobytes())[1:]
    response = InferResponse("m", "1", outputs=[InferTensor("Y", "FP64", (2,), view)])
    (body,) = render_infer(ParsedInfer(InferRequest()), response, MODEL).pieces
    assert json.loads(bytes(body))["outputs"][0]["data"] == values.tolist()


def validator_of(max_batch_size: int, *inputs: tuple[str, list[int]]) -> Validator:
    config = from_document(
        {
            "max_batch_size": max_batch_size,
            "input": [
                {"name": name, "data_type": "TYPE_INT32", "dims": dims} for name, dims in inputs
            ],
            "output": [{"name": "OUTPUT0", "data_type": "TYPE_INT32", "dims": [-1]}],
        }
    )
    complete(config, "m")
    return Validator(config)


def long_check(validator: Validator, request: InferRequest) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(validator, "_plain", NoShortWay())
        return validator.check(request)


class NoShortWay:
    def batch_size(self, request: InferRequest) -> int:
        return 0


shapes = st.lists(st.sampled_from([0, 1, 2, 3, 9, 1 << 40]), max_size=3).map(tuple)
given_tensors = st.builds(
    lambda name, datatype, shape, missing: InferTensor(
        name, datatype, shape, bytes(max(0, min(400, 4 * math.prod(shape)) - missing))
    ),
    st.sampled_from(["INPUT0", "INPUT1", "INPUT1", "Z"]),
    st.sampled_from(["INT32", "INT32", "INT32", "FP32"]),
    shapes,
    st.sampled_from([0, 0, 0, 1]),
)


@given(
    st.sampled_from([0, 8]),
    st.lists(given_tensors, max_size=3),
    st.lists(st.sampled_from(["OUTPUT0", "Z"]), max_size=1),
)
@example(0, [InferTensor("INPUT0", "INT32", (1,), bytes(4))] * 2, [])
@example(8, [InferTensor("INPUT0", "INT32", (1, 1), bytes(4))] * 2, [])
def test_a_request_is_checked_alike_on_both_ways(
    max_batch_size: int, inputs: list[InferTensor], outputs: list[str]
) -> None:
    validator = validator_of(max_batch_size, ("INPUT0", [-1]), ("INPUT1", [2, -1]))
    request = InferRequest(inputs=inputs, requested_outputs=outputs)
    shortly = outcome(lambda: validator.check(request))
    assert shortly == outcome(lambda: long_check(validator, request))


@pytest.mark.parametrize("max_batch_size", [0, 8])
def test_what_fits_is_not_looked_at_twice(
    max_batch_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the long way")

    monkeypatch.setattr(Validator, "_check", refuse)
    validator = validator_of(max_batch_size, ("INPUT0", [-1]))
    shape = (3, 2) if max_batch_size else (2,)
    request = InferRequest(
        inputs=[InferTensor("INPUT0", "INT32", shape, bytes(4 * math.prod(shape)))]
    )
    assert validator.check(request) == (3 if max_batch_size else 1)
