"""The clients so far: how many ended how, when, and how long those who stayed waited."""

from array import array
from collections import Counter
from dataclasses import dataclass, field

from disconnect_watch.stress.client import Ending, Outcome
from disconnect_watch.stress.plan import ClientPlan, Point

__all__ = ["Counts", "Latencies"]

#: Answers over which the usual time is taken, the last of them.
_NUM_USUAL = 64


@dataclass(slots=True)
class Latencies:
    """Of the clients that stayed and were answered, seconds from when each was due.

    Attributes:
        first: to the first piece of its answer.
        whole: to the last.
    """

    first: "array[float]" = field(default_factory=lambda: array("d"))
    whole: "array[float]" = field(default_factory=lambda: array("d"))

    @property
    def usual(self) -> float:
        """The median of the last whole answers; 0 before there is one."""
        last = sorted(self.whole[-_NUM_USUAL:])
        return last[len(last) // 2] if last else 0.0


@dataclass(slots=True)
class Counts:
    """The clients so far.

    Attributes:
        num_planned: how many there are to be.
        outlasts: whether the server cannot be done with who leaves, see ``Exchange``.
        num_sent: begun; each must end.
        outcomes: of those that ended.
        num_left_incomplete: of those that left, the ones whose request was not complete.
        num_left_reading: of those that left, the ones that had read some of a long answer,
            and were therefore certainly being served.
        num_left_around: of those that left, the ones that the server may have been done with.
        ways, points: of those that left.
        errors: of those that failed.
        texts: of whole answers to those who stay, by digest, where that is asked for.
        seconds: of the run, in which so many ended so.
    """

    num_planned: int
    outlasts: bool = True
    num_sent: int = 0
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    num_left_incomplete: int = 0
    num_left_reading: int = 0
    num_left_around: int = 0
    ways: Counter[str] = field(default_factory=Counter)
    points: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    texts: Counter[str] | None = None
    latencies: Latencies = field(default_factory=Latencies)
    seconds: list[Counter[Outcome]] = field(default_factory=list)

    def add(self, plan: ClientPlan, ending: Ending, *, at: float = 0.0) -> None:
        """Enter one client that ended, ``at`` seconds after the begin of the run."""
        self.outcomes[ending.outcome] += 1
        while len(self.seconds) <= int(at):
            self.seconds.append(Counter())
        self.seconds[int(at)][ending.outcome] += 1
        if ending.outcome is Outcome.FAILED:
            self.errors[ending.error] += 1
        elif ending.outcome is Outcome.LEFT:
            self._add_left(plan, ending)
        elif plan.leave is None:
            self.latencies.first.append(ending.times.first)
            self.latencies.whole.append(ending.times.whole)
            if self.texts is not None:
                self.texts[ending.digest] += 1

    def _add_left(self, plan: ClientPlan, ending: Ending) -> None:
        assert plan.leave is not None
        self.ways[plan.leave.way.value] += 1
        self.points[plan.leave.point.value] += 1
        if not ending.is_request_complete:
            self.num_left_incomplete += 1
        elif not self.outlasts or plan.leave.point is Point.AROUND:
            self.num_left_around += 1
        elif ending.num_pieces:
            self.num_left_reading += 1

    @property
    def num_ended(self) -> int:
        """However they did."""
        return self.outcomes.total()

    @property
    def num_open(self) -> int:
        """Begun and not ended."""
        return self.num_sent - self.num_ended

    @property
    def equation(self) -> str:
        """The conservation of clients, with its numbers."""
        terms = [f"{outcome.value} {self.outcomes[outcome]}" for outcome in Outcome]
        if self.num_open:
            terms.append(f"open {self.num_open}")
        return f"sent {self.num_sent} = " + " + ".join(terms)
