"""``serve --frontends``: what a client may ask of any of them, and what all of them share."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import FREE_PORTS
from tests.support.fleet import ENDLESS, GENERATE, START, STREAM, Fleet, serving_fleet
from tests.support.net import wait_until
from tests.support.serve import Client

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

SHORT = {"text_input": "The class", "max_tokens": 2}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "A class"}]}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with serving_fleet(tmp_path_factory.mktemp("fleet")) as fleet:
        yield fleet


@pytest.fixture
def two(fleet: Fleet) -> Iterator[tuple[Client, Client]]:
    """A connection to each frontend."""
    fleet.wait_until_whole()
    first, pid = fleet.connect()
    with first:
        second, _ = fleet.connect(pid)
        with second:
            yield first, second


def begin_stream(client: Client) -> str:
    """A stream that has begun; returns its request's id."""
    client.post(STREAM, ENDLESS)
    head = client.read_until(b"\r\n\r\n").decode("latin-1")
    client.read_until(b"\n\n")
    (line,) = [line for line in head.split("\r\n") if line.lower().startswith("x-request-id")]
    return line.partition(": ")[2]


def ask(client: Client, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    """Ask as nobody in particular; returns status and JSON."""
    client.post(path, body)
    status, _, answer = client.read_response()
    return status, json.loads(answer)


def test_a_request_is_cancelled_by_its_id_from_any_frontend(
    fleet: Fleet, two: tuple[Client, Client]
) -> None:
    first, second = two
    request_id = begin_stream(first)
    status, answer = fleet.post(second, f"/v1/requests/{request_id}/cancel")
    assert (status, answer["status"], answer["phase"]) == (200, "cancelled", "decode")
    assert answer["blocks_freed"] > 0
    assert b"the request was cancelled" in first.read_until(b"\r\n0\r\n\r\n")
    for client in two:
        status, answer = fleet.post(client, f"/v1/requests/{request_id}/cancel")
        assert (status, answer["status"]) == (200, "already_cancelled")
        status, answer = fleet.post(client, "/v1/requests/0123456789abcdef/cancel")
        assert status == 404


def test_several_are_cancelled_wherever_they_are(fleet: Fleet, two: tuple[Client, Client]) -> None:
    first, second = two
    ids = [begin_stream(first), "never"]
    _, answer = fleet.post(second, "/v1/requests/cancel", {"request_ids": ids})
    assert [each["status"] for each in answer["results"]] == ["cancelled", "not_found"]
    first.read_until(b"\r\n0\r\n\r\n")
    request_id = begin_stream(first)
    _, answer = fleet.post(second, "/v1/admin/cancel_all", {"confirm": True})
    assert [each["request_id"] for each in answer["results"]] == [request_id]
    first.read_until(b"\r\n0\r\n\r\n")


def num_left(fleet: Fleet) -> float:
    """Connections that their clients ended, as far as it was counted."""
    return sum(fleet.metric(f'dw_signals_total{{source="{way}"}}') for way in ("fin", "reset"))


def test_metrics_are_those_of_all_and_never_fall(fleet: Fleet, two: tuple[Client, Client]) -> None:
    first, _ = two
    finished = fleet.num_ended("finished", "decode")
    for client in two:
        client.post(GENERATE, SHORT)
        assert client.read_response()[0] == 200
    wait_until(lambda: fleet.num_ended("finished", "decode") == finished + 2)
    wait_until(lambda: fleet.metric("dw_connections") == 2)
    # A leave is counted by the frontend that saw it, and known when that frontend is gone.
    cancelled = fleet.num_ended("cancelled", "decode")
    begin_stream(first)
    first.sock.close()
    wait_until(lambda: fleet.num_ended("cancelled", "decode") == cancelled + 1)
    # The engine finds the flag without the frontend, which counts in its own time.
    wait_until(lambda: num_left(fleet) > 0)
    left = num_left(fleet)
    for pid in fleet.pids("frontend"):
        fleet.kill(pid)
        wait_until(lambda: len(fleet.pids("frontend")) == 2, START)
    fleet.wait_until_whole()
    assert num_left(fleet) >= left


def test_responses_are_found_and_cancelled_from_any_frontend(
    fleet: Fleet, two: tuple[Client, Client]
) -> None:
    first, second = two
    asked = {"model": "tiny", "input": "A class", "max_output_tokens": 4}
    status, made = ask(first, "/v1/responses", asked)
    assert status == 200, made
    second.sock.sendall(f"GET /v1/responses/{made['id']} HTTP/1.1\r\nHost: t\r\n\r\n".encode())
    status, _, body = second.read_response()
    assert status == 200
    assert json.loads(body)["output"] == made["output"]
    endless = {**asked, "max_output_tokens": 100_000, "background": True}
    status, made = ask(first, "/v1/responses", endless)
    assert (status, made["status"]) == (200, "queued")
    wait_until(lambda: fleet.metric('dw_requests{state="running"}') == 1)
    status, answer = ask(second, f"/v1/responses/{made['id']}/cancel", {})
    assert (status, answer["status"]) == (200, "cancelled")


def test_a_response_whose_frontend_was_killed_has_an_end(
    fleet: Fleet, two: tuple[Client, Client]
) -> None:
    first, second = two
    asked = {"model": "tiny", "input": "A", "max_output_tokens": 100_000, "background": True}
    _, made = ask(first, "/v1/responses", asked)
    wait_until(lambda: fleet.metric('dw_requests{state="running"}') == 1)
    pid = fleet._server_of(first)
    fleet.kill(pid)
    second.sock.sendall(f"GET /v1/responses/{made['id']} HTTP/1.1\r\nHost: t\r\n\r\n".encode())
    status, _, body = second.read_response()
    assert status == 200
    found = json.loads(body)
    assert found["status"] == "failed"
    assert "stopped before its end" in found["error"]["message"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_in_order(tmp_path: Path, number: signal.Signals) -> None:
    admin = tmp_path / "admin"
    with serving_fleet(tmp_path, "--grace", "0.3", "--admin-socket", str(admin)) as fleet:
        pids = [*fleet.pids("engine"), *fleet.pids("frontend")]
        client, _ = fleet.connect()
        with client:
            begin_stream(client)
            os.kill(fleet.pid, number)
            assert b"the server is shutting down" in client.read_until(b"\r\n0\r\n\r\n")
        assert fleet.process.wait() == 0
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
        assert not admin.exists()
        assert "Traceback" not in "".join(fleet.process.lines)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--model-repository", "/tmp"], "--model-repository goes with one frontend only"),
        (["--embedding-model", "/tmp"], "--embedding-model goes with one frontend only"),
        (["--allow-client-shm", "true"], "--allow-client-shm goes with one frontend only"),
        (["--model", "/no/such"], "/no/such"),
    ],
)
def test_what_frontends_cannot_share_is_said(options: list[str], said: str) -> None:
    command = [sys.executable, "-m", "disconnect_watch.cli", "serve", "--frontends", "2"]
    done = subprocess.run(
        [*command, *FREE_PORTS, *options], capture_output=True, text=True, timeout=170, check=False
    )
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
