"""The arithmetic and the form of every benchmark here.

Samples of what is measured and of its baseline are taken in turn in one run, so
that a change of the machine's speed meets both. A row describes one set of
samples; a ratio compares two sets pair by pair, with a bootstrap interval in
which the pairs are drawn together. Intervals are of 95 %.
"""

import argparse
import datetime
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bench._machine import MachineFacts

__all__ = ["CURVE", "Ratio", "Report", "Row", "median_of_ratios", "ratio_of_medians", "run_command"]

BENCH_DIR = Path(__file__).parent

#: Percentiles of a row beyond its quartiles, each reported only where at least
#: one sample lies beyond it.
TAIL = (90.0, 99.0, 99.9)
#: Percentiles of a row's curve, for plots.
CURVE = (*range(0, 100, 2), 99.0, 99.5, 99.9, 100.0)
NUM_RESAMPLES = 1000

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Row:
    """One set of samples.

    Attributes:
        name: what was measured.
        unit: of every number but ``count``.
        count: samples taken.
        median: and ``low`` and ``high``, the bounds of its interval.
        p25: the lower quartile, and ``p75`` the upper.
        tail: further percentiles, by names such as "p99.9".
        curve: the percentiles of ``CURVE``, where asked for.
    """

    name: str
    unit: str
    count: int
    median: float
    low: float
    high: float
    p25: float
    p75: float
    tail: dict[str, float]
    curve: tuple[float, ...] = ()

    @classmethod
    def of(
        cls, name: str, unit: str, samples: Sequence[float], *, has_curve: bool = False
    ) -> "Row":
        """Describe samples.

        Raises:
            ValueError: there are none.
        """
        if not samples:
            raise ValueError(f"row {name!r}: no samples, so there is nothing to describe")
        values = np.asarray(samples, dtype=np.float64)
        low, high = _interval(lambda drawn: np.median(values[drawn], axis=1), len(values))
        p25, median, p75 = (float(p) for p in np.percentile(values, (25, 50, 75)))
        tail = {
            f"p{q:g}": float(np.percentile(values, q))
            for q in TAIL
            if round(len(values) * (100 - q), 6) >= 100
        }
        curve = tuple(float(p) for p in np.percentile(values, CURVE)) if has_curve else ()
        return cls(name, unit, len(values), median, low, high, p25, p75, tail, curve)

    def to_json(self) -> dict[str, Any]:
        """The row as results files have it: the tail's percentiles beside the others."""
        fields = asdict(self)
        tail: dict[str, float] = fields.pop("tail")
        curve: tuple[float, ...] = fields.pop("curve")
        return fields | tail | ({"curve": list(curve)} if curve else {})


@dataclass(frozen=True, slots=True)
class Ratio:
    """How what was measured compares with its baseline: ``ratio`` within ``low`` and ``high``."""

    name: str
    baseline: str
    ratio: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.name}: {self.ratio:.3f} x {self.baseline} [{self.low:.3f}, {self.high:.3f}]"


def ratio_of_medians(
    name: str, baseline_name: str, *, measured: Sequence[float], baseline: Sequence[float]
) -> Ratio:
    """Compare two medians. For latencies, whose single samples say little."""
    above, below = _pairs(name, measured, baseline)
    ratio = float(np.median(above) / np.median(below))
    low, high = _interval(
        lambda drawn: np.median(above[drawn], axis=1) / np.median(below[drawn], axis=1),
        len(above),
    )
    return Ratio(name, baseline_name, ratio, low, high)


def median_of_ratios(
    name: str, baseline_name: str, *, measured: Sequence[float], baseline: Sequence[float]
) -> Ratio:
    """Compare each sample with its partner. For costs: each is an average already."""
    above, below = _pairs(name, measured, baseline)
    ratios = above / below
    low, high = _interval(lambda drawn: np.median(ratios[drawn], axis=1), len(ratios))
    return Ratio(name, baseline_name, float(np.median(ratios)), low, high)


def _pairs(
    name: str, measured: Sequence[float], baseline: Sequence[float]
) -> tuple[Floats, Floats]:
    if not measured or len(measured) != len(baseline):
        raise ValueError(
            f"ratio {name!r}: {len(measured)} samples against {len(baseline)}, must be pairs"
        )
    return np.asarray(measured, dtype=np.float64), np.asarray(baseline, dtype=np.float64)


def _interval(
    statistic: Callable[[npt.NDArray[np.int64]], Floats], count: int
) -> tuple[float, float]:
    """The percentile bootstrap: `statistic` maps drawn indices [num_resamples, count] to one
    value a resample. Seeded, so that the same samples give the same interval.
    """
    random = np.random.default_rng(0)
    # A few rows of indices at a time: all at once would be gigabytes for large counts.
    values = [
        statistic(random.integers(0, count, size=(100, count))) for _ in range(NUM_RESAMPLES // 100)
    ]
    low, high = np.percentile(np.concatenate(values), (2.5, 97.5))
    return float(low), float(high)


@dataclass(slots=True)
class Report:
    """The results of one benchmark, to print and to keep."""

    bench: str
    config: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    ratios: list[Ratio] = field(default_factory=list)
    #: What was left out and why, and what else a reader must know.
    notes: list[str] = field(default_factory=list)
    machine: MachineFacts = field(default_factory=MachineFacts.read)

    def add(
        self, name: str, unit: str, samples: Sequence[float], *, has_curve: bool = False
    ) -> None:
        """Describe samples in a row of their own."""
        self.rows.append(Row.of(name, unit, samples, has_curve=has_curve))

    def to_json(self) -> dict[str, Any]:
        """The schema of ``bench/results/*.json``."""
        return {
            "bench": self.bench,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "machine": asdict(self.machine),
            "config": self.config,
            "notes": self.notes,
            "rows": [row.to_json() for row in self.rows],
            "ratios": [asdict(ratio) for ratio in self.ratios],
        }

    def write(self, path: Path) -> None:
        """Write the results as JSON, floats to five digits."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(_rounded(self.to_json()), indent=1) + "\n")

    def __str__(self) -> str:
        columns = ["", "unit", "count", "median", "p25", "p75", *(f"p{q:g}" for q in TAIL)]
        table = [columns]
        for row in self.rows:
            numbers = [row.median, row.p25, row.p75]
            table.append(
                [row.name, row.unit, str(row.count)]
                + [_brief(number) for number in numbers]
                + [_brief(row.tail.get(column)) for column in columns[6:]]
            )
        widths = [max(len(line[i]) for line in table) for i in range(len(columns))]
        lines = [
            "  ".join(
                cell.ljust(width) if i < 2 else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in table
        ]
        return "\n".join(lines + [str(ratio) for ratio in self.ratios] + self.notes)


def _brief(number: float | None) -> str:
    return "" if number is None else f"{number:.{0 if abs(number) >= 1000 else 2}f}"


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return value


def run_command(
    name: str, run: Callable[[bool], Report], arguments: Sequence[str] | None = None
) -> None:
    """The command line that every benchmark has: run, print, and write the results.

    Args:
        name: of the benchmark and of its results file.
        run: called with whether a quick run was asked for.
        arguments: without the program's name; None takes the process's own.
    """
    parser = argparse.ArgumentParser(prog=f"python -m bench.{name}")
    parser.add_argument(
        "--quick", action="store_true", help="under 30 seconds; results go to bench/build"
    )
    parser.add_argument("--out", type=Path, help="where the results go (default: bench/results)")
    options = parser.parse_args(arguments)
    report = run(options.quick)
    folder = BENCH_DIR / ("build" if options.quick else "results")
    path = options.out or folder / f"{name}.json"
    report.write(path)
    print(report)
