"""The clients' ledger, what it must say, and how it is told."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from disconnect_watch.stress.client import Ending, Outcome
from disconnect_watch.stress.ledger import ServerCounts
from disconnect_watch.stress.plan import ClientPlan

__all__ = ["Check", "Counts", "Report", "check_clients", "check_server"]


@dataclass(slots=True)
class Counts:
    """The clients so far.

    Attributes:
        num_planned: how many there are to be.
        num_sent: begun; each must end.
        outcomes: of those that ended.
        num_left_incomplete: of those that left, the ones whose request was not complete.
        num_left_reading: of those that left, the ones that had read some of the answer,
            and were therefore certainly being served.
        ways: of those that left.
        errors: of those that failed.
    """

    num_planned: int
    num_sent: int = 0
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    num_left_incomplete: int = 0
    num_left_reading: int = 0
    ways: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)

    def add(self, plan: ClientPlan, ending: Ending) -> None:
        """Enter one client that ended."""
        self.outcomes[ending.outcome] += 1
        if ending.outcome is Outcome.FAILED:
            self.errors[ending.error] += 1
        elif ending.outcome is Outcome.LEFT:
            assert plan.leave is not None
            self.ways[plan.leave.way.value] += 1
            self.num_left_incomplete += not ending.is_request_complete
            self.num_left_reading += ending.num_pieces > 0

    @property
    def num_open(self) -> int:
        """Begun and not ended."""
        return self.num_sent - self.outcomes.total()

    @property
    def equation(self) -> str:
        """The conservation of clients, with its numbers."""
        terms = [f"{outcome.value} {self.outcomes[outcome]}" for outcome in Outcome]
        if self.num_open:
            terms.append(f"open {self.num_open}")
        return f"sent {self.num_sent} = " + " + ".join(terms)


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that must be so; ``detail`` gives its numbers."""

    name: str
    holds: bool
    detail: str


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
    """

    target: str
    seed: int
    seconds: float
    is_interrupted: bool
    is_server_checked: bool
    counts: Counts
    checks: tuple[Check, ...]

    @property
    def holds(self) -> bool:
        """Whether every check does."""
        return all(check.holds for check in self.checks)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        counts = self.counts
        return {
            "target": self.target,
            "seed": self.seed,
            "seconds": round(self.seconds, 3),
            "interrupted": self.is_interrupted,
            "server_checked": self.is_server_checked,
            "planned": counts.num_planned,
            "sent": counts.num_sent,
            **{outcome.value: counts.outcomes[outcome] for outcome in Outcome},
            "open": counts.num_open,
            "left_incomplete": counts.num_left_incomplete,
            "left_reading": counts.num_left_reading,
            "ways": dict(counts.ways),
            "errors": dict(counts.errors),
            "checks": [
                {"name": check.name, "holds": check.holds, "detail": check.detail}
                for check in self.checks
            ],
            "holds": self.holds,
        }

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
        lines += [f"  {count} failed: {error}" for error, count in counts.errors.most_common(5)]
        for check in self.checks:
            lines.append(f"  {'ok  ' if check.holds else 'FAIL'} {check.name}: {check.detail}")
        if not self.is_server_checked:
            lines.append(
                "  --   what the server did for those who left is not known: no dw_ metrics"
            )
        return "\n".join(lines)


def check_clients(counts: Counts, *, is_interrupted: bool) -> list[Check]:
    """Hold that every client is accounted for, and that none was failed."""
    failed = counts.outcomes[Outcome.FAILED]
    return [
        Check("every client is accounted for", is_interrupted or not counts.num_open,
              counts.equation),
        Check("every answer is right", failed == 0,
              f"{counts.outcomes[Outcome.ANSWERED]} right, {failed} wrong or missing"),
    ]  # fmt: skip


def check_server(counts: Counts, before: ServerCounts, after: ServerCounts) -> list[Check]:
    """Hold the server's ledger against the clients'. Nobody else may have used the server.

    A client that left before it had read anything may have been noticed before its
    request was begun, and is then in no count of the engine's; so how many must have
    been cancelled is known to within their number. Clients of an interrupted run that
    were still open may have ended either way.
    """
    finished = after.num_finished - before.num_finished
    cancelled = after.num_cancelled - before.num_cancelled
    failed = after.num_failed - before.num_failed
    answered = counts.outcomes[Outcome.ANSWERED]
    at_most = counts.outcomes[Outcome.LEFT] - counts.num_left_incomplete
    at_least = counts.num_left_reading
    return [
        Check(
            "the server finished what was answered, and nothing else",
            answered <= finished <= answered + counts.num_open and failed == 0,
            f"finished {finished} for {answered} answered, failed {failed}",
        ),
        Check(
            "the server cancelled what was left",
            at_least <= cancelled <= at_most + counts.num_open,
            f"cancelled {cancelled} of {at_most} left with a complete request, "
            f"{at_least} of them in mid-answer",
        ),
        Check(
            "nothing is left behind in the server",
            after.is_idle,
            f"running {after.num_running}, waiting {after.num_waiting}, "
            f"blocks held {after.num_held}, cancels open {after.num_unacked}",
        ),
    ]
