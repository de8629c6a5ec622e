"""Whether one leave is noticed by a handler, and after what time."""

import contextlib
import json
import os
import socket
import ssl
import subprocess
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.client import HTTPException
from pathlib import Path
from typing import Any

from disconnect_watch.testing import LeavingClient
from disconnect_watch.testing.ways import part
from tests.servers.cells import Cell, Outcome
from tests.servers.stacks import STACKS, Stack
from tests.servers.work import CHUNK, HALF, QUICK, seconds_of
from tests.support.asgi_servers import launched, running
from tests.support.net import PATIENCE, unread_bytes, wait_until

__all__ = ["NUM_AT_ONCE", "Events", "measure_all", "outcome_of"]

#: Clients at the same time.
NUM_AT_ONCE = 12


class Events:
    """What the server's process says, read from its pipe as it comes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_zombies: defaultdict[str, int] = defaultdict(int)
        self._found: dict[tuple[str, str], dict[str, Any]] = {}
        self._changed = threading.Condition()
        os.mkfifo(path)
        # Opened for both, so that nobody waits for the other end, nor ends with it.
        self._pipe = os.open(path, os.O_RDWR)
        self._reader = threading.Thread(target=self._read, name="test-events")
        self._reader.start()

    def wait_for(self, name: str, *events: str, within: float = PATIENCE) -> dict[str, Any] | None:
        """The first of these that is said of a request; None where nothing is."""

        def find() -> dict[str, Any] | None:
            found = (self._found.get((event, name)) for event in events)
            return next((each for each in found if each is not None), None)

        with self._changed:
            return self._changed.wait_for(find, within)

    def said_of(self, name: str) -> list[str]:
        """What was said of a request so far."""
        with self._changed:
            return [event for event, of in self._found if of == name]

    def close(self) -> None:
        os.write(self._pipe, b"\n")
        self._reader.join(40)
        os.close(self._pipe)

    def _read(self) -> None:
        with os.fdopen(os.dup(self._pipe), "rb") as lines:
            while (line := lines.readline()) != b"\n":
                said = json.loads(line)
                with self._changed:
                    if said["event"] == "zombie":
                        self.num_zombies[said["name"]] += 1
                    self._found.setdefault((said["event"], said["name"]), said)
                    self._changed.notify_all()


class Running:
    """A server that runs, in all its modes."""

    def __init__(self, ports: dict[str, int], events: Events, *, is_tls: bool) -> None:
        self.events = events
        self._ports = ports
        self._scheme = "https" if is_tls else "http"
        # One for all: each would load the system's authorities.
        self._context = ssl._create_unverified_context() if is_tls else None

    def client(self, mode: str, *, timeout: float = PATIENCE) -> LeavingClient:
        url = f"{self._scheme}://127.0.0.1:{self._ports[mode]}"
        return LeavingClient(url, timeout=timeout, context=self._context)

    def answers(self, mode: str, path: str, *, timeout: float = PATIENCE) -> bool:
        """Whether a client that stays is answered."""
        try:
            with self.client(mode, timeout=timeout) as client:
                client.send(_request(path))
                return client.answer().status == 200
        except (OSError, EOFError, HTTPException):
            return False


@contextlib.contextmanager
def serving(stack_name: str, *, is_tls: bool) -> Iterator[Running]:
    """A server of ``STACKS`` that answers."""
    stack = STACKS[stack_name]
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as ends:
        log = Path(folder) / "log"
        events = ends.enter_context(contextlib.closing(Events(Path(folder) / "events")))
        start = _start_asgi if stack.app else _start_on_loop
        ports, process = ends.enter_context(start(stack, events.path, log, is_tls=is_tls))
        server = Running(ports, events, is_tls=is_tls)
        mode = next(iter(stack.modes))
        path = f"{_prefix(stack, mode, 0)}/quick/first"
        wait_until(
            lambda: process.poll() is not None or server.answers(mode, path, timeout=2.0),
            PATIENCE,
        )
        assert process.poll() is None, log.read_text()
        yield server


Started = tuple[dict[str, int], subprocess.Popen[bytes]]


@contextlib.contextmanager
def _start_asgi(stack: Stack, events: Path, log: Path, *, is_tls: bool) -> Iterator[Started]:
    app = f"tests.servers.{stack.app}"
    with launched(stack.server, app, is_tls=is_tls, events=events, log=log) as (port, process):
        yield dict.fromkeys(stack.modes, port), process


@contextlib.contextmanager
def _start_on_loop(stack: Stack, events: Path, log: Path, *, is_tls: bool) -> Iterator[Started]:
    with contextlib.ExitStack() as ends:
        ports: dict[str, int] = {}
        fds: list[int] = []
        words = ["tests.servers.loops", stack.server, *(["--tls"] if is_tls else [])]
        for mode in stack.modes:
            listening = socket.create_server(("127.0.0.1", 0), backlog=128)
            ends.enter_context(listening)
            ports[mode] = listening.getsockname()[1]
            fds.append(listening.fileno())
            words += ["--fd", mode, str(listening.fileno())]
        yield ports, ends.enter_context(running(words, fds=fds, events=events, log=log))


def measure_all(cells: Sequence[Cell]) -> dict[Cell, Outcome]:
    """Measure cells of one server, some at a time.

    Raises:
        AssertionError: a client was not served as it must be; the note says in which cell.
    """

    def one(cell: Cell) -> Outcome:
        try:
            return measure(cell, server)
        except Exception as error:
            error.add_note(f"in {cell}")
            raise

    first = cells[0]
    with (
        serving(first.stack_name, is_tls=first.is_tls) as server,
        ThreadPoolExecutor(NUM_AT_ONCE) as pool,
    ):
        return dict(zip(cells, pool.map(one, cells), strict=True))


def measure(cell: Cell, server: Running) -> Outcome:
    """Let one client come and leave, and hear what the server says of it. Threads: any."""
    name = cell.request_name
    prefix = _prefix(cell.stack, cell.mode, cell.num_middlewares)
    path = f"{prefix}/{cell.kind}/{name}"
    after = f"{prefix}/quick/after-{name}"
    with server.client(cell.mode) as client:
        if cell.kind == "head":
            client.send(_request(f"{prefix}/wait/{name}")[:-2])
            client.leave(cell.way.leave)
            assert server.answers(cell.mode, after), "who stays is not answered"
            return Outcome("false" if server.events.said_of(name) else "quiet")
        if cell.kind == "quick":
            client.send(_request(path))
            assert client.answer().body == QUICK
            client.leave(cell.way.leave)
            settled = server.events.wait_for(name, "settled")
            return Outcome("false" if settled is None or settled["reason"] else "quiet")
        if cell.kind == "last":
            client.send(_request(path))
            client.answer()
            at_ns = _leave(cell, client)
            return outcome_of(server.events, name, at_ns)
        _begin(cell, client, server, path, name)
        if cell.way.behind is not None:
            client.send(cell.way.behind(f"{prefix}/zombie/{name}"))
        at_ns = _leave(cell, client)
        outcome = outcome_of(server.events, name, at_ns)
    if cell.way.behind is None:
        return outcome
    # What lay behind it is begun by now: the server has gone on to another connection.
    assert server.answers(cell.mode, after), "who stays is not answered"
    return replace(outcome, num_zombies=server.events.num_zombies[name])


def _prefix(stack: Stack, mode: str, num_middlewares: int) -> str:
    return f"/{mode}/{num_middlewares}" if stack.app else ""


def _request(path: str, *, num_body_bytes: int = 0) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {num_body_bytes}\r\n\r\n"
    return head.encode() + bytes(num_body_bytes)


def _begin(cell: Cell, client: LeavingClient, server: Running, path: str, name: str) -> None:
    """Ask, and wait until the answer is as far as it is to be."""
    request = _request(path, num_body_bytes=cell.way.num_body_bytes)
    if cell.way.num_body_bytes:
        # All of it fits the client's own buffer, whatever the server takes.
        client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * len(request))
    client.send(request)
    assert server.events.wait_for(name, "ready"), "the server did not begin"
    if not cell.way.reads:
        wait_until(lambda: unread_bytes(client.sock))
    elif cell.kind == "half":
        client.read_until(b"\r\n\r\n")
        client.read(len(HALF))
    elif cell.kind == "stream":
        client.read_until(CHUNK + b"\r\n")


def _leave(cell: Cell, client: LeavingClient) -> int:
    """Leave, and return when that was."""
    at_ns = time.monotonic_ns()
    if not cell.way.reads:
        client.close()
    elif cell.way.first is None:
        client.leave(cell.way.leave)
    else:
        client.leave(cell.way.first)
        part(client.sock, cell.way.leave)
    return at_ns


def outcome_of(events: Events, name: str, at_ns: int) -> Outcome:
    """What became of a handler whose client left then."""
    said = events.wait_for(name, "noticed", "done", within=seconds_of(name) + 5)
    if said is None:
        return Outcome("lost")
    if said["event"] == "done":
        return Outcome("done")
    return Outcome(said["reason"] or "noticed", (said["at_ns"] - at_ns) / 1e6)
