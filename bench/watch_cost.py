"""What watching costs: a call, a request, a connection; and that arming makes no system call."""

import shutil
import tempfile
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path

from bench._call_cost import Costs, c_command, measure_blocks, measure_c_calls, measure_calls
from bench._harness import Report, median_of_ratios, run_command
from bench._http_server import VARIANTS
from bench._requests import Server, count_instructions
from bench._syscalls import arm_command, count_syscalls

__all__ = ["Config", "run"]


@dataclass(frozen=True, slots=True)
class Config:
    """How much is measured.

    Attributes:
        num_rounds: of every table of calls; one sample each.
        num_calls: in one sample of a cheap call.
        num_blocks: in one sample of an ``async with``.
        num_load_rounds: under load, each of every server in turn; 0 leaves it out.
        load_duration: seconds of load in one sample.
        num_connections: attached at once to see the memory of one.
        num_counted: arm+disarm pairs under strace.
        has_instructions: count instructions a request with callgrind.
    """

    num_rounds: int
    num_calls: int
    num_blocks: int
    num_load_rounds: int
    load_duration: float
    num_connections: int
    num_counted: int
    has_instructions: bool


FULL = Config(40, 20_000, 1_000, 30, 0.4, 10_000, 10_000, True)
QUICK = Config(10, 5_000, 300, 5, 0.15, 10_000, 10_000, True)

C_CALLS = {
    "arm_disarm": "arm+disarm in C",
    "alloc_release": "flag alloc+release in C",
    "attach_detach": "attach+detach in C",
    "add_del": "epoll add+del in C",
}


#: What is compared with an empty block, each sample with that of its own round.
ENTERED = ("watch", "watch of a transport", "watch, reading on", "asyncio.timeout(60)")


def run(config: Config) -> Report:
    """Measure all of it."""
    report = Report("watch_cost", asdict(config))
    _report_calls(report, config)
    _report_c_calls(report, config)
    _report_syscalls(report, config)
    _report_blocks(report, config)
    if config.num_load_rounds:
        _report_load(report, config)
    if config.has_instructions:
        _report_instructions(report)
    return report


def _report_calls(report: Report, config: Config) -> None:
    for name, samples in measure_calls(config.num_rounds, config.num_calls).items():
        report.add(name, "ns", samples)


def _report_c_calls(report: Report, config: Config) -> None:
    costs = measure_c_calls(config.num_rounds, config.num_calls, config.num_connections)
    report.add("memory of a connection in C", "bytes", costs.pop("bytes_per_connection"))
    named = {C_CALLS[name]: samples for name, samples in costs.items()}
    for name, samples in named.items():
        report.add(name, "ns", samples)
    for name in ("arm+disarm in C", "attach+detach in C"):
        _compare(report, named, name, "epoll add+del in C")


def _report_syscalls(report: Report, config: Config) -> None:
    if not shutil.which("strace"):
        report.notes.append("system calls were not counted: strace is not installed")
        return
    commands = {
        "through Python": arm_command(config.num_counted),
        "in C": c_command(1, config.num_counted, 0),
    }
    for where, command in commands.items():
        name = f"system calls of {config.num_counted} arm+disarm {where}"
        report.add(name, "calls", [count_syscalls(command)])


def _report_blocks(report: Report, config: Config) -> None:
    for loop, costs in measure_blocks(config.num_rounds, config.num_blocks).items():
        named = {f"{name}, {loop}": samples for name, samples in costs.items()}
        for name, samples in named.items():
            report.add(name, "us", samples)
        for where in (f", {loop}", f", one wait inside, {loop}"):
            for name in ENTERED:
                pairs = zip(named[name + where], named["empty block" + where], strict=True)
                report.add(
                    f"{name}{where}: more than empty", "us", [ours - none for ours, none in pairs]
                )
            _compare(report, named, "watch" + where, "asyncio.timeout(60)" + where)


def _report_load(report: Report, config: Config) -> None:
    rates: Costs = defaultdict(list)
    cpu: Costs = defaultdict(list)
    with Server() as server:
        for variant in VARIANTS:
            server.load(variant, duration=config.load_duration)
        for _ in range(config.num_load_rounds):
            for variant in VARIANTS:
                seen = server.load(variant, duration=config.load_duration)
                rates[variant].append(seen.requests_per_second)
                cpu[variant].append(seen.cpu_us)
    _report_variants(report, rates, "requests a second", "1/s")
    _report_variants(report, cpu, "CPU a request", "us")


def _report_instructions(report: Report) -> None:
    if not shutil.which("valgrind"):
        report.notes.append("instructions were not counted: valgrind is not installed")
        return
    with tempfile.TemporaryDirectory() as folder:
        counts = count_instructions(Path(folder))
    samples = {variant: [count] for variant, count in counts.items()}
    _report_variants(report, samples, "instructions a request", "1")


def _report_variants(report: Report, costs: Costs, what: str, unit: str) -> None:
    named = {f"{what}, {variant}": samples for variant, samples in costs.items()}
    for name, samples in named.items():
        report.add(name, unit, samples)
    for variant in VARIANTS:
        base = variant.split(",")[0]
        if variant != base:
            _compare(report, named, f"{what}, {variant}", f"{what}, {base}")


def _compare(report: Report, costs: Costs, name: str, baseline: str) -> None:
    report.ratios.append(
        median_of_ratios(name, baseline, measured=costs[name], baseline=costs[baseline])
    )


if __name__ == "__main__":
    run_command("watch_cost", lambda is_quick: run(QUICK if is_quick else FULL))
