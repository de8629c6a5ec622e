"""Loads the HTTP servers from a process of its own: requests a second, CPU, instructions."""

import json
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench._build import build_program
from bench._child import Child
from bench._http_server import REPLY, VARIANTS

__all__ = ["Round", "Server", "count_instructions", "read_counts", "run_load"]

NUM_CONNECTIONS = 16

#: The difference of two counts leaves out what a connection costs once.
FEW_REQUESTS = 100
MANY_REQUESTS = 600


@dataclass(frozen=True, slots=True)
class Round:
    """One variant under load for a moment.

    Attributes:
        cpu_us: of the whole server process, all threads, user and system, a request.
    """

    requests_per_second: float
    cpu_us: float


def run_load(
    port: int,
    num_connections: int,
    num_reply_bytes: int,
    *,
    duration_ms: int = 0,
    num_requests: int = 0,
    request: Path | None = None,
) -> tuple[int, int]:
    """Load a server from a process of its own; returns how many requests, and the nanoseconds.

    Args:
        duration_ms, num_requests: when it ends; 0 for no such bound.
        request: a file with the bytes of one; None for a small POST.

    Raises:
        RuntimeError: a reply was not 200 or not of ``num_reply_bytes``, or none came.
    """
    numbers = (port, num_connections, num_reply_bytes, duration_ms, num_requests)
    files = () if request is None else (request,)
    done = subprocess.run(
        [build_program("load"), *map(str, numbers), *files],
        capture_output=True,
        text=True,
        timeout=120,
    )
    if done.returncode:
        raise RuntimeError(f"load on port {port} failed: {done.stderr.strip()}")
    num_done, elapsed_ns = map(int, done.stdout.split())
    return num_done, elapsed_ns


class Server(Child):
    """The server process; see ``_http_server``.

    Args:
        module: what it runs, to be ordered about as ``_http_server`` is.
        num_reply_bytes: of each of its replies.

    Attributes:
        ports: of its variants, by their names.
    """

    END_LIMIT = 60.0  # under callgrind

    def __init__(
        self,
        *,
        module: str = "bench._http_server",
        num_reply_bytes: int = len(REPLY),
        under: Sequence[str] = (),
        options: Sequence[str] = (),
    ) -> None:
        self._num_reply_bytes = num_reply_bytes
        super().__init__([*under, sys.executable, "-m", module, *options], text=True, bufsize=1)
        self.ports: dict[str, int] = json.loads(self._answer())

    def load(self, variant: str, *, duration: float) -> Round:
        """Keep `NUM_CONNECTIONS` busy for `duration` seconds."""
        before = self.order("cpu")
        num_requests, elapsed_ns = self._run_load(
            variant, NUM_CONNECTIONS, duration_ms=round(duration * 1000)
        )
        cpu_ns = self.order("cpu") - before
        return Round(num_requests / elapsed_ns * 1e9, cpu_ns / num_requests / 1000)

    def request(self, variant: str, num_requests: int) -> None:
        """Make exactly so many requests, one after the other on one connection."""
        self._run_load(variant, 1, num_requests=num_requests)

    def order(self, line: str) -> int:
        """Give an order and return its answer."""
        self.orders.write(line + "\n")
        return int(self._answer())

    def _run_load(
        self, variant: str, num_connections: int, *, duration_ms: int = 0, num_requests: int = 0
    ) -> tuple[int, int]:
        return run_load(
            self.ports[variant],
            num_connections,
            self._num_reply_bytes,
            duration_ms=duration_ms,
            num_requests=num_requests,
        )

    def _answer(self) -> str:
        line: str = self.answers.readline()
        if not line:
            raise RuntimeError(f"the HTTP server ended with status {self.process.wait()}")
        return line


def count_instructions(
    folder: Path, *, variants: Iterable[str] = VARIANTS, **server_options: Any
) -> dict[str, float]:
    """User-space instructions a request, of each variant, counted by callgrind.

    Far steadier than time, and blind to the kernel's part.

    Args:
        folder: an empty one, for callgrind's files.
        variants: of the server.
        **server_options: of ``Server``.
    """
    under = ["valgrind", "-q", "--tool=callgrind", f"--callgrind-out-file={folder}/out"]
    with Server(under=under, options=["--marks"], **server_options) as server:
        for variant in variants:
            server.request(variant, FEW_REQUESTS)
            for num_requests in (FEW_REQUESTS, MANY_REQUESTS):
                server.order("zero")
                server.request(variant, num_requests)
                server.order(f"dump {variant}/{num_requests}")
    counts = read_counts(folder)
    return {
        variant: (counts[f"{variant}/{MANY_REQUESTS}"] - counts[f"{variant}/{FEW_REQUESTS}"])
        / (MANY_REQUESTS - FEW_REQUESTS)
        for variant in variants
    }


def read_counts(folder: Path) -> dict[str, int]:
    """What callgrind wrote out on request, by the label of the request; the last of each."""
    counts = {}
    for path in sorted(folder.glob("out.*"), key=lambda path: path.stat().st_mtime_ns):
        text = path.read_text()
        label = re.search(r"^desc: Trigger: Client Request: (.*)$", text, re.MULTILINE)
        total = re.search(r"^summary: (\d+)$", text, re.MULTILINE)
        if label and total:
            counts[label[1]] = int(total[1])
    return counts
