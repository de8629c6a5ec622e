"""What a run measured, as the tables of ``docs/proxies.md``."""

from collections.abc import Mapping, Sequence
from statistics import median

from tests.proxies.cells import ANSWERS, WAYS, Cell
from tests.proxies.measure import Outcome
from tests.proxies.programs import FRONTS
from tests.support.page import DOCS

__all__ = ["PAGE", "tables"]

PAGE = DOCS / "proxies.md"


def tables(outcomes: Mapping[Cell, Sequence[Outcome]]) -> str:
    """One table an answer: a row is a front, a column a way to leave."""
    lines = []
    for answer, title in ANSWERS.items():
        lines += [
            f"### {title[0].upper()}{title[1:]}",
            "",
            "| proxy | " + " | ".join(WAYS.values()) + " |",
            "|---" * (len(WAYS) + 1) + "|",
        ]
        for key, front in FRONTS.items():
            entries = [_entry(outcomes.get(Cell(key, answer, way), ())) for way in WAYS]
            if any(entries):
                lines.append(f"| {front.title} | " + " | ".join(entries) + " |")
        lines.append("")
    return "\n".join(lines)


def _entry(outcomes: Sequence[Outcome]) -> str:
    """What most runs gave, with the median of the times."""
    if not outcomes:
        return ""
    noticed = [outcome for outcome in outcomes if outcome.reason]
    if not noticed:
        return "**never**"
    reasons = [outcome.reason for outcome in noticed]
    words = f"{max(reasons, key=reasons.count)}, {median(each.ms for each in noticed):.1f} ms"
    num_silent = len(outcomes) - len(noticed)
    return f"{words}; never in {num_silent} of {len(outcomes)}" if num_silent else words
