"""What a client that leaves between prefill and decode strands, by what lets its blocks go.

A decode node is held, so that each request is where the ways differ: its prompt is computed and
kept, and nobody has fetched it. Then its client leaves. Stranded are the seconds from there on for
which its blocks are kept, summed over them, as the prefill node's own counter has it.

Ours is the real proxy. In the other ways the benchmark stands for a proxy that keeps its connection
to the prefill node, as one does whose own answer does not depend on it, and says nothing; cancels
by the node's endpoint; or has no lease either, where what is told is what was stranded when it
stopped to look.
"""

import os
import signal
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from bench._harness import Report, run_command
from tests.support.http import Client
from tests.support.net import wait_until
from tests.support.pd import Cluster, Node, cluster

__all__ = ["WAYS", "Config", "run"]

PATH = "/v2/models/tiny/generate_stream"
TEXT = "The class of the watcher " * 100
LEASE = 5.0


@dataclass(frozen=True, slots=True)
class Config:
    """How much is measured.

    Attributes:
        num_requests: clients that leave, for each way.
        num_slow: the same, for the ways in which each takes seconds.
        look_seconds: for how long it is looked at what nothing lets go of.
    """

    num_requests: int
    num_slow: int
    look_seconds: float


FULL = Config(20, 3, 10.0)
QUICK = Config(2, 1, 1.0)


def run(config: Config) -> Report:
    """Measure all ways, in turn."""
    report = Report("pd", {**asdict(config), "lease": LEASE})
    samples: dict[str, list[float]] = defaultdict(list)
    with TemporaryDirectory() as directory, cluster(Path(directory), lease=LEASE) as found:
        bench = _Bench(found, look_seconds=config.look_seconds)
        for number in range(config.num_requests):
            for way, (strand, is_slow) in WAYS.items():
                if number < (config.num_slow if is_slow else config.num_requests):
                    seconds, num_blocks = strand(bench)
                    samples[way].append(seconds)
                    samples[f"{way}, a block"].append(1000 * seconds / num_blocks)
    for way, values in samples.items():
        report.add(f"stranded, {way}", "block-s" if way in WAYS else "ms", values)
    report.notes.append(
        f"{num_blocks:.0f} blocks a request; without a lease the blocks were still kept after "
        f"{config.look_seconds:g} s"
    )
    return report


class _Bench:
    def __init__(self, found: Cluster, *, look_seconds: float) -> None:
        self._cluster = found
        self._look_seconds = look_seconds
        self._prefill = found.prefills[0]
        arguments = (*self._prefill.arguments, "--kv-lease", "86400")
        self._without_lease = Node(found.start(*arguments), arguments)
        self._without_lease.process.wait_until_it_serves(170)
        self._num_requests = 0

    def ours(self) -> tuple[float, float]:
        """The proxy watches its client, and the node the proxy."""
        decode = self._cluster.decodes[0].process.process.pid
        os.kill(decode, signal.SIGSTOP)
        try:
            with Client(self._cluster.port) as client:
                client.post(PATH, self._body())
                return self._stranded(self._prefill, client.sock.close)
        finally:
            os.kill(decode, signal.SIGCONT)
            self._cluster.wait_until_idle()

    def abort_endpoint(self) -> tuple[float, float]:
        """The proxy knows that its client has left, and says so by name."""
        with Client(self._prefill.process.port) as proxy:
            name = self._ask(proxy)
            return self._stranded(
                self._prefill,
                lambda: self._cluster.call(self._prefill, f"/v1/requests/{name}/cancel", {}),
            )

    def lease(self) -> tuple[float, float]:
        """Nobody says anything."""
        with Client(self._prefill.process.port) as proxy:
            self._ask(proxy)
            return self._stranded(self._prefill, lambda: None)

    def nothing(self) -> tuple[float, float]:
        """Nobody says anything, and there is no lease."""
        node = self._without_lease
        with Client(node.process.port) as proxy:
            self._ask(proxy)
            wait_until(lambda: node.gauges()["dw_kv_transfers"] > 0)
            before = node.gauges()
            time.sleep(self._look_seconds)
            after = node.gauges()
            assert after["dw_kv_transfers"] > 0
        wait_until(node.is_idle)
        name = "dw_kv_block_seconds_total"
        return after[name] - before[name], before["dw_kv_retained_blocks"]

    def _stranded(self, node: Node, leave: Callable[[], object]) -> tuple[float, float]:
        """Block-seconds from the leave on, those between the look before and it included."""
        wait_until(lambda: node.gauges()["dw_kv_transfers"] > 0)
        before = node.gauges()
        leave()
        wait_until(node.is_idle)
        name = "dw_kv_block_seconds_total"
        return node.gauges()[name] - before[name], before["dw_kv_retained_blocks"]

    def _ask(self, proxy: Client) -> str:
        """Have a prompt computed as a proxy does; returns by which name."""
        body = self._body()
        name = f"bench-{self._num_requests}"
        proxy.post(
            PATH,
            body,
            x_kv_prefill="1",
            x_request_id=name,
            authorization=f"Bearer {self._cluster.key}",
        )
        proxy.read_until(b"}\n")
        return name

    def _body(self) -> dict[str, object]:
        self._num_requests += 1
        return {"text_input": f"{self._num_requests}. {TEXT}", "max_tokens": 100}


#: And whether each takes seconds.
WAYS: dict[str, tuple[Callable[[_Bench], tuple[float, float]], bool]] = {
    "ours": (_Bench.ours, False),
    "abort endpoint only": (_Bench.abort_endpoint, False),
    "lease only": (_Bench.lease, True),
    "none": (_Bench.nothing, True),
}


def main() -> None:
    run_command("pd", lambda is_quick: run(QUICK if is_quick else FULL))


if __name__ == "__main__":
    main()
