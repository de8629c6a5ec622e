"""The frontend's benchmark: whom it asks, what it counts, and that it runs."""

import json
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from bench import frontend
from bench._frontend_asked import read_reply
from bench._leaving import Events
from bench._process_tree import cpu_ns, pids_of_tree
from bench._triton import serving_triton, triton_program
from tests.unit.test_bench import assert_schema


def test_a_tree_is_a_process_and_what_it_has_started() -> None:
    program = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    with subprocess.Popen(
        [sys.executable, "-c", f"print(flush=True); {program}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()
        while len(pids := pids_of_tree(parent.pid)) < 2:
            assert parent.poll() is None
        assert pids[0] == parent.pid
        assert cpu_ns(pids) >= cpu_ns(pids[:1]) > 0
        parent.communicate()


@pytest.mark.parametrize(
    "reply",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
    ],
)
def test_a_reply_is_read_to_its_end_and_no_further(reply: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender = threading.Thread(target=lambda: [theirs.send(bytes([byte])) for byte in reply])
        sender.start()
        assert read_reply(ours) == reply
        sender.join()
        theirs.close()
        with pytest.raises(EOFError):
            read_reply(ours)


def test_events_are_found_by_what_and_of_whom(tmp_path: Path) -> None:
    events = Events(tmp_path / "events")
    (tmp_path / "events").write_text("7 begin a b\n9 end a b\n11 end not whol")
    assert (events.find("begin", "a b"), events.find("end", "a b")) == (7, 9)
    assert events.find("end", "not whol") is None


def test_triton_is_left_out_where_its_venv_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_VENV", str(tmp_path))
    assert triton_program() is None


def test_a_triton_that_ends_is_told_with_what_it_said(tmp_path: Path) -> None:
    program = tmp_path / "tritonserver"
    program.write_text("#!/bin/sh\necho no model\nexit 1\n")
    program.chmod(0o755)
    with (
        pytest.raises(RuntimeError, match=r"was not ready on port .*no model"),
        serving_triton(program, tmp_path, tmp_path / "log", {}),
    ):
        pass


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_frontend_bench_runs_and_writes_its_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_VENV", str(tmp_path))
    config = frontend.Config(
        num_rounds=1, duration_ms=20, num_large=1, num_leaves=1, has_instructions=False
    )
    path = tmp_path / "frontend.json"
    frontend.run(config).write(path)
    results = json.loads(path.read_text())
    assert_schema(results)
    medians = {row["name"]: row["median"] for row in results["rows"]}
    assert medians[frontend.BASELINE] > 0
    assert medians["ours, run all the same: queued, FIN"] == 0
    assert "Triton was not asked" in results["notes"][0]
