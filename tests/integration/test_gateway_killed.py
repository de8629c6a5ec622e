"""kill -9 of a gateway, in each phase of a request: nothing goes on, or stays open, behind it."""

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.command import Process, running
from tests.support.net import wait_until
from tests.support.serve import Client
from tests.support.triton import TritonProcess, shared_triton
from tests.support.upstream import Upstream, upstream

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module", autouse=True)
def small() -> Iterator[TritonProcess]:
    with shared_triton() as process:
        yield process


def kill(gateway: Process) -> None:
    os.kill(gateway.process.pid, signal.SIGKILL)
    gateway.process.wait(40)


def waits(name: str) -> dict[str, Any]:
    tensor = {"name": "INPUT0", "datatype": "FP32", "shape": [1], "data": [0]}
    return {"id": name, "inputs": [tensor]}


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_triton_is_told_of_what_a_killed_gateway_had(small: TritonProcess, phase: str) -> None:
    name = f"killed in {phase}"
    url = f"grpc://127.0.0.1:{small.port}"
    with running("--triton", url, command="gateway") as gateway, Client(gateway.port) as client:
        if phase == "prefill":
            client.post("/v2/models/waits/infer", waits(name))
        else:
            body = {"INPUT0": 1, "then": "wait", "id": name}
            client.post("/v2/models/stream/generate_stream", body)
            client.read_until(b"\n\n")
        small.wait_for("begin", id=name)
        kill(gateway)
        small.wait_for("cancelled", id=name)
        # And its client hears of it, by the end of its connection.
        with pytest.raises((EOFError, ConnectionError)):
            while True:
                client.read_until(b"\n\n")


def num_connections(of: Upstream) -> int:
    return len(of.server.server.server_state.connections)


@pytest.mark.parametrize(
    ("phase", "answer"), [("queued", "wait"), ("begun", "half"), ("streaming", "stream")]
)
def test_a_server_is_left_by_a_killed_gateway(phase: str, answer: str) -> None:
    with (
        upstream() as server,
        running("--http", f"http://127.0.0.1:{server.port}", command="gateway") as gateway,
        Client(gateway.port) as client,
        Client(gateway.port) as idle,
    ):
        # One connection that is kept for later requests, too.
        idle.sock.sendall(b"GET /page HTTP/1.1\r\nHost: test\r\n\r\n")
        assert idle.read_response()[0] == 200
        path = server.name(answer)
        client.post(path)
        call = server.wait_for(path)
        if phase != "queued":
            client.read_until(b"\r\n\r\n")
        if phase == "streaming":
            client.read_until(b"\n\n")
        kill(gateway)
        wait_until(lambda: call.reason in ("FIN", "RESET"))
        # Of the answer to a request that waits nothing is made, and no connection stays.
        call.may_finish.set()
        wait_until(lambda: call.outcome == "stopped")
        wait_until(lambda: num_connections(server) == 0)
