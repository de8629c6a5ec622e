"""How Tritons are named, and which headers go along with a call."""

import asyncio
from collections.abc import Generator
from typing import Any

import pytest
from tritonclient.grpc import service_pb2  # type: ignore[import-untyped]

from disconnect_watch import CancelToken
from disconnect_watch.backends.infer import Code, InferError, InferRequest, InferTensor
from disconnect_watch.backends.triton import (
    Connecting,
    Endpoint,
    HeaderPassing,
    parse_endpoints,
)
from disconnect_watch.backends.triton.fleet import Fleet
from disconnect_watch.backends.triton.messages import message_of, response_of
from disconnect_watch.backends.triton.upstream import Upstream
from tests.support.net import PATIENCE, until


def test_endpoints_are_read_in_every_way_to_write_them() -> None:
    assert parse_endpoints(["grpc://a:1, grpcs://b", "grpc://[::1]:3"]) == [
        Endpoint("a", 1),
        Endpoint("b", 8001, is_secure=True),
        Endpoint("::1", 3),
    ]
    assert [str(each) for each in parse_endpoints(["grpc://[::1]", "grpcs://b"])] == [
        "grpc://[::1]:8001",
        "grpcs://b:8001",
    ]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a:8001",
        "http://a",
        "grpc://",
        "grpc://a/path",
        "grpc://u:p@a",
        "grpc://a:99999",
        "grpc:a",
    ],
)
def test_what_is_no_endpoint_is_refused_by_its_name(text: str) -> None:
    with pytest.raises(ValueError, match="as the address of a Triton") as caught:
        parse_endpoints([text])
    assert repr(text) in str(caught.value)


def test_no_endpoint_and_one_twice_are_refused() -> None:
    with pytest.raises(ValueError, match="no Triton is named"):
        parse_endpoints([])
    with pytest.raises(ValueError, match="named twice"):
        parse_endpoints(["grpc://a", "grpc://a:8001"])


def test_headers_pass_if_they_are_named_and_can() -> None:
    headers = [
        (b"traceparent", b"00-1"),
        (b"tracestate", b""),
        (b"cookie", b"private"),
        (b"x-bytes-bin", b"AA"),
        (b"x-odd", b"caf\xe9"),
        (b"x-line", b"a\tb"),
        (b"grpc-timeout", b"1n"),
        (b"content-length", b"7"),
        (b"x-kept", b"yes"),
    ]
    fixed = (("key", "secret"),)
    assert HeaderPassing().metadata(headers) == (("traceparent", "00-1"), ("tracestate", ""))
    # A name is matched whole.
    assert HeaderPassing(fixed, "x").metadata(headers) == fixed
    assert HeaderPassing(fixed, ".*").metadata(headers) == (
        *fixed,
        ("traceparent", "00-1"),
        ("tracestate", ""),
        ("cookie", "private"),
        ("x-kept", "yes"),
    )


@pytest.mark.parametrize("name", ["a b", "grpc-timeout", "x-bin", "host", ""])
def test_what_can_not_be_metadata_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="can't go with a gRPC call"):
        HeaderPassing([(name, "x")])


def test_numbers_beyond_64_signed_bits_are_sent_unsigned() -> None:
    request = InferRequest(sequence_id=(1 << 64) - 1, timeout_us=1 << 40)
    parameters = message_of(request, "m", "").parameters
    assert parameters["sequence_id"].uint64_param == (1 << 64) - 1
    assert parameters["timeout"].int64_param == 1 << 40


def test_a_view_of_a_body_is_sent_as_its_bytes() -> None:
    data = memoryview(b"..abcd..")[2:6]
    request = InferRequest(inputs=[InferTensor("x", "FP32", (1,), data)])
    message = service_pb2.ModelInferRequest.FromString(
        message_of(request, "m", "3").SerializeToString()
    )
    assert message.raw_input_contents == [b"abcd"]
    assert (message.model_name, message.model_version) == ("m", "3")


class Call:
    """A call that is told to end."""

    is_done = False

    def _cancel(self, details: str) -> None:
        self.is_done = True

    def done(self) -> bool:
        return self.is_done


def test_a_token_that_fired_just_before_its_call_was_known_cancels_it() -> None:
    async def main() -> None:
        fleet = Fleet([])
        upstream = Upstream(Endpoint("127.0.0.1", 1), Connecting())
        token, call = CancelToken(), Call()
        token.cancel()
        with fleet.running(upstream, call, token):
            assert call.is_done
            assert upstream.num_outstanding == 1
        assert upstream.num_outstanding == 0
        await fleet.close()
        await upstream.close()

    asyncio.run(main())


def test_an_ask_that_is_cancelled_ends_behind_the_last_event_of_its_call() -> None:
    """One that ended before left its call, and so its connection, to a loop that was closed."""

    class Asked(Call):
        def __init__(self) -> None:
            self.has_begun, self.last_event = False, asyncio.Event()

        def __await__(self) -> Generator[Any, Any, bool]:
            self.has_begun = True
            return self.last_event.wait().__await__()

    async def main() -> None:
        upstream = Upstream(Endpoint("127.0.0.1", 1), Connecting())
        call = Asked()
        upstream.stub.ServerReady = lambda *_, **__: call
        asking = asyncio.create_task(upstream.ask("ServerReady", None))
        await until(lambda: call.has_begun)
        asking.cancel()
        await until(lambda: call.is_done or asking.done())
        # What is to be done without the event is done.
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not asking.done()
        call.last_event.set()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await upstream.close()

    asyncio.run(main())


def test_an_upstream_that_is_closed_as_a_probe_is_due_is_closed() -> None:
    # Symptom: a gateway that did not end, where the state of a channel changed at that moment.
    async def main() -> None:
        upstream = Upstream(Endpoint("127.0.0.1", 1), Connecting(probe_seconds=1e6))
        await until(lambda: upstream._is_due._waiters)
        upstream._is_due.set()
        async with asyncio.timeout(PATIENCE):
            await upstream.close()

    asyncio.run(main())


def test_a_response_without_raw_contents_is_an_error() -> None:
    message = service_pb2.ModelInferResponse(model_name="m")
    message.outputs.add(name="x", datatype="FP32", shape=[1])
    with pytest.raises(InferError, match="must be as many") as caught:
        response_of(message, InferRequest())
    assert caught.value.code is Code.INTERNAL


def test_the_parameters_of_a_response_are_passed_on_but_for_the_final_mark() -> None:
    message = service_pb2.ModelInferResponse(model_name="m")
    message.parameters["triton_final_response"].bool_param = True
    message.parameters["x"].double_param = 0.5
    response = response_of(message, InferRequest())
    assert response.parameters == {"x": 0.5}
    assert response.is_final
