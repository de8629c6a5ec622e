"""How a run went, as text and as JSON; see ``html`` and ``junit`` for the others."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from disconnect_watch.stress.checks import Check
from disconnect_watch.stress.client import Outcome
from disconnect_watch.stress.effect import Effect
from disconnect_watch.stress.ledger import ServerCounts
from disconnect_watch.stress.tally import Counts

__all__ = ["PERCENTILES", "Report", "percentiles_ms"]

#: Of the latencies in a report, and of the curves in its plots.
PERCENTILES = (50.0, 90.0, 99.0, 99.9, 100.0)
_CURVE = (*range(0, 100, 2), 99.0, 99.5, 99.9, 100.0)


@dataclass(frozen=True, slots=True)
class Report:
    """How it went.

    Attributes:
        target: as the user named it.
        seed: with it and the same options, the same clients come again.
        seconds: that the clients took.
        is_interrupted: whether it was stopped before its clients had ended.
        is_server_checked: whether the server tells of its requests, so that both sides
            could be compared.
        checks: those that could be made.
        options: of the run, for who wants to repeat it.
        before, after: the server's counts, where it tells them.
        effect: of who left on another's latency, where that was measured.
    """

    target: str
    seed: int
    seconds: float
    is_interrupted: bool
    is_server_checked: bool
    counts: Counts
    checks: tuple[Check, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    before: ServerCounts | None = None
    after: ServerCounts | None = None
    effect: Effect | None = None

    @property
    def holds(self) -> bool:
        """Whether every check does."""
        return all(check.holds for check in self.checks)

    @property
    def cancels(self) -> bool | None:
        """Whether the server stops its work for who leaves; None where that is not known."""
        if self.is_server_checked:
            return all(check.holds for check in self.checks if "the server" in check.name)
        return None if self.effect is None else self.effect.cancels

    @property
    def num_tokens(self) -> int | None:
        """Generated during the run, where the server tells it."""
        before, after = self.before, self.after
        if before is None or after is None:
            return None
        if before.num_tokens is None or after.num_tokens is None:
            return None
        return after.num_tokens - before.num_tokens

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        counts = self.counts
        latencies = counts.latencies
        return {
            "target": self.target,
            "seed": self.seed,
            "seconds": round(self.seconds, 3),
            "interrupted": self.is_interrupted,
            "server_checked": self.is_server_checked,
            "cancels": self.cancels,
            "options": dict(self.options),
            "planned": counts.num_planned,
            "sent": counts.num_sent,
            **{outcome.value: counts.outcomes[outcome] for outcome in Outcome},
            "open": counts.num_open,
            "left_incomplete": counts.num_left_incomplete,
            "left_reading": counts.num_left_reading,
            "left_around": counts.num_left_around,
            "ways": dict(counts.ways),
            "points": dict(counts.points),
            "errors": dict(counts.errors),
            "clients_per_second": round(counts.num_ended / self.seconds, 1) if self.seconds else 0,
            "latency_ms": {
                "first": percentiles_ms(latencies.first),
                "whole": percentiles_ms(latencies.whole),
            },
            "curve_ms": {
                "percentiles": list(_CURVE),
                "first": list(percentiles_ms(latencies.first, _CURVE).values()),
                "whole": list(percentiles_ms(latencies.whole, _CURVE).values()),
            },
            "by_second": [
                {outcome.value: second[outcome] for outcome in Outcome}
                for second in counts.seconds
            ],
            "server": None if self.after is None else self.after.source,
            "tokens": self.num_tokens,
            "effect": None if self.effect is None else {
                "alone_ms": round(1e3 * self.effect.alone, 3),
                "beside_ms": round(1e3 * self.effect.beside, 3),
                "behind_ms": round(1e3 * self.effect.behind, 3),
                "others": self.effect.num_others,
            },
            "checks": [
                {"name": check.name, "holds": check.holds, "detail": check.detail}
                for check in self.checks
            ],
            "holds": self.holds,
        }  # fmt: skip

    def as_text(self) -> str:
        """For people; a line each."""
        counts = self.counts
        lines = [
            f"{self.target}: {counts.num_sent} of {counts.num_planned} clients in "
            f"{self.seconds:.1f} s, seed {self.seed}{' (interrupted)' * self.is_interrupted}",
            f"  {counts.equation}",
        ]
        if counts.ways:
            ways = ", ".join(f"{way} {count}" for way, count in sorted(counts.ways.items()))
            lines.append(f"  left by {ways}; {counts.num_left_incomplete} in mid-request")
        if counts.latencies.whole:
            found = percentiles_ms(counts.latencies.whole, (50.0, 99.0))
            lines.append(
                f"  who stayed waited {found['p50']:.1f} ms for a whole answer, "
                f"1 in 100 over {found['p99']:.1f} ms"
            )
        lines += [f"  {count} failed: {error}" for error, count in counts.errors.most_common(5)]
        for check in self.checks:
            lines.append(f"  {'ok  ' if check.holds else 'FAIL'} {check.name}: {check.detail}")
        if not self.is_server_checked and self.effect is None:
            lines.append(
                "  --   what the server did for those who left is not known: no metrics that tell"
            )
        lines.append(f"  {self.verdict}")
        return "\n".join(lines)

    @property
    def verdict(self) -> str:
        """Whether it cancels, in a sentence."""
        seen = "" if self.effect is None else f": {self.effect.in_words}"
        if self.cancels is None:
            return f"whether the server cancels cannot be told{seen}"
        return f"the server {'cancels' if self.cancels else 'works on for who left'}{seen}"


def percentiles_ms(
    seconds: Sequence[float], percentiles: tuple[float, ...] = PERCENTILES
) -> dict[str, float]:
    """Percentiles of latencies in milliseconds, by names such as "p99"; none of none."""
    values = sorted(seconds)
    last = len(values) - 1
    return {
        f"p{percentile:g}": round(1e3 * values[round(percentile / 100 * last)], 3)
        for percentile in (percentiles if values else ())
    }
