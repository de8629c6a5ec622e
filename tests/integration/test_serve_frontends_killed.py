"""kill -9 of each process of ``serve --frontends``, in each phase of a request."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.fleet import ENDLESS, GENERATE, STREAM, Fleet, serving_fleet
from tests.support.net import wait_until
from tests.support.serve import Client

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

PHASES = ["waiting", "prefill", "decode"]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with serving_fleet(tmp_path_factory.mktemp("fleet")) as fleet:
        yield fleet


def begin(fleet: Fleet, client: Client, phase: str, *, path: str = STREAM) -> None:
    """A request in that phase; of one in prefill or decode the engine is then held."""
    if phase == "prefill":
        fleet.ask_to_hold()
    client.post(path, ENDLESS)
    if phase == "waiting":
        wait_until(lambda: fleet.metric('dw_requests{state="waiting"}') == 1)
    elif phase == "prefill":
        fleet.wait_held()
    else:
        client.read_until(b"\n\n")
        fleet.hold()


@pytest.mark.parametrize("phase", PHASES)
def test_a_frontend_that_is_killed_leaves_nothing_and_comes_back(fleet: Fleet, phase: str) -> None:
    fleet.wait_until_whole()
    before = fleet.num_ended("cancelled", phase)
    staying, survivor = fleet.connect()
    with staying:
        if phase == "waiting":  # behind one that runs, of the other frontend
            staying.post(STREAM, ENDLESS)
            staying.read_until(b"\n\n")
        client, victim = fleet.connect(survivor)
        with client:
            begin(fleet, client, phase)
            fleet.kill(victim)
            if phase != "waiting":
                fleet.let_go()
            wait_until(lambda: fleet.num_ended("cancelled", phase) == before + 1)
            with pytest.raises((EOFError, ConnectionError)):
                while True:
                    client.read_until(b"\n\n")
        if phase == "waiting":
            staying.read_until(b"\n\n")  # who stays hears nothing of it
    fleet.wait_until_whole()
    assert victim not in fleet.pids("frontend")
    assert survivor in fleet.pids("frontend")


@pytest.mark.parametrize("phase", PHASES)
def test_an_engine_that_is_killed_is_told_to_every_client_and_comes_back(
    fleet: Fleet, phase: str
) -> None:
    fleet.wait_until_whole()
    (victim,) = fleet.pids("engine")
    frontends = sorted(fleet.pids("frontend"))
    failed = fleet.num_ended("failed", "decode"), fleet.num_ended("failed", "waiting")
    first, one = fleet.connect()
    second, _ = fleet.connect(one)
    with first, second:
        if phase == "waiting":
            begin(fleet, first, "decode")
            fleet.let_go()
            begin(fleet, second, "waiting", path=GENERATE)
        elif phase == "prefill":
            begin(fleet, second, "prefill", path=GENERATE)
        else:
            begin(fleet, first, "decode")
        fleet.kill(victim)
        if phase != "prefill":
            said = first.read_until(b"\r\n0\r\n\r\n")
            assert b'"error":"[request id: <id_unknown>] the engine ended before' in said
        if phase != "decode":
            status, _, body = second.read_response()
            assert status == 503
            assert "the engine ended before the request did" in json.loads(body)["error"]
    fleet.wait_until_whole()
    assert fleet.pids("engine") != [victim]
    assert sorted(fleet.pids("frontend")) == frontends
    now = fleet.num_ended("failed", "decode"), fleet.num_ended("failed", "waiting")
    assert now == (failed[0] + (phase != "prefill"), failed[1] + (phase != "decode"))


@pytest.mark.parametrize("phase", PHASES)
def test_a_supervisor_that_is_killed_leaves_no_process(tmp_path: Path, phase: str) -> None:
    with serving_fleet(tmp_path, "--grace", "0.3") as fleet:
        pids = [*fleet.pids("engine"), *fleet.pids("frontend")]
        first, one = fleet.connect()
        second, _ = fleet.connect(one)
        with first, second:
            if phase == "waiting":
                begin(fleet, first, "decode")
                fleet.let_go()
            begin(fleet, second, phase)
            os.kill(fleet.pid, signal.SIGKILL)
            if phase != "waiting":
                fleet.let_go()
            wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
