"""Two reports side by side, and whether the second is worse."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Comparison", "compare"]


@dataclass(frozen=True, slots=True)
class Comparison:
    """What is different.

    Attributes:
        rows: what is compared, of the first, of the second, and their ratio where both are
            numbers.
        lost: checks that held in the first, and do not in the second.
    """

    rows: tuple[tuple[str, str, str, str], ...]
    lost: tuple[str, ...]

    @property
    def holds(self) -> bool:
        """Whether the second holds what the first did."""
        return not self.lost

    def as_text(self) -> str:
        """A table."""
        head = ("", "first", "second", "second / first")
        widths = [max(len(row[i]) for row in (head, *self.rows)) for i in range(4)]
        lines = [
            f"{row[0]:<{widths[0]}}  "
            + "  ".join(f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True))
            for row in (head, *self.rows)
        ]
        lines += [f"FAIL {name}: held in the first, not in the second" for name in self.lost]
        return "\n".join(line.rstrip() for line in lines)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "rows": [
                dict(zip(("name", "first", "second", "ratio"), row, strict=True))
                for row in self.rows
            ],
            "lost": list(self.lost),
            "holds": self.holds,
        }


def compare(first: Mapping[str, Any], second: Mapping[str, Any]) -> Comparison:
    """Compare two reports.

    Args:
        first, second: as ``Report.as_dict`` makes them.

    Raises:
        ValueError: one of them is no report.
    """
    try:
        return _compare(first, second)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"cannot compare: not a report of stress, at {error}") from error


def _compare(first: Mapping[str, Any], second: Mapping[str, Any]) -> Comparison:
    rows = [_row(name, first[name], second[name]) for name in ("target", "seed", "cancels")]
    rows += [
        _row(said, first[name], second[name])
        for name, said in (
            ("sent", "clients"),
            ("answered", "answered"),
            ("left", "left"),
            ("failed", "failed"),
            ("clients_per_second", "clients a second"),
            ("tokens", "tokens"),
        )
    ]
    for part, said in (("first", "to the first piece"), ("whole", "to the whole")):
        ours, theirs = first["latency_ms"][part], second["latency_ms"][part]
        rows += [_row(f"{said}, ms, {p}", ours[p], theirs[p]) for p in ours if p in theirs]
    held = {check["name"] for check in first["checks"] if check["holds"]}
    lost = [
        check["name"] for check in second["checks"] if not check["holds"] and check["name"] in held
    ]
    return Comparison(tuple(rows), tuple(lost))


def _row(name: str, first: Any, second: Any) -> tuple[str, str, str, str]:
    ratio = ""
    if name != "seed" and _is_number(first) and _is_number(second) and first:
        ratio = f"{second / first:.2f}"
    return name, _said(first), _said(second), ratio


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _said(value: Any) -> str:
    if value is None:
        return "not known"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)
