"""The gateway before a real Triton: what its models say of clients that leave, and what it answers.

The rows are those of ``docs/gateways.md``. How long each took, ``bench/gateways.py`` measures.
"""

import os
import signal
from typing import Any

import pytest

from disconnect_watch.testing import Way
from disconnect_watch.testing.ways import part
from tests.support.command import Process, running
from tests.support.net import wait_until
from tests.support.real_triton import RealTriton
from tests.support.serve import Client
from tests.triton.conformance import ON_PURPOSE, cases, replay

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(600)]

#: Seconds that a model works if nobody stops it: longer than any test waits.
LONG = 1000.0

_UNORDERED = "the parameters of a gRPC call have no order"
_OLDER = "the Triton of the captures is newer than 2.51"
#: Why an answer differs from the captured one; those of our own frontend, and these.
REASONS = {
    "get_model_broken_metadata": _OLDER,
    "infer_broken_model": _OLDER,
    "infer_params_model": _UNORDERED,
    "gen_id": _UNORDERED,
}
#: Those of ``serve`` alone: Triton says which of two inputs it names first; and there is no
#: page at the root of the gateway.
NOT_HERE = {"get_root", "infer_shape_rank"}


def infer_body(text: str, delay: float) -> dict[str, Any]:
    return {
        "inputs": [
            {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": [text]},
            {"name": "delay", "datatype": "FP32", "shape": [1], "data": [delay]},
        ]
    }


def slow(text: str) -> dict[str, Any]:
    return {"text_input": text, "delay": LONG}


#: Paths, and what makes a body of a text.
ROWS: dict[str, tuple[str, Any]] = {
    "infer": ("slow_poll/infer", lambda text: infer_body(text, LONG)),
    "generate": ("slow_poll/generate", slow),
    "generate_stream of one response": ("slow_poll/generate_stream", slow),
    "generate_stream before its first chunk": (
        "stream/generate_stream",
        lambda text: {"text_input": text, "n": 3, "gap": LONG},
    ),
    "generate_stream between two chunks": (
        "stream/generate_stream",
        lambda text: {"text_input": text, "n": 100_000, "gap": 0.01},
    ),
}


@pytest.mark.parametrize("way", [Way.FIN, Way.RST])
@pytest.mark.parametrize("row", ROWS)
def test_the_model_of_a_client_that_leaves_is_told(
    triton: RealTriton, gateway: Process, row: str, way: Way
) -> None:
    action, body_of = ROWS[row]
    text = f"{row} {way}"
    with Client(gateway.port) as client:
        client.post(f"/v2/models/{action}", body_of(text))
        if "between" in row:
            client.read_until(b'"index":1')
        wait_until(lambda: triton.events("start", text))
        part(client.sock, way)
        wait_until(lambda: triton.events("cancel_seen", text))
        wait_until(lambda: triton.events("end", text))


@pytest.mark.parametrize("row", ROWS)
def test_the_model_of_a_gateway_that_is_killed_is_told(triton: RealTriton, row: str) -> None:
    action, body_of = ROWS[row]
    text = f"killed: {row}"
    url = f"grpc://127.0.0.1:{triton.port}"
    with running("--triton", url, command="gateway") as gateway, Client(gateway.port) as client:
        client.post(f"/v2/models/{action}", body_of(text))
        if "between" in row:
            client.read_until(b'"index":1')
        wait_until(lambda: triton.events("start", text))
        os.kill(gateway.process.pid, signal.SIGKILL)
        wait_until(lambda: triton.events("cancel_seen", text))
        wait_until(lambda: triton.events("end", text))


def test_a_request_that_waits_behind_another_does_no_work(
    triton: RealTriton, gateway: Process
) -> None:
    path = "/v2/models/slow_one/infer"
    with Client(gateway.port) as running, Client(gateway.port) as next_:
        running.post(path, infer_body("first", LONG))
        wait_until(lambda: triton.events("start", "first"))
        with Client(gateway.port) as waiting:
            waiting.post(path, infer_body("queued", LONG))
            wait_until(lambda: num_outstanding(gateway) == 2)
        wait_until(lambda: num_outstanding(gateway) == 1)
        next_.post(path, infer_body("behind", 0.01))
        wait_until(lambda: num_outstanding(gateway) == 2)
        running.sock.close()
        # Else it would be 1,000 seconds until this one's turn.
        assert next_.read_response()[0] == 200
    wait_until(lambda: triton.events("end", "first"))
    # Triton begins it all the same, and the model sees at its first look that it need not.
    assert triton.events("cancel_seen", "queued")


def num_outstanding(gateway: Process) -> float:
    """Requests that the Triton has not answered."""
    (line,) = [
        line for line in gateway.metrics().splitlines() if line.startswith("dw_upstream_outst")
    ]
    return float(line.split()[-1])


def test_captured_requests_are_answered_as_triton_did(gateway: Process) -> None:
    different = {
        result.name: result.why
        for result in (replay(name, gateway) for name in cases())
        if result.kind != "same"
    }
    expected = (ON_PURPOSE.keys() - NOT_HERE) | REASONS.keys()
    assert {name: why for name, why in different.items() if name not in expected} == {}
    # A reason without a difference would hide the next one.
    assert expected - different.keys() == set()
