"""The pytest plugin: its fixtures in a pytest run of their own, and what it loads."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest_disconnect_watch

ROOT = Path(__file__).parents[2]

TESTS = """
import socket

import pytest
from disconnect_watch import is_gone


@pytest.fixture
def listening():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


def test_client_is_closed_at_the_end(leaving_client, listening):
    client = leaving_client(listening)
    server, _ = listening.accept()
    with server:
        client.send(b"hello")
        assert server.recv(5) == b"hello"
        client.leave("fin")
        assert is_gone(server) == "fin"


def test_that_leaves_a_connection_attached(dw_watcher, leaving_client, listening):
    client = leaving_client(listening)
    global held
    held = dw_watcher.attach(client.sock)


def test_that_leaves_nothing(dw_watcher, leaving_client, listening):
    with dw_watcher.attach(leaving_client(listening).sock):
        pass
"""


def run(*command: str, directory: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        cwd=directory,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=150,
    )


def test_fixtures_work_and_a_left_connection_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    plugins = ("-p", "pytest_disconnect_watch", "-p", "no:cacheprovider", "-p", "no:asyncio")
    options = (*plugins, "-q", "-W", "error", "--rootdir", str(tmp_path))
    done = run("-m", "pytest", *options, directory=tmp_path)
    assert "3 passed, 1 error" in done.stdout, done.stdout
    assert "left in the watcher: 1 connections, 0 armed watches" in done.stdout
    assert "ERROR test_it.py::test_that_leaves_a_connection_attached" in done.stdout


def test_entry_point_is_named_as_its_module() -> None:
    # With another name `-p pytest_disconnect_watch` would register the module twice.
    entries = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    assert entries["pytest11"] == {pytest_disconnect_watch.__name__: "pytest_disconnect_watch"}


def test_plugin_that_is_not_used_loads_nothing_of_the_package(tmp_path: Path) -> None:
    script = (
        "import sys, pytest; before = set(sys.modules); import pytest_disconnect_watch; "
        "print(*sorted(set(sys.modules) - before))"
    )
    assert run("-c", script, directory=tmp_path).stdout == "pytest_disconnect_watch\n"
