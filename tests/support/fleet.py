"""``serve --frontends`` in its processes, looked at and held from a test."""

import contextlib
import json
import os
import re
import signal
import socket
import struct
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.command import Process, endless_model, running
from tests.support.fleet_engine import PATH
from tests.support.net import PATIENCE, wait_until
from tests.support.serve import Client

__all__ = ["ENDLESS", "GENERATE", "STREAM", "Fleet", "serving_fleet"]

GENERATE, STREAM = "/v2/models/tiny/generate", "/v2/models/tiny/generate_stream"
ENDLESS = {"text_input": "The class", "max_tokens": 100_000, "ignore_eos": True}

#: Where the table has who owns each range of slots, see csrc/dw_flags_table.h; and which bits of
#: that are the pid: none of what the dead left and others hold still.
OWNERS_AT, NUM_RANGES, PID_MASK = 56, 1024, (1 << 22) - 1

#: Seconds in which a process has started, torch and all, on a machine with ten times as much to do.
START = 170.0


class Fleet:
    """A supervisor, its engine and its frontends.

    Args:
        gates: where each engine connects to be held.
    """

    def __init__(self, process: Process, gates: socket.socket) -> None:
        self.process = process
        self.pid = process.process.pid
        self.port = process.port
        self._gates = gates
        self._gate: socket.socket | None = None
        self._table = self._open_table()
        self.fds = self._count_fds()
        self.gate()

    def pids(self, kind: str) -> list[int]:
        """Of the processes of that kind which run: ``engine`` or ``frontend``."""
        found = []
        for pid in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
                if words[2:] and words[2].endswith((f".{kind}_process", f".fleet_{kind}")):
                    found.append(int(pid))
        return found

    def connect(self, *others: int) -> tuple[Client, int]:
        """A connection to a frontend that is none of the others; and the pid of that."""
        with contextlib.ExitStack() as unwanted:
            for _ in range(1000):
                client = Client(self.port)
                # An answer, so that somebody has taken it.
                client.sock.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: test\r\n\r\n")
                assert client.read_response()[0] == 200
                pid = self._server_of(client)
                if pid not in others:
                    return client, pid
                # Kept, so that the busy one gets no more of them than it must.
                unwanted.enter_context(client)
        raise AssertionError(f"no other frontend than {others} took a connection")

    def metric(self, series: str) -> float:
        """The value of one series, on the metrics port."""
        found = re.search(rf"^{re.escape(series)} (\S+)$", self.process.metrics(), re.MULTILINE)
        return float(found[1]) if found else -1.0

    def num_ended(self, outcome: str, phase: str) -> float:
        return self.metric(f'dw_requests_total{{outcome="{outcome}",phase="{phase}"}}')

    def hold(self) -> None:
        """Hold the engine in its next step; returns when it is there."""
        self.ask_to_hold()
        self.wait_held()

    def ask_to_hold(self) -> None:
        """As ``hold``; no step that begins from now on ends, but ``wait_held`` waits for one."""
        self.gate().sendall(b"h")
        assert self.gate().recv(1) == b"a"

    def wait_held(self) -> None:
        assert self.gate().recv(1) == b"h"

    def let_go(self) -> None:
        self.gate().sendall(b"o")

    def gate(self) -> socket.socket:
        """The way to the engine that runs."""
        if self._gate is None:
            self._gate, _ = self._gates.accept()
            self._gate.settimeout(PATIENCE)
        return self._gate

    def kill(self, pid: int) -> None:
        """Kill a process, and wait until it is gone."""
        is_engine = pid in self.pids("engine")
        os.kill(pid, signal.SIGKILL)
        # Not before: an engine whose gate is closed goes on.
        if is_engine and self._gate is not None:
            self._gate.close()
            self._gate = None
        wait_until(lambda: not Path(f"/proc/{pid}").exists())

    def wait_until_whole(self) -> None:
        """Wait until all its processes run and serve, and nothing is left of any request."""
        self.gate()
        wait_until(lambda: len(self.pids("frontend")) == 2 and len(self.pids("engine")) == 1, START)
        wait_until(self.can_generate, START)
        wait_until(
            lambda: (
                self.metric('dw_requests{state="waiting"}')
                == self.metric('dw_requests{state="running"}')
                == self.metric('dw_kv_blocks{state="used"}')
                == self.metric('dw_kv_blocks{state="retained"}')
                == 0
            )
        )
        wait_until(lambda: self.owners_of_flags() <= {*self.pids("engine"), *self.pids("frontend")})
        wait_until(lambda: self._count_fds() == self.fds)

    def can_generate(self) -> bool:
        body = json.dumps({"text_input": "The class", "max_tokens": 2}).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{GENERATE}", body)
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(request, timeout=PATIENCE) as found,
        ):
            return bool(found.status == 200)
        return False

    def owners_of_flags(self) -> set[int]:
        """The pids of those who own slots of the one table; 0 for slots that the dead left."""
        words = os.pread(self._table, 8 * NUM_RANGES, OWNERS_AT)
        return {word & PID_MASK for (word,) in struct.iter_unpack("<Q", words) if word}

    def post(self, client: Client, path: str, body: Any = b"", **headers: str) -> Any:
        """Ask as the admin; returns status and JSON."""
        (said,) = [line for line in self.process.lines if line.startswith("admin token: ")]
        token = said.removeprefix("admin token: ").strip()
        client.post(path, body, Authorization=f"Bearer {token}", **headers)
        status, _, answer = client.read_response()
        return status, json.loads(answer)

    def _server_of(self, client: Client) -> int:
        ours = client.sock.getsockname()[1]
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
            words = line.split()
            local, remote = (int(words[at].rpartition(":")[2], 16) for at in (1, 2))
            if (local, remote) == (self.port, ours):
                inode = f"socket:[{words[9]}]"
                for pid in self.pids("frontend"):
                    for fd in Path(f"/proc/{pid}/fd").iterdir():
                        with contextlib.suppress(OSError):
                            if os.readlink(fd) == inode:
                                return pid
        raise AssertionError("the connection is nobody's")

    def _open_table(self) -> int:
        for fd in Path(f"/proc/{self.pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if os.readlink(fd).startswith("/memfd:disconnect-watch "):
                    return os.open(fd, os.O_RDONLY)
        raise AssertionError("the supervisor has no flag table")

    def close(self) -> None:
        """Let go of what it looks through."""
        os.close(self._table)
        if self._gate is not None:
            self._gate.close()

    def _count_fds(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))


@contextlib.contextmanager
def serving_fleet(folder: Path, *options: str, **environment: str) -> Iterator[Fleet]:
    """Two frontends before an engine that runs one request at a time, for as long as it takes."""
    path = folder / "gate"
    with contextlib.ExitStack() as stack:
        gates = stack.enter_context(socket.socket(socket.AF_UNIX))
        gates.bind(str(path))
        gates.listen()
        gates.settimeout(START)
        for name, value in {**environment, PATH: str(path)}.items():
            before = os.environ.get(name)
            os.environ[name] = value
            if before is None:
                stack.callback(os.environ.pop, name)
            else:
                stack.callback(os.environ.__setitem__, name, before)
        model = endless_model(folder)
        process = stack.enter_context(
            running(
                *("--frontends", "2", "--model", str(model), "--max-num-seqs", "1"),
                *options,
                module="tests.support.fleet_command",
            )
        )
        fleet = Fleet(process, gates)
        stack.callback(fleet.close)
        yield fleet
