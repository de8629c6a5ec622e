"""A real Triton asked at its own HTTP port and through the gateway, in turn.

What a model goes on to do for a client that left, by the model's log; what the gateway costs:
the latency of a small request, chunks a second of many streams, and its CPU.

Needs the venv that ``.ci/triton`` makes.
"""

import asyncio
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from bench._gateway_load import (
    LEAVES,
    chunk_rate,
    infer_seconds,
    work_after_leave,
    work_when_queued,
)
from bench._harness import Report, median_of_ratios, run_command
from tests.support.command import Process, running
from tests.support.real_triton import PROGRAM, RealTriton, real_triton

__all__ = ["Config", "run"]

DIRECT, GATEWAY = "direct", "gateway"
#: Streams at a time, chunks of each, seconds between two.
PACED, UNPACED = (32, 50, 0.02), (8, 300, 0.0)


@dataclass(frozen=True, slots=True)
class Config:
    """How much is measured.

    Attributes:
        num_leaves: clients that leave of each kind, on each way.
        num_rounds: samples of each cost.
        num_infers: requests in a sample.
    """

    num_leaves: int
    num_rounds: int
    num_infers: int


FULL = Config(10, 12, 300)
QUICK = Config(1, 2, 50)


def run(config: Config) -> Report:
    """Measure all of it."""
    if not PROGRAM.exists():
        raise SystemExit(f"{PROGRAM} is not here: .ci/triton makes a venv with it")
    report = Report("gateways", asdict(config))
    with TemporaryDirectory() as folder, real_triton(Path(folder)) as triton:
        url = f"grpc://127.0.0.1:{triton.port}"
        with running("--triton", url, "--log-level", "info", command="gateway") as gateway:
            ports = {DIRECT: triton.http_port, GATEWAY: gateway.port}
            _leaves(report, config, triton, ports)
            asyncio.run(_costs(report, config, gateway, ports))
    return report


def _leaves(report: Report, config: Config, triton: RealTriton, ports: dict[str, int]) -> None:
    samples: dict[str, list[float]] = defaultdict(list)
    for number in range(config.num_leaves):
        for way, port in ports.items():
            for row in LEAVES:
                ms = work_after_leave(triton, port, row, f"{row} {way} {number}")
                samples[f"work after the close, {row}, {way}"].append(ms)
            ms = work_when_queued(triton, port, f"{way} {number}")
            samples[f"work after the close, infer in a queue, {way}"].append(ms)
    for name, values in samples.items():
        report.add(name, "ms", values)


async def _costs(report: Report, config: Config, gateway: Process, ports: dict[str, int]) -> None:
    samples: dict[str, list[float]] = defaultdict(list)
    cpu: dict[str, list[float]] = defaultdict(list)
    for number in range(config.num_rounds + 1):
        for way, port in ports.items():
            before = _cpu_us(gateway)
            took = await infer_seconds(port, config.num_infers)
            spent = _cpu_us(gateway) - before
            if number:  # the first is the warm-up
                samples[f"infer, {way}"].append(took * 1e6)
                cpu["infer"].append(spent / config.num_infers)
            for name, load in (("paced", PACED), ("unpaced", UNPACED)):
                before = _cpu_us(gateway)
                rate = await chunk_rate(port, *load)
                spent = _cpu_us(gateway) - before
                if number:
                    samples[f"chunks, {name}, {way}"].append(rate)
                    cpu[f"a chunk, {name}"].append(spent / (load[0] * load[1]))
    for name, values in samples.items():
        report.add(name, "us" if name.startswith("infer") else "1/s", values)
    for name, values in cpu.items():
        # Of each two, the second is the gateway's; the first says what it does while idle.
        report.add(f"CPU of the gateway, {name}", "us", values[1::2])
    for name in ("infer", "chunks, paced", "chunks, unpaced"):
        through, baseline = f"{name}, {GATEWAY}", f"{name}, {DIRECT}"
        report.ratios.append(
            median_of_ratios(
                through, baseline, measured=samples[through], baseline=samples[baseline]
            )
        )


def _cpu_us(process: Process) -> float:
    """CPU time of all threads of a process."""
    return sum(
        int((task / "schedstat").read_text().split()[0]) / 1000
        for task in Path(f"/proc/{process.process.pid}/task").iterdir()
    )


def main() -> None:
    run_command("gateways", lambda is_quick: run(QUICK if is_quick else FULL))


if __name__ == "__main__":
    main()
