"""What the engine pays per step for looking at cancel flags, beside the step itself.

A step looks once at all flags before it is planned, glances at those of the running rows before
each layer, and reads each row's own right before a token of it is handed out. Each kind is
repeated alone; steps take turns with them. Nobody leaves: that is the case which every step
pays for.
"""

import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from bench._flag_steps import NUM_COUNTED, FlagSteps
from bench._harness import Report, run_command
from bench._requests import read_counts

__all__ = ["Config", "run"]

REPOSITORY = Path(__file__).parent.parent
COUNTED_ROWS = 8


@dataclass(frozen=True, slots=True)
class Config:
    """How much is measured.

    Attributes:
        num_rows: requests that decode, for each table.
        num_waiting: that wait meanwhile; they are looked at, too.
        num_rounds: of each table, one sample each.
        num_steps: in one sample.
        num_calls: of a look or a read, in one sample.
        has_instructions: count them with callgrind, too.
    """

    num_rows: tuple[int, ...]
    num_waiting: int
    num_rounds: int
    num_steps: int
    num_calls: int
    has_instructions: bool


FULL = Config((1, 8, 32), 256, 40, 10, 2_000, True)
QUICK = Config((1, 32), 256, 8, 4, 500, False)


def run(config: Config) -> Report:
    """Measure all of it."""
    report = Report("flag_check", asdict(config))
    for num_rows in config.num_rows:
        _measure(report, config, num_rows)
    if config.has_instructions:
        _count(report)
    return report


def _measure(report: Report, config: Config, num_rows: int) -> None:
    steps = FlagSteps(num_rows, num_waiting=config.num_waiting)
    samples: dict[str, list[float]] = {name: [] for name in steps.parts}
    for round_ in range(config.num_rounds + 1):
        for name, part in steps.parts.items():
            count = config.num_steps if name == "step" else config.num_calls
            start_ns = time.thread_time_ns()
            part(count)
            # The first round is the warm-up.
            if round_:
                samples[name].append((time.thread_time_ns() - start_ns) / count / 1000)
    of = f"{num_rows} that decode, {config.num_waiting} that wait"
    report.add(f"a step, {of}", "us", samples["step"])
    report.add(f"a look at all flags, {of}", "us", samples["look"])
    report.add(f"a glance at those of the running, {of}", "us", samples["glance"])
    report.add(f"a read of one request's flags, {of}", "us", samples["read"])
    report.add(
        f"flag checks of a step, {of}",
        "% of it",
        [
            100 * steps.cost(look, glance, read) / step
            for step, look, glance, read in zip(*samples.values(), strict=True)
        ],
    )


def _count(report: Report) -> None:
    if not shutil.which("valgrind"):
        report.notes.append("instructions were not counted: valgrind is not installed")
        return
    with tempfile.TemporaryDirectory() as folder:
        under = ["valgrind", "-q", "--tool=callgrind", "--instr-atstart=no"]
        under.append(f"--callgrind-out-file={folder}/out")
        command = [*under, sys.executable, "-m", "bench._flag_steps", str(COUNTED_ROWS)]
        subprocess.run(command, cwd=REPOSITORY, check=True)
        counts = read_counts(Path(folder))
    step, look, glance, read = (counts[name] / NUM_COUNTED[name] for name in NUM_COUNTED)
    cost = FlagSteps(COUNTED_ROWS).cost(look, glance, read)
    of = f"{COUNTED_ROWS} that decode"
    report.add(f"a step, {of}", "instructions", [step])
    report.add(f"flag checks of a step, {of}", "instructions", [cost])
    report.notes.append(
        f"flag checks of a step, {of}: {100 * cost / step:.3f} % of its instructions"
    )


def main() -> None:
    run_command("flag_check", lambda is_quick: run(QUICK if is_quick else FULL))


if __name__ == "__main__":
    main()
