"""Metrics of several processes as those of one server: text of Prometheus, added up.

What a process had counted when it ended stays in the sum, as far as somebody had asked: a counter
that falls would look like a restart of all, and be counted twice.
"""

from dataclasses import dataclass, field

__all__ = ["MetricSum"]


@dataclass(slots=True)
class Family:
    """One metric with all its series.

    Attributes:
        values: by name and labels, as written.
    """

    kind: str = "untyped"
    documentation: str = ""
    values: dict[str, int | float] = field(default_factory=dict)


class MetricSum:
    """A sum of texts, of processes that render the same metrics by the same code."""

    def __init__(self) -> None:
        self._families: dict[str, Family] = {}

    def add(self, text: str, *, only_counted: bool = False) -> None:
        """Add a process's metrics.

        Args:
            only_counted: leave out gauges, which tell of the moment.
        """
        family = Family()
        for line in text.splitlines():
            if line.startswith("#"):
                _, word, name, rest = line.split(" ", 3)
                family = self._families.setdefault(name, Family())
                if word == "TYPE":
                    family.kind = rest
                else:
                    family.documentation = rest
            elif line and not (only_counted and family.kind == "gauge"):
                series, _, number = line.rpartition(" ")
                _add(family.values, series, number)

    def render(self) -> bytes:
        """The sum, as text."""
        lines = []
        for name, family in self._families.items():
            if family.values:
                lines += [f"# HELP {name} {family.documentation}", f"# TYPE {name} {family.kind}"]
                lines += (f"{series} {value}" for series, value in family.values.items())
        return ("\n".join(lines) + "\n").encode()


def _add(values: dict[str, int | float], series: str, number: str) -> None:
    value = int(number) if number.isdigit() else float(number)
    before = values.get(series)
    if before is None:
        values[series] = value
    elif series.partition("{")[0].endswith("_created"):
        values[series] = min(before, value)  # when the first of them began to count
    else:
        values[series] = before + value
