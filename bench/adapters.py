"""What our uvicorn protocols and ``CancelOnDisconnect`` add to a request under uvicorn."""

import shutil
import tempfile
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench._harness import Report, median_of_ratios, run_command
from bench._requests import Server, count_instructions
from bench._uvicorn_server import NUM_REPLY_BYTES, VARIANTS

__all__ = ["Config", "run"]


@dataclass(frozen=True, slots=True)
class Config:
    """How much is measured.

    Attributes:
        num_rounds: of load, each of every variant in turn.
        duration: seconds of load in one sample.
        has_instructions: count instructions a request with callgrind.
    """

    num_rounds: int
    duration: float
    has_instructions: bool


FULL = Config(60, 0.2, True)
QUICK = Config(10, 0.1, False)

SERVER: dict[str, Any] = {
    "module": "bench._uvicorn_server",
    "num_reply_bytes": NUM_REPLY_BYTES,
}


def run(config: Config) -> Report:
    """Measure, and say what each of ours adds."""
    report = Report("adapters", asdict(config))
    _report(report, "CPU a request", "us", _cpu(config))
    if config.has_instructions and shutil.which("valgrind"):
        with tempfile.TemporaryDirectory() as folder:
            counts = count_instructions(Path(folder), variants=VARIANTS, **SERVER)
        samples = {name: [count] for name, count in counts.items()}
        _report(report, "instructions a request", "1", samples)
    else:
        report.notes.append("instructions were not counted: valgrind takes a minute for it")
    return report


def _cpu(config: Config) -> dict[str, list[float]]:
    cpu: dict[str, list[float]] = defaultdict(list)
    with Server(**SERVER) as server:
        for name in VARIANTS:
            server.load(name, duration=config.duration)
        for _ in range(config.num_rounds):
            for name in VARIANTS:
                cpu[name].append(server.load(name, duration=config.duration).cpu_us)
    return cpu


def _report(report: Report, what: str, unit: str, costs: dict[str, list[float]]) -> None:
    named = {f"{what}, {name}": samples for name, samples in costs.items()}
    for name, samples in named.items():
        report.add(name, unit, samples)
    for name in VARIANTS:
        base = name.split(",")[0]
        if name != base:
            ours, theirs = named[f"{what}, {name}"], named[f"{what}, {base}"]
            added = [mine - own for mine, own in zip(ours, theirs, strict=True)]
            report.add(f"{what}, {name}: added", unit, added)
            report.ratios.append(
                median_of_ratios(
                    f"{what}, {name}", f"{what}, {base}", measured=ours, baseline=theirs
                )
            )


if __name__ == "__main__":
    run_command("adapters", lambda is_quick: run(QUICK if is_quick else FULL))
