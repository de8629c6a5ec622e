"""uvicorn and gunicorn in processes of their own, started as their users start them."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.http import Client
from tests.support.net import wait_until
from tests.support.uvicorn_app import LOG

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
APP = "tests.support.uvicorn_app:app"
PROTOCOLS = "disconnect_watch.adapters.uvicorn"
WORKERS = "disconnect_watch.adapters.uvicorn_worker"

RUN = """
import uvicorn
from {module} import {name}
uvicorn.run("tests.support.uvicorn_app:app", port=0, http={argument})
"""

#: How many connections may go to one and the same of two workers.
MAX_TRIES = 200


@dataclass
class Group:
    """A server's processes. Its standard error is read as it comes.

    Attributes:
        lines: what they said so far.
        log: what ``uvicorn_app`` writes.
    """

    process: subprocess.Popen[str]
    log: Path
    lines: list[str] = field(default_factory=list)

    @property
    def port(self) -> int | None:
        """Where it listens, once it has said so."""
        found = re.search(r"(?:running on|Listening at:) http://127\.0\.0\.1:(\d+)", self.said)
        return int(found[1]) if found else None

    @property
    def said(self) -> str:
        return "".join(self.lines)

    def words_of(self, pid: int) -> list[str]:
        """What the application wrote in one of the processes."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [line.split()[1] for line in lines if line.split()[0] == str(pid)]

    def wait_for_workers(self, num_workers: int) -> None:
        """Wait until so many, those that have ended counted too, serve."""
        ready = "Application startup complete"
        wait_until(
            lambda: self.said.count(ready) >= num_workers or self.process.poll() is not None, 30
        )
        assert self.process.poll() is None, self.said

    def connect(self) -> Client:
        """A connection to any worker. Some say that they are ready before they listen."""
        clients: list[Client] = []

        def is_taken() -> bool:
            port = self.port
            with contextlib.suppress(ConnectionRefusedError):
                clients.extend([Client(port)] if port else [])
            return bool(clients)

        wait_until(is_taken)
        return clients[0]

    def read(self) -> None:
        assert self.process.stderr is not None
        self.lines.extend(self.process.stderr)


@contextlib.contextmanager
def running(arguments: Sequence[str], folder: Path, **environment: str) -> Iterator[Group]:
    """The command, with a log in ``folder``; ended as by an operator, with all its workers."""
    log = folder / "log"
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), LOG: str(log), **environment},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    group = Group(process, log)
    reader = threading.Thread(target=group.read)
    reader.start()
    try:
        yield group
        process.terminate()
        process.wait(40)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(40)
        reader.join(40)
        assert process.stderr is not None
        process.stderr.close()
    assert "Traceback" not in group.said, group.said


def pid_of(client: Client) -> int:
    """Which of the processes serves a connection."""
    client.post("/pid", b"")
    return int(client.read_response()[2])


def leave_behind_a_request(group: Group, client: Client, pid: int) -> None:
    """What uvicorn alone does not notice; and the request behind must not begin."""
    client.post("/wait", b"")
    wait_until(lambda: group.words_of(pid) == ["begun"])
    client.post("/wait", b"")
    client.sock.close()
    wait_until(lambda: group.words_of(pid) == ["begun", "fin"])


def assert_each_of_two_workers_notices(group: Group) -> None:
    group.wait_for_workers(2)
    with contextlib.ExitStack() as stack:
        clients: dict[int, Client] = {}
        for _ in range(MAX_TRIES):
            client = stack.enter_context(group.connect())
            clients.setdefault(pid_of(client), client)
            if len(clients) == 2:
                break
        assert len(clients) == 2
        for pid, client in clients.items():
            leave_behind_a_request(group, client, pid)
    assert all(group.words_of(pid) == ["begun", "fin"] for pid in clients)


@pytest.mark.parametrize("name", ["HttpTools", "H11"])
@pytest.mark.parametrize("is_class", [True, False])
def test_uvicorn_run_takes_the_class_or_its_name(tmp_path: Path, name: str, is_class: bool) -> None:
    argument = name if is_class else repr(f"{PROTOCOLS}:{name}")
    source = RUN.format(module=PROTOCOLS, name=name, argument=argument)
    with running(["-c", source], tmp_path) as group:
        group.wait_for_workers(1)
        with group.connect() as client:
            leave_behind_a_request(group, client, pid_of(client))


@pytest.mark.parametrize("name", ["HttpTools", "H11"])
def test_each_worker_of_uvicorn_watches_its_own_connections(tmp_path: Path, name: str) -> None:
    arguments = ["-m", "uvicorn", APP, "--port", "0", "--workers", "2"]
    with running([*arguments, "--http", f"{PROTOCOLS}:{name}"], tmp_path) as group:
        assert_each_of_two_workers_notices(group)


@pytest.mark.parametrize("name", ["UvicornWorker", "UvicornH11Worker"])
@pytest.mark.parametrize("is_preloaded", [True, False])
def test_each_worker_of_gunicorn_watches_its_own_connections(
    tmp_path: Path, name: str, is_preloaded: bool
) -> None:
    arguments = ["-m", "gunicorn", APP, "-b", "127.0.0.1:0", "-w", "2", "-k", f"{WORKERS}.{name}"]
    # The application, once loaded, has made a watcher, whose thread no worker inherits.
    preload = ["--preload"] if is_preloaded else []
    with running([*arguments, *preload], tmp_path, WATCH_BEFORE_FORK="1") as group:
        assert_each_of_two_workers_notices(group)


def test_h11_needs_no_httptools() -> None:
    source = f"""
import sys
sys.modules["httptools"] = None
import {PROTOCOLS} as adapter
adapter.h11(half_close="ignore")
for use in (adapter.http_tools, lambda: adapter.HttpTools):
    try:
        use()
    except ImportError as error:
        assert "httptools" in str(error)
    else:
        raise AssertionError(use)
"""
    subprocess.run([sys.executable, "-c", source], cwd=ROOT, check=True, timeout=40)


def change(module: Path, is_seen: Callable[[], bool]) -> None:
    """Make a file look changed until that is seen, which uvicorn does not do at its first look."""
    for _ in range(10):
        later = module.stat().st_mtime + 10
        os.utime(module, (later, later))
        with contextlib.suppress(AssertionError):
            wait_until(is_seen, 3)
            return
    raise AssertionError("no change was seen")


def test_a_reloaded_server_watches_again(tmp_path: Path) -> None:
    module = tmp_path / "reloaded.py"
    module.write_text("from tests.support.uvicorn_app import app\n")
    arguments = ["-m", "uvicorn", "reloaded:app", "--port", "0", "--app-dir", str(tmp_path)]
    arguments += ["--reload", "--reload-dir", str(tmp_path), "--http", f"{PROTOCOLS}:HttpTools"]
    with running(arguments, tmp_path) as group:
        group.wait_for_workers(1)
        with group.connect() as client:
            first = pid_of(client)
            leave_behind_a_request(group, client, first)
        change(module, lambda: "detected changes" in group.said)
        group.wait_for_workers(2)
        with group.connect() as client:
            second = pid_of(client)
            assert second != first
            leave_behind_a_request(group, client, second)
