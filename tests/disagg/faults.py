"""Fault injection with real processes: which release freed the blocks, and after how long.

    python -m tests.disagg.faults [--leaves 200] [--stops 10] [--kills 3]

One request at a time goes through the proxy, and at a random instant of it something happens to
one of the four processes; half of the instants lie before its first token, where a prompt is
computed, handed over and fetched. Then all pools that can be looked at are, until they are as
before. The time is from the fault to the first look that finds nothing held; a look costs some
milliseconds itself.
"""

import argparse
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.command import Process
from tests.support.http import Client
from tests.support.net import PATIENCE, wait_until
from tests.support.pd import Cluster, Node, cluster

__all__ = ["FAULTS", "Injector", "Observed"]

PATH = "/v2/models/tiny/generate_stream"
#: Reads for some time, and decodes for some time more.
TEXT = "The class of the watcher " * 200
NUM_TOKENS = 200
LEASE = 1.0


@dataclass
class Observed:
    """What one fault did.

    Attributes:
        instant: seconds from the request to the fault.
        phase: how far the request had come, by what the client had of it.
        seconds: from the fault until no pool held anything.
        kinds: the releases of the prefill node meanwhile; empty where it had nothing to release.
    """

    fault: str
    instant: float
    phase: str
    seconds: float
    kinds: tuple[str, ...] = field(default_factory=tuple)


class Injector:
    """A cluster, and what happens to it."""

    def __init__(self, found: Cluster, *, seed: int) -> None:
        self._cluster = found
        self._random = random.Random(seed)
        self._num_bodies = 0
        self.wait_until_whole()
        figures = self._run()
        assert figures is not None, "a request was refused, though nothing has happened yet"
        #: Seconds to the first token, and to the last.
        self.first, self.span = figures

    def inject(self, fault: str) -> Observed:
        """Let it happen to one request at a random instant, and mend what was broken."""
        (prefill,), (decode,) = self._cluster.prefills, self._cluster.decodes
        before = prefill.released()
        instant = self._random.uniform(0, self._random.choice((self.first, self.span)))
        with Client(self._cluster.port) as client:
            begun = time.monotonic()
            client.post(PATH, self._body())
            phase = self._read_until(client, begun + instant)
            client.sock.settimeout(PATIENCE)
            happened = time.monotonic()
            watched = [node for node in (prefill, decode) if not FAULTS[fault].hits(self, node)]
            with FAULTS[fault].happens(self):
                if FAULTS[fault].is_of_client:
                    client.sock.close()
                wait_until(lambda: all(node.is_idle() for node in watched))
                seconds = time.monotonic() - happened
                after = before if prefill not in watched else prefill.released()
        kinds = tuple(kind for kind in after if after[kind] > before[kind])
        self._cluster.wait_until_idle()
        return Observed(fault, instant, phase, seconds, kinds)

    @property
    def proxy(self) -> Process:
        assert self._cluster.proxy is not None
        return self._cluster.proxy

    @property
    def prefill(self) -> Node:
        return self._cluster.prefills[0]

    @property
    def decode(self) -> Node:
        return self._cluster.decodes[0]

    def restart(self, process: Process) -> None:
        """Bring back what was killed, and wait until the proxy knows."""
        if process is self.proxy:
            port = process.port
            process.close()
            self._cluster.start_proxy(port=port)
        for node in self._cluster.nodes:
            if node.process is process:
                self._cluster.restart(node)
        self.wait_until_whole()

    def wait_until_whole(self) -> None:
        """Wait until a request goes through both nodes again."""

        def is_whole() -> bool:
            before = self.prefill.released()["in_band"]
            self._run()
            return self.prefill.released()["in_band"] > before

        wait_until(is_whole)

    def _body(self) -> dict[str, object]:
        """A request whose prompt no node has seen, so that all of it is computed and fetched."""
        self._num_bodies += 1
        text = f"{self._num_bodies}. {TEXT}"
        return {"text_input": text, "max_tokens": NUM_TOKENS, "ignore_eos": True}

    def _run(self) -> tuple[float, float] | None:
        """One request, undisturbed; None if it was refused."""
        begun = time.monotonic()
        with Client(self._cluster.port) as client:
            client.post(PATH, self._body())
            if b" 200 " not in client.read_until(b"\r\n\r\n"):
                return None
            client.read_until(b"data: ")
            first = time.monotonic() - begun
            client.read_until(b"0\r\n\r\n")
        return first, time.monotonic() - begun

    def _read_until(self, client: Client, deadline: float) -> str:
        """Read what comes until then; tells how far it came."""
        told = b""
        while (left := deadline - time.monotonic()) > 0:
            client.sock.settimeout(left)
            try:
                data = client.sock.recv(1 << 16)
            except TimeoutError:
                break
            told += data
            if not data or b"0\r\n\r\n" in told:
                return "ended"
        return "decode" if told else "before the first token"


@dataclass(frozen=True)
class Fault:
    """One thing that can happen.

    Attributes:
        process: to which; None for the client, which leaves.
        signal: that it gets.
    """

    process: Callable[[Injector], Process] | None
    signal: signal.Signals | None

    @property
    def is_of_client(self) -> bool:
        return self.process is None

    def hits(self, injector: Injector, node: Node) -> bool:
        """Whether the node cannot be asked while it lasts."""
        return self.process is not None and self.process(injector) is node.process

    @contextmanager
    def happens(self, injector: Injector) -> Iterator[None]:
        """Do it, and undo it at the end."""
        if self.process is None or self.signal is None:
            yield
            return
        process = self.process(injector)
        os.kill(process.process.pid, self.signal)
        try:
            yield
        finally:
            if self.signal is signal.SIGSTOP:
                os.kill(process.process.pid, signal.SIGCONT)
                injector.wait_until_whole()
            else:
                injector.restart(process)


FAULTS = {
    "client leaves": Fault(None, None),
    "proxy SIGSTOP": Fault(lambda injector: injector.proxy, signal.SIGSTOP),
    "prefill SIGSTOP": Fault(lambda injector: injector.prefill.process, signal.SIGSTOP),
    "decode SIGSTOP": Fault(lambda injector: injector.decode.process, signal.SIGSTOP),
    "proxy kill -9": Fault(lambda injector: injector.proxy, signal.SIGKILL),
    "prefill kill -9": Fault(lambda injector: injector.prefill.process, signal.SIGKILL),
    "decode kill -9": Fault(lambda injector: injector.decode.process, signal.SIGKILL),
}


def table(found: list[Observed]) -> str:
    """One row for each fault and phase."""
    lines = [
        "| fault | when | requests | freed by | until nothing is held: median, 99 %, max |",
        "|---|---|---|---|---|",
    ]
    for fault in FAULTS:
        for phase in ("before the first token", "decode", "ended"):
            rows = [row for row in found if (row.fault, row.phase) == (fault, phase)]
            if not rows:
                continue
            seconds = sorted(row.seconds for row in rows)
            kinds = Counter(kind for row in rows for kind in (row.kinds or ("nothing was kept",)))
            freed = ", ".join(f"{kind} {count}" for kind, count in kinds.most_common())
            figures = (
                statistics.median(seconds),
                seconds[max(0, -(-99 * len(seconds) // 100) - 1)],
                seconds[-1],
            )
            times = ", ".join(f"{1000 * each:.0f} ms" for each in figures)
            lines.append(f"| {fault} | {phase} | {len(rows)} | {freed} | {times} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.disagg.faults", description=__doc__)
    parser.add_argument("--leaves", type=int, default=200, help="clients that leave")
    parser.add_argument("--stops", type=int, default=10, help="SIGSTOPs of each process")
    parser.add_argument("--kills", type=int, default=3, help="kill -9s of each process")
    parser.add_argument("--transfer", choices=("shm", "tcp"), default="shm")
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    counts = {
        fault: asked.leaves
        if fault == "client leaves"
        else asked.stops
        if "SIGSTOP" in fault
        else asked.kills
        for fault in FAULTS
    }
    found: list[Observed] = []
    with (
        tempfile.TemporaryDirectory() as directory,
        cluster(Path(directory), transfer=asked.transfer, lease=LEASE) as processes,
    ):
        injector = Injector(processes, seed=asked.seed)
        print(
            f"{asked.transfer}, lease {LEASE} s; the first token takes {injector.first:.3f} s, all "
            f"of a request {injector.span:.3f} s"
        )
        for fault, count in counts.items():
            found += [injector.inject(fault) for _ in range(count)]
            print(f"{fault}: {count}", flush=True)
    print(table(found))
    late = [row for row in found if row.seconds > LEASE + 1.0 and row.fault == "client leaves"]
    for row in late:
        print(f"too late: {row}", file=sys.stderr)
    return 1 if late else 0


if __name__ == "__main__":
    sys.exit(main())
