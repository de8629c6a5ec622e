"""Who leaves an RPC, and what its handler hears: the rows of gRPC."""

import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import IO, cast

from tests.servers.cells import Outcome
from tests.servers.measure import Events, outcome_of
from tests.servers.work import LONG_WORK, WORK, named
from tests.support.asgi_servers import running

__all__ = ["ACTS", "KINDS", "MODES", "Rpc", "measure_rpcs"]

ACTS = {"cancel": "the client cancels", "killed": "its process is killed", "deadline": "deadline"}
KINDS = {"wait": "coroutine", "stream": "stream", "thread": "function in a thread"}
MODES = {"own": "its own cancel", "ours": "`Interceptor()`"}
#: Seconds; before it the work has begun.
_DEADLINE = 2.0


@dataclass(frozen=True, slots=True)
class Rpc:
    """One RPC that is left."""

    mode: str
    kind: str
    act: str

    @property
    def names(self) -> frozenset[str]:
        """The outcome must have one of these, where it is ours."""
        return frozenset({"DEADLINE" if self.act == "deadline" else "RESET"})

    @property
    def request_name(self) -> str:
        """What it sends. Its work ends by the leave alone where that must be heard."""
        if self.mode == "ours":
            return named(str(self), LONG_WORK)
        return named(str(self), WORK + (_DEADLINE if self.act == "deadline" else 0))

    def accepts(self, outcome: Outcome) -> bool:
        return self.mode == "own" or outcome.name in self.names

    def __str__(self) -> str:
        return f"grpc-{self.mode}-{self.kind}-{self.act}"


def measure_rpcs() -> dict[Rpc, Outcome]:
    """Measure all of them."""
    outcomes: dict[Rpc, Outcome] = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as ends:
        log = Path(folder) / "log"
        events = ends.enter_context(contextlib.closing(Events(Path(folder) / "events")))
        words = ["tests.servers.grpc_server"]
        ends.enter_context(running(words, fds=[], events=events.path, log=log))
        serving = events.wait_for("", "serving")
        assert serving is not None, log.read_text()
        with ThreadPoolExecutor() as pool:
            for found in pool.map(
                lambda each: _leave(events, serving[each[0]], *each), product(MODES, ACTS)
            ):
                outcomes |= found
    return outcomes


def _leave(events: Events, port: int, mode: str, act: str) -> dict[Rpc, Outcome]:
    rpcs = [Rpc(mode, kind, act) for kind in KINDS]
    words = [str(port), *(word for rpc in rpcs for word in ("--rpc", rpc.kind, rpc.request_name))]
    if act == "deadline":
        words += ["--timeout", str(_DEADLINE)]
    with _client(words) as client:
        for rpc in rpcs:
            assert events.wait_for(rpc.request_name, "ready"), f"{rpc} did not begin"
        started = [
            cast("dict[str, int]", events.wait_for(rpc.request_name, "started")) for rpc in rpcs
        ]
        at_ns = [time.monotonic_ns()] * len(rpcs)
        if act == "cancel":
            cast("IO[bytes]", client.stdin).write(b"\n")
            cast("IO[bytes]", client.stdin).flush()
        elif act == "killed":
            client.kill()
        else:
            at_ns = [line["at_ns"] + int(_DEADLINE * 1e9) for line in started]
        outcomes = {}
        for rpc, left_at in zip(rpcs, at_ns, strict=True):
            outcome = outcome_of(events, rpc.request_name, left_at)
            # A deadline counts from the call on, and is a little earlier than from the work on.
            outcomes[rpc] = replace(outcome, ms=max(outcome.ms, 0.0))
        return outcomes


@contextlib.contextmanager
def _client(words: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "tests.servers.grpc_client", *words]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as client:
        try:
            yield client
        finally:
            client.kill()
