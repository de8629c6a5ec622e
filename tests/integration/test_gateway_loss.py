"""Tritons that are away, go away and come back, and which of several gets a request."""

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from disconnect_watch.backends.infer import InferRequest, InferTensor
from tests.support.net import held_port, until, wait_until
from tests.support.serve import Client
from tests.support.triton import Gateway, TritonProcess, serving_gateway, shared_triton, triton


@pytest.fixture(scope="module", autouse=True)
def small() -> Iterator[TritonProcess]:
    with shared_triton() as process:
        yield process


def body_of(name: str, **parameters: Any) -> dict[str, Any]:
    tensor = {"name": "INPUT0", "datatype": "FP32", "shape": [1], "data": [0]}
    return {"id": name, "inputs": [tensor], "parameters": parameters}


def infer(gateway: Gateway, model: str, name: str = "", **parameters: Any) -> httpx.Response:
    url = f"http://127.0.0.1:{gateway.port}/v2/models/{model}/infer"
    return httpx.post(url, json=body_of(name, **parameters), timeout=40)


def num_begun(one: TritonProcess, other: TritonProcess, name: str) -> int:
    return len(one.of("begin", id=name)) + len(other.of("begin", id=name))


def is_ready(gateway: Gateway) -> bool:
    url = f"http://127.0.0.1:{gateway.port}/v2/health/ready"
    return httpx.get(url).status_code == 200


def test_a_triton_that_is_not_there_is_said_not_to_be_and_found_when_it_is() -> None:
    with held_port() as port, serving_gateway(port, ready=0) as gateway:
        assert not is_ready(gateway)
        answer = infer(gateway, "identity")
        assert answer.status_code == 503
        assert f"no Triton can be reached, of grpc://127.0.0.1:{port}" in answer.json()["error"]
        for path in ("/v2", "/v2/models/identity", "/v2/logging", "/v2/models/stats"):
            assert httpx.get(f"http://127.0.0.1:{gateway.port}{path}").status_code == 503
        with triton(str(port)):
            wait_until(lambda: is_ready(gateway))
            assert infer(gateway, "identity").status_code == 200


def test_a_request_whose_triton_dies_is_told_and_not_sent_again() -> None:
    with (
        triton() as dying,
        triton() as other,
        serving_gateway(dying.port, other.port) as gateway,
        Client(gateway.port) as client,
        Client(gateway.port) as streaming,
    ):
        client.post("/v2/models/waits/infer", body_of("dies"))
        wait_until(lambda: dying.of("begin", id="dies") or other.of("begin", id="dies"))
        victim, survivor = (dying, other) if dying.of("begin") else (other, dying)
        # The one with the fewest, which is now the survivor, and then either.
        streaming.post(
            "/v2/models/stream/generate_stream", {"INPUT0": 1, "then": "wait", "id": "s"}
        )
        assert b'"OUTPUT0":0' in streaming.read_until(b"\n\n")
        survivor.wait_for("begin", id="s")
        victim.kill()
        status, _, answer = client.read_response()
        assert status == 503
        assert "was lost during the request" in json.loads(answer)["error"]
        assert not survivor.of("begin", id="dies")
        # All that comes now goes to the other, and the gateway stays ready.
        for number in range(3):
            assert infer(gateway, "identity", f"after {number}").status_code == 200
        assert is_ready(gateway)
        survivor.kill()
        assert b"was lost during the request" in streaming.read_until(b"\n\n")
        wait_until(lambda: not is_ready(gateway))


def test_a_triton_that_comes_back_is_asked_again() -> None:
    with held_port() as port, triton(str(port)) as first, serving_gateway(port) as gateway:
        assert infer(gateway, "identity").status_code == 200
        first.kill()
        assert infer(gateway, "identity").status_code == 503
        with triton(str(port)):
            wait_until(lambda: infer(gateway, "identity").status_code == 200)


def test_what_could_not_be_sent_goes_to_another(small: TritonProcess) -> None:
    with triton() as dying, serving_gateway(dying.port, small.port) as gateway:

        async def main() -> None:
            remote = gateway.remote
            await remote.refresh("inference", "identity", None)
            gone, there = remote._fleet.upstreams
            dying.kill()
            await until(lambda: not gone.is_connected)
            # As if the news had not come yet; and it is the one with the fewest.
            gone.is_connected = True
            there.num_outstanding += 1
            tensor = InferTensor("INPUT0", "FP32", (1,), bytes(4))
            request = InferRequest(id="elsewhere", inputs=[tensor])
            (response,) = [each async for each in remote.find("identity").infer(request)]
            there.num_outstanding -= 1
            assert response.error is None
            assert not gone.is_connected
            assert gone.outcomes == {}

        gateway.on_loop(main())
        small.wait_for("begin", id="elsewhere")


def test_each_request_goes_to_the_one_with_the_fewest(small: TritonProcess) -> None:
    with (
        triton() as other,
        serving_gateway(small.port, other.port) as gateway,
        contextlib.ExitStack() as clients,
    ):

        def outstanding() -> list[int]:
            return [one.num_outstanding for one in gateway.remote.upstreams()]

        def ask(number: int) -> Client:
            client = clients.enter_context(Client(gateway.port))
            client.post("/v2/models/waits/infer", body_of(f"spread {number}"))
            wait_until(lambda: num_begun(small, other, f"spread {number}"))
            return client

        first = [ask(number) for number in range(6)]
        assert outstanding() == [3, 3]
        for number, client in enumerate(first):
            if small.of("begin", id=f"spread {number}"):
                client.sock.close()
        wait_until(lambda: outstanding() == [0, 3])
        for number in range(6, 9):
            ask(number)
        assert outstanding() == [3, 3]


def test_a_model_that_not_all_have_is_asked_where_it_is(small: TritonProcess) -> None:
    with (
        triton("--absent", "identity") as lacking,
        serving_gateway(lacking.port, small.port) as gateway,
    ):
        for _ in range(4):
            assert infer(gateway, "identity").status_code == 200
        assert not lacking.of("begin")


def test_a_sequence_stays_where_it_began(small: TritonProcess) -> None:
    with triton() as other, serving_gateway(small.port, other.port) as gateway:
        for sequence in range(4):
            name = f"sequence {sequence}"
            for part in range(3):
                answer = infer(
                    gateway,
                    "identity",
                    name,
                    sequence_id=sequence + 1,
                    sequence_start=part == 0,
                    sequence_end=part == 2,
                )
                assert answer.status_code == 200
            wait_until(lambda: num_begun(small, other, name) == 3)  # noqa: B023
            assert {len(one.of("begin", id=name)) for one in (small, other)} == {0, 3}


def test_a_sequence_whose_triton_is_gone_is_told_to_begin_again(small: TritonProcess) -> None:
    with triton() as dying, serving_gateway(dying.port) as gateway:
        assert infer(gateway, "identity", sequence_id=5, sequence_start=True).status_code == 200
        dying.kill()
        wait_until(lambda: not is_ready(gateway))
        answer = infer(gateway, "identity", sequence_id=5)
        assert answer.status_code == 503
        assert "begin the sequence again" in answer.json()["error"]
        answer = infer(gateway, "identity", sequence_id=5)
        assert "no Triton can be reached" in answer.json()["error"]
