"""Ray Serve in the venv of ``.ci/ray``: clients that leave its proxy, and our engine behind it.

One Ray serves all tests here, since it takes half a minute to come up.
"""

import contextlib
import json
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from disconnect_watch.testing import http_request
from tests.support.net import PATIENCE, held_port, wait_until
from tests.support.venvs import ROOT, environment, python_of

#: Ray starts a dozen processes; on a loaded machine that takes minutes.
BEGINS_WITHIN = 240
PROXY_CALLBACK = "disconnect_watch.adapters.ray_serve.watch_proxy"
#: Methods of the deployments, by how each kind of them is told.
ENDS = {
    "waits": "CancelledError",
    "waits_for_a_thread": "CancelledError",
    "plain": "done",
    "streams": "CancelledError",
    "items": "CancelledError",
    "steps": "GeneratorExit",
    "engine": "CancelledError",
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(BEGINS_WITHIN + 120)]


@dataclass
class Serving:
    """Ray Serve with the deployments of ``tests/support/ray_app.py``.

    Attributes:
        found: what requests to the engine found as it began.
    """

    port: int
    directory: Path
    found: dict[str, Any]

    def events(self, name: str, event: str) -> list[dict[str, Any]]:
        file = self.directory / "events"
        # The last line may be half written.
        lines = file.read_text().split("\n")[:-1] if file.exists() else []
        parsed = [json.loads(line) for line in lines]
        return [each for each in parsed if (each["name"], each["event"]) == (name, event)]

    @contextlib.contextmanager
    def client(self, name: str) -> Iterator[socket.socket]:
        """One whose request for ``name`` has begun; it leaves with the block."""
        num_begun = len(self.events(name, "begun"))
        with socket.create_connection(("127.0.0.1", self.port), PATIENCE) as sock:
            sock.sendall(http_request("GET", f"/{name}"))
            wait_until(lambda: len(self.events(name, "begun")) > num_begun)
            yield sock

    def end_of(self, name: str) -> dict[str, Any]:
        """How the last call of ``name`` ended, once as many have ended as began."""
        num_begun = len(self.events(name, "begun"))
        wait_until(lambda: len(self.events(name, "ended")) == num_begun)
        return self.events(name, "ended")[-1]


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    python = python_of("ray")
    directory = tmp_path_factory.mktemp("ray")
    stdout, stderr = directory / "stdout", directory / "stderr"
    with held_port() as port, stdout.open("w") as out, stderr.open("w") as err:
        process = subprocess.Popen(
            [python, "-m", "tests.support.ray_app", directory, str(port)],
            cwd=ROOT,
            env={
                **environment(),
                "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": PROXY_CALLBACK,
                "RAY_AUTH_MODE": "disabled",
                "RAY_USAGE_STATS_ENABLED": "0",
            },
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=err,
        )
        with process:
            try:
                wait_until(lambda: process.poll() is not None or ready_line(stdout), BEGINS_WITHIN)
                assert process.poll() is None, stderr.read_text()[-4000:]
                yield Serving(port, directory, json.loads(ready_line(stdout)))
            finally:
                assert process.stdin is not None
                process.stdin.close()
                process.wait(BEGINS_WITHIN)


def ready_line(stdout: Path) -> str:
    """What it prints when it serves; Ray prints what its processes do."""
    lines = stdout.read_text().split("\n")[:-1]
    return next((line for line in lines if line.startswith("{")), "")


def get(port: int, path: str) -> Any:
    answer = httpx.get(f"http://127.0.0.1:{port}{path}", timeout=PATIENCE)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("behind", [b"", http_request("GET", "/waits")], ids=["alone", "pipelined"])
@pytest.mark.parametrize("name", ENDS)
def test_a_method_ends_when_its_client_leaves(serving: Serving, name: str, behind: bytes) -> None:
    num_waits = len(serving.events("waits", "begun"))
    with serving.client(name) as client:
        client.sendall(behind)
    ended = serving.end_of(name)
    assert ended["by"] == ENDS[name]
    assert ended["told"]
    assert ended["reason"] == "owner_closed"
    # What stood behind was for a client that had left.
    assert len(serving.events("waits", "begun")) == num_waits + (name == "waits")


def test_a_client_that_stays_is_answered_and_its_token_is_live(serving: Serving) -> None:
    assert get(serving.port, "/answers") == {"cancelled": False}
    assert not serving.end_of("answers")["told"]


def test_the_engine_drops_the_requests_of_who_left(serving: Serving) -> None:
    with serving.client("engine"):
        pass
    serving.end_of("engine")
    wait_until(lambda: get(serving.port, "/num_requests") == 0)


def test_a_request_to_the_engine_ends_with_its_token_or_when_it_is_closed(
    serving: Serving,
) -> None:
    assert serving.found["stays"] == "finished"
    assert serving.found["leaves"] == ["cancelled", "owner_closed"]
    assert serving.found["gone_before"] == "client disconnected: aborted"
    assert serving.found["ended"] == {"finished": 1, "cancelled": 2}


def test_requests_to_the_engine_end_with_the_process_that_wants_them(serving: Serving) -> None:
    ended = serving.found["ended_after_a_caller_was_killed"]
    assert sum(ended.values()) == 3 + 20
    # One at a time is computed; those that were before the death of the process have finished.
    assert ended["cancelled"] > 2


def test_the_page_runs_as_written(serving: Serving) -> None:
    assert serving.found["answer_of_the_page"]
    with socket.create_connection(("127.0.0.1", serving.port), PATIENCE) as client:
        client.sendall(http_request("GET", "/page"))
        wait_until(lambda: get(serving.port, "/reasons_of_the_page") == [None])
    wait_until(lambda: get(serving.port, "/reasons_of_the_page") == ["owner_closed"])
