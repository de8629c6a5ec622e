"""What the field does to a server: Triton's own cases of a cancel, and crowds that leave anyhow."""

import json
import random
import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.command import Process
from tests.support.http import Client, request_bytes
from tests.support.models import PATIENCE
from tests.support.net import reset, wait_until
from tests.triton.test_clients import events

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

NUM_LEAVERS = 500
#: Connections that are open at once.
ABREAST = 50


def gauge(server: Process, name: str) -> float:
    (value,) = re.findall(rf"^{re.escape(name)} (\S+)$", server.metrics(), re.MULTILINE)
    return float(value)


def counts(server: Process, model: str) -> Counter[str]:
    """Requests by what became of them: ``success``, or why not."""
    pattern = (
        rf'^nv_inference_request_(\w+){{model="{model}",version="1"(?:,reason="(\w+)")?}} (\d+)$'
    )
    found = re.findall(pattern, server.metrics(), re.MULTILINE)
    return Counter(
        {why or kind: int(count) for kind, why, count in found if kind in ("success", "failure")}
    )


def text_body(text: str, delay: float | None = None) -> dict[str, object]:
    inputs: list[dict[str, object]] = [
        {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": [text]}
    ]
    if delay is not None:
        inputs.append({"name": "delay", "datatype": "FP32", "shape": [1], "data": [delay]})
    return {"inputs": inputs}


@pytest.mark.parametrize("action", ["infer", "generate"])
def test_a_disconnect_is_seen_by_a_model_that_polls(
    server: Process, log: Path, action: str
) -> None:
    text = f"left by {action}"
    body = text_body(text, 100.0) if action == "infer" else {"text_input": text, "delay": 100.0}
    with Client(server.port) as client:
        client.post(f"/v2/models/slow_poll/{action}", body)
        wait_until(lambda: events(log, "start", text), PATIENCE)
    wait_until(lambda: events(log, "end", text), PATIENCE)
    assert events(log, "cancel_seen", text)


def test_two_requests_of_one_connection_are_not_cancelled(server: Process, log: Path) -> None:
    with Client(server.port) as client:
        for text in ("kept first", "kept second"):
            client.post("/v2/models/slow_poll/infer", text_body(text, 0.1))
            status, _, body = client.read_response()
            assert (status, json.loads(body)["outputs"][0]["data"]) == (200, [f"done {text}"])
            assert not events(log, "cancel_seen", text)


def test_two_pipelined_requests_are_both_answered_by_a_model(server: Process, log: Path) -> None:
    texts = ("piped first", "piped second")
    with Client(server.port) as client:
        client.sock.sendall(
            b"".join(
                request_bytes("/v2/models/slow_poll/infer", text_body(text, 0.1)) for text in texts
            )
        )
        for text in texts:
            status, _, body = client.read_response()
            assert (status, json.loads(body)["outputs"][0]["data"]) == (200, [f"done {text}"])
            assert not events(log, "cancel_seen", text)


def test_a_crowd_that_leaves_around_the_response_leaves_nothing_behind(server: Process) -> None:
    dice = random.Random(6)
    request = request_bytes("/v2/models/echo_text/infer", text_body("x" * 64))
    with Client(server.port) as client:
        client.sock.sendall(request)
        client.read_until(b"\r\n\r\n")
        client.read_until(b"}]}")
    before = counts(server, "echo_text")
    num_whole = 0
    for _ in range(NUM_LEAVERS // ABREAST):
        clients = [Client(server.port) for _ in range(ABREAST)]
        points = [dice.randrange(2 * len(request)) for _ in clients]
        for client, point in zip(clients, points, strict=True):
            client.sock.sendall(request[:point])
        num_whole += sum(point >= len(request) for point in points)
        for number, (client, point) in enumerate(zip(clients, points, strict=True)):
            # What lies behind the request is a point in the response, which is about as long.
            num_unread = point - len(request)
            while num_unread > 0:
                num_unread -= len(client.sock.recv(num_unread))
            if number % 2:
                reset(client.sock)
            else:
                client.sock.close()
    for left in ("dw_connections", "dw_watches_armed", "dw_unacked_cancels"):
        wait_until(lambda name=left: gauge(server, name) == 0, PATIENCE)  # type: ignore[misc]
    ended = counts(server, "echo_text") - before
    # Who left at once never began; nobody else was lost, and none counted twice.
    assert 0 < ended.total() <= num_whole
    assert set(ended) <= {"success", "CANCELED"}
    with Client(server.port) as client:
        client.sock.sendall(request)
        assert client.read_response()[0] == 200


def test_threads_with_connections_of_their_own_get_their_own_answers(server: Process) -> None:
    before = counts(server, "echo_text")

    def ask(thread: int) -> None:
        with Client(server.port) as client:
            for number in range(25):
                text = f"{thread}.{number}"
                client.post("/v2/models/echo_text/infer", text_body(text))
                status, _, body = client.read_response()
                assert (status, json.loads(body)["outputs"][0]["data"]) == (200, [text])

    with ThreadPoolExecutor(32) as pool:
        list(pool.map(ask, range(32)))
    assert counts(server, "echo_text") - before == {"success": 32 * 25}
