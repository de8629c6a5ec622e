"""Clients that leave our server at random, by the million: what it holds must be as at the start.

python -m tests.stress.soak                        a million
python -m tests.stress.soak --num 20000 --json -   the result on standard output
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import uvloop
from prometheus_client.parser import text_string_to_metric_families

from disconnect_watch.stress import Point, Report, StressOptions, parse_target, run_stress
from disconnect_watch.stress.generate import GenerateExchange
from disconnect_watch.stress.target import Target
from tests.support.command import Process, running
from tests.support.net import PATIENCE

__all__ = ["Held", "Soak", "soak"]

#: After as many the server has made what it makes once: buffers, caches, threads.
NUM_WARM_UP = 2000
#: In a round; between rounds both ledgers are compared.
NUM_ROUND = 10_000
#: Bytes by which the server may be larger at the end: what the allocator keeps in pieces.
RSS_SLACK = 32 << 20
#: Of each client that leaves so many stay, whose answers must be right.
STAY_SHARE = 0.02
_PERIOD = 0.05


@dataclass(frozen=True, slots=True)
class Held:
    """What the server holds.

    Attributes:
        num_watched: connections that are watched, that of the metrics' reader among them.
        num_armed: requests whose connection is watched.
        num_blocks: of the KV cache, in use or retained.
        rss_bytes: memory that is resident.
    """

    num_fds: int
    num_threads: int
    num_watched: int
    num_armed: int
    num_blocks: int
    rss_bytes: int

    @classmethod
    def by(cls, process: Process) -> "Held":
        """Look at the process from outside, and at its metrics."""
        root = Path("/proc") / str(process.process.pid)
        fields = dict(
            line.split(":", 1) for line in (root / "status").read_text().splitlines() if ":" in line
        )
        samples = {
            (sample.name, sample.labels.get("state")): int(sample.value)
            for family in text_string_to_metric_families(process.metrics())
            for sample in family.samples
        }
        return cls(
            num_fds=len(list((root / "fd").iterdir())),
            num_threads=int(fields["Threads"]),
            num_watched=samples["dw_connections", None],
            num_armed=samples["dw_watches_armed", None],
            num_blocks=samples["dw_kv_blocks", "used"] + samples["dw_kv_blocks", "retained"],
            rss_bytes=int(fields["VmRSS"].split()[0]) << 10,
        )

    def more_than(self, before: "Held") -> list[str]:
        """Of what there is more, by name."""
        slack = {"rss_bytes": RSS_SLACK}
        return [
            name
            for name, value in asdict(self).items()
            if value > getattr(before, name) + slack.get(name, 0)
        ]


@dataclass(frozen=True, slots=True)
class Soak:
    """What became of it.

    Attributes:
        num_left: clients that left, and ``num_answered`` that had an answer.
        failures: what did not hold in a round; empty where all did.
        more: of what the server holds more than at the start.
        rss_by_round: bytes, behind each round: a plateau, or a slope.
    """

    seed: int
    seconds: float
    num_left: int
    num_answered: int
    before: Held
    after: Held
    failures: list[str]
    more: list[str]
    rss_by_round: list[int]

    @property
    def holds(self) -> bool:
        """Whether each round did, and nothing is held."""
        return not self.failures and not self.more

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"holds": self.holds}


def soak(process: Process, num: int, seed: int) -> Soak:
    """Have ``num`` clients leave a server that runs, and compare.

    Args:
        process: nobody else uses it.
        num: of clients that leave.
        seed: of all that is random.
    """
    target = parse_target(f"http://127.0.0.1:{process.port}/v2/models/tiny/generate_stream")
    _round(target, min(num, NUM_WARM_UP), seed)
    before = Held.by(process)
    began = time.monotonic()
    num_left = num_answered = 0
    failures: list[str] = []
    rss_by_round: list[int] = []
    for index, at in enumerate(range(0, num, NUM_ROUND), start=1):
        report = _round(target, min(NUM_ROUND, num - at), seed + index)
        num_left += report.as_dict()["left"]
        num_answered += report.as_dict()["answered"]
        failures += [f"{c.name}: {c.detail}" for c in report.checks if not c.holds]
        rss_by_round.append(Held.by(process).rss_bytes)
        print(f"{num_left} left, {num_answered} answered", file=sys.stderr, flush=True)
    seconds = time.monotonic() - began
    after = Held.by(process)
    deadline = time.monotonic() + PATIENCE
    while after.more_than(before) and time.monotonic() < deadline:
        time.sleep(_PERIOD)
        after = Held.by(process)
    more = after.more_than(before)
    return Soak(
        seed, round(seconds, 1), num_left, num_answered, before, after, failures, more, rss_by_round
    )


def _round(target: Target, num: int, seed: int) -> Report:
    options = StressOptions(
        num_stay=max(1, int(num * STAY_SHARE)),
        num_leave=num,
        concurrency=32,
        points=tuple(Point),
        max_delay=0.02,
        kept=0.3,
        seed=seed,
        timeout=PATIENCE,
        max_seconds=float("inf"),
        settle=PATIENCE,
        metrics=target.with_path("/metrics"),
        same=True,
    )
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        exchange = GenerateExchange(target, max_tokens=8)
        return runner.run(run_stress(target, exchange, options=options))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.stress.soak", description=__doc__)
    parser.add_argument("--num", type=int, default=1_000_000, help="clients that leave")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", default="-", help="file for the result; - for standard output")
    given = parser.parse_args(arguments)
    with running() as process:
        result = soak(process, given.num, given.seed)
    text = json.dumps(result.as_dict(), indent=1) + "\n"
    if given.json == "-":
        print(text, end="")
    else:
        Path(given.json).write_text(text)
    return 0 if result.holds else 1


if __name__ == "__main__":
    sys.exit(main())
