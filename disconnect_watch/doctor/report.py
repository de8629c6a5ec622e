"""What the doctor found, for people and for programs."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from disconnect_watch.doctor.finding import Finding, Status
from disconnect_watch.doctor.trial import TRIAL_AREA, WAYS, Trial

__all__ = ["Report"]

_CELL_WIDTH = 12


@dataclass(frozen=True, slots=True)
class Report:
    """All findings, and the trials that some of them are drawn from."""

    findings: tuple[Finding, ...]
    trials: tuple[Trial, ...] = ()

    @property
    def holds(self) -> bool:
        """Whether nothing is a problem."""
        return all(finding.status is not Status.PROBLEM for finding in self.findings)

    def as_text(self) -> str:
        """For people."""
        return "\n".join(self._lines())

    def as_dict(self) -> dict[str, Any]:
        """For programs; times in seconds."""
        return {
            "holds": self.holds,
            "findings": [asdict(finding) for finding in self.findings],
            "trials": [
                {
                    "setup": trial.setup.name,
                    "means": trial.means,
                    "way": trial.way,
                    "seconds": trial.seconds,
                    "status": trial.status,
                }
                for trial in self.trials
            ],
        }

    def _lines(self) -> Iterator[str]:
        for area, of_area in groupby(self.findings, key=lambda finding: finding.area):
            yield area
            findings = list(of_area)
            width = max(len(finding.name) for finding in findings)
            for finding in findings:
                name = finding.name.ljust(width)
                yield f"  {finding.status:<7}  {name}  {finding.value}".rstrip()
                if finding.advice:
                    yield f"           -> {finding.advice}"
            if area == TRIAL_AREA:
                yield from self._trial_lines()
        num_problems = sum(finding.status is Status.PROBLEM for finding in self.findings)
        yield "no problem" if self.holds else f"{num_problems} problem(s)"

    def _trial_lines(self) -> Iterator[str]:
        """A table: how long after each leave the handler heard of it, by each means."""
        first = max(len(trial.means) for trial in self.trials) + 2
        widths = [max(len(way.in_words), _CELL_WIDTH) for way in WAYS]

        def line(name: str, cells: Iterable[str]) -> str:
            padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
            return "  ".join([f"           {name.ljust(first)}", *padded]).rstrip()

        yield line("", [way.in_words for way in WAYS])
        for setup, of_setup in groupby(self.trials, key=lambda trial: trial.setup):
            yield f"           {setup.name}"
            for means, of_means in groupby(of_setup, key=lambda trial: trial.means):
                yield line(f"  {means}", [_cell(trial) for trial in of_means])


def _cell(trial: Trial) -> str:
    if trial.status is not None:
        return f"answered {trial.status}" if trial.status else "no answer"
    return "never" if trial.seconds is None else f"{1e3 * trial.seconds:.1f} ms"
