"""A client of the gateway that leaves: its gRPC call is cancelled, and nothing is left of it."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from tritonclient.grpc import service_pb2  # type: ignore[import-untyped]

from disconnect_watch import CancelToken, Reason
from disconnect_watch.backends.infer import Code, InferError, InferRequest, InferTensor
from disconnect_watch.backends.triton import Connecting, Endpoint, upstream
from disconnect_watch.server import ServeOptions
from disconnect_watch.testing import LeavingClient, Way
from tests.support.net import PATIENCE, until, wait_until
from tests.support.serve import Client, request_bytes
from tests.support.triton import Gateway, TritonProcess, serving_gateway, shared_triton


@pytest.fixture(scope="module", autouse=True)
def small() -> Iterator[TritonProcess]:
    with shared_triton() as process:
        yield process


@pytest.fixture
def gateway(small: TritonProcess) -> Iterator[Gateway]:
    with serving_gateway(small.port, serve=ServeOptions(grace=0.2)) as gateway:
        yield gateway


def infer_body(name: str) -> dict[str, Any]:
    tensor = {"name": "INPUT0", "datatype": "FP32", "shape": [1], "data": [0]}
    return {"id": name, "inputs": [tensor]}


#: Paths and bodies: of each action, with nothing sent so far and in the middle.
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "infer": ("waits/infer", infer_body("infer")),
    "generate": ("waits/generate", {"INPUT0": 0}),
    "generate_stream of one response": ("waits/generate_stream", {"INPUT0": 0}),
    "generate of any number": ("stream/generate", {"INPUT0": 0, "then": "wait"}),
    "generate_stream before its first chunk": (
        "stream/generate_stream",
        {"INPUT0": 0, "then": "wait"},
    ),
    "generate_stream between two chunks": (
        "stream/generate_stream",
        {"INPUT0": 2, "then": "wait"},
    ),
}


@pytest.mark.parametrize("way", [Way.FIN, Way.RST, Way.BEHIND_REQUEST])
@pytest.mark.parametrize("kind", REQUESTS)
def test_a_client_that_leaves_cancels_its_call(
    gateway: Gateway, small: TritonProcess, kind: str, way: Way
) -> None:
    action, body = REQUESTS[kind]
    name = f"{kind} {way}"
    request = request_bytes(f"/v2/models/{action}", {**body, "id": name})
    with LeavingClient(gateway.http) as client:
        client.send(request)
        wait_until(lambda: small.of("begin", id=name))
        client.leave(way, request=request)
        wait_until(lambda: small.of("cancelled", id=name))
        wait_until(gateway.is_idle)
    # What was sent behind it never began, and nothing was asked twice.
    assert len(small.of("begin", id=name)) == 1
    (upstream,) = gateway.remote.upstreams()
    assert upstream.outcomes == {"cancelled": 1}


def test_one_that_leaves_cancels_nobody_else(gateway: Gateway, small: TritonProcess) -> None:
    path = "/v2/models/stream/generate_stream"
    with Client(gateway.port) as stays, Client(gateway.port) as leaves:
        for client, name in ((stays, "stays"), (leaves, "leaves")):
            client.post(path, {"INPUT0": 1, "then": "wait", "id": name})
            client.read_until(b'"OUTPUT0":0')
        leaves.sock.close()
        wait_until(lambda: small.of("cancelled", id="leaves"))
        assert not small.of("cancelled", id="stays")
    wait_until(lambda: small.of("cancelled", id="stays"))


def test_who_is_cancelled_by_id_is_told(gateway: Gateway, small: TritonProcess) -> None:
    with Client(gateway.port) as client:
        client.post("/v2/models/waits/infer", infer_body("by id"))
        wait_until(lambda: small.of("begin", id="by id"))
        assert gateway.frontend.cancel_all(Reason.ABORTED) == 1
        status, headers, answer = client.read_response()
    assert status == 499
    assert "aborted" in json.loads(answer)["error"]
    assert headers["x-should-retry"] == "false"
    wait_until(lambda: small.of("cancelled", id="by id"))


def test_a_deadline_cancels_the_call(gateway: Gateway, small: TritonProcess) -> None:
    with Client(gateway.port) as client:
        client.post("/v2/models/waits/infer", infer_body("late"), X_Request_Timeout="0.3")
        status, _, _ = client.read_response()
    assert status == 504
    # One that was over before the Triton had it has not begun there.
    wait_until(lambda: len(small.of("begin", id="late")) == len(small.of("cancelled", id="late")))


def test_a_shutdown_cancels_what_outlives_its_grace(gateway: Gateway, small: TritonProcess) -> None:
    with Client(gateway.port) as client:
        client.post("/v2/models/waits/infer", infer_body("outlives"))
        wait_until(lambda: small.of("begin", id="outlives"))
        gateway.http.server.should_exit = True
        status, _, answer = client.read_response()
        assert status == 503
        assert "shutting down" in json.loads(answer)["error"]
    wait_until(lambda: small.of("cancelled", id="outlives"))


def request_of(token: CancelToken, name: str) -> InferRequest:
    return InferRequest(
        id=name, inputs=[InferTensor("INPUT0", "FP32", (1,), bytes(4))], cancel=token
    )


# These run on the gateway's loop: an event that gRPC has for a loop which is closed is reported
# by whichever loop comes next (1.85).


def test_a_triton_that_is_being_asked_is_let_go_of_at_once(
    gateway: Gateway, small: TritonProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its end was not told while the call was there, and by then the loop was closed."""
    monkeypatch.setattr(upstream, "LAST_EVENT_WITHIN", PATIENCE / 2)

    async def main() -> None:
        other = upstream.Upstream(Endpoint("127.0.0.1", small.port), Connecting())
        await other.wait_probed()
        asking = asyncio.create_task(other.ask("ServerReady", service_pb2.ServerReadyRequest()))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await other.close()
        assert not other._following.cancelled()

    gateway.on_loop(main())


def test_a_token_ends_the_call_whatever_thread_it_is_set_from(
    gateway: Gateway, small: TritonProcess
) -> None:
    async def main() -> None:
        token = CancelToken()
        await gateway.remote.refresh("inference", "waits", None)
        model = gateway.remote.find("waits")

        async def ask() -> None:
            async for _ in model.infer(request_of(token, "token")):
                raise AssertionError

        asking = asyncio.create_task(ask())
        await until(lambda: small.of("begin", id="token"))
        await asyncio.get_running_loop().run_in_executor(None, token.cancel)
        with pytest.raises(InferError) as caught:
            await asking
        assert caught.value.code is Code.CANCELLED
        await until(lambda: small.of("cancelled", id="token"))
        # One that is set already is not sent at all.
        with pytest.raises(InferError, match="cancelled"):
            await anext(model.infer(request_of(token, "never")))
        assert gateway.remote.upstreams()[0].outcomes == {"cancelled": 1}

    gateway.on_loop(main())


def test_who_stops_reading_a_stream_cancels_it(gateway: Gateway, small: TritonProcess) -> None:
    async def main() -> None:
        await gateway.remote.refresh("inference", "stream", None)
        request = request_of(CancelToken(), "closed")
        request.inputs = [InferTensor("INPUT0", "INT32", (1,), (1).to_bytes(4, "little"))]
        request.parameters = {"then": "wait"}
        responses = gateway.remote.find("stream").infer(request)
        assert (await anext(responses)).outputs
        await responses.aclose()
        await until(lambda: small.of("cancelled", id="closed"))

    gateway.on_loop(main())


def test_a_task_that_is_cancelled_cancels_its_call_and_stays_cancelled(
    gateway: Gateway, small: TritonProcess
) -> None:
    async def main() -> None:
        await gateway.remote.refresh("inference", "waits", None)
        token = CancelToken()
        responses = gateway.remote.find("waits").infer(request_of(token, "task"))
        asking = asyncio.ensure_future(anext(responses))
        await until(lambda: small.of("begin", id="task"))
        asking.cancel()
        token.cancel()  # which is no excuse for another error
        with suppress(asyncio.CancelledError):
            await asking
        assert asking.cancelled()
        await until(lambda: small.of("cancelled", id="task"))

    gateway.on_loop(main())
