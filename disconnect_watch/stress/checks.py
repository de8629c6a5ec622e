"""What must hold at the end: of the clients' ledger, and of the server's beside it."""

from dataclasses import dataclass

from disconnect_watch.stress.client import Outcome
from disconnect_watch.stress.ledger import ServerCounts
from disconnect_watch.stress.tally import Counts

__all__ = ["Check", "check_clients", "check_server"]


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that must be so; ``detail`` gives its numbers."""

    name: str
    holds: bool
    detail: str


def check_clients(counts: Counts, *, is_interrupted: bool) -> list[Check]:
    """Hold that every client is accounted for, and that none was failed."""
    failed = counts.outcomes[Outcome.FAILED]
    checks = [
        Check("every client is accounted for", is_interrupted or not counts.num_open,
              counts.equation),
        Check("every answer is right", failed == 0,
              f"{counts.outcomes[Outcome.ANSWERED]} right, {failed} wrong or missing"),
    ]  # fmt: skip
    if counts.texts is not None:
        num_texts = len(counts.texts)
        checks.append(
            Check(
                "every answer is the same",
                num_texts <= 1,
                f"{num_texts} different among {counts.texts.total()} answers to who stayed",
            )
        )
    return checks


def check_server(counts: Counts, before: ServerCounts, after: ServerCounts) -> list[Check]:
    """Hold the server's ledger against the clients'. Nobody else may have used the server.

    A client that left before it had read anything may have been noticed before its
    request was begun, and is then in no count of the engine's; so how many must have
    been cancelled is known to within their number. Clients of an interrupted run that
    were still open may have ended either way, and so may those that left around the end of
    their answer.
    """
    checks = []
    if after.num_finished is not None and before.num_finished is not None:
        checks.append(_check_finished(counts, before, after))
    if after.num_cancelled is not None and before.num_cancelled is not None:
        cancelled = after.num_cancelled - before.num_cancelled
        at_most = counts.outcomes[Outcome.LEFT] - counts.num_left_incomplete
        checks.append(
            Check(
                "the server cancelled what was left",
                counts.num_left_reading <= cancelled <= at_most + counts.num_open,
                f"cancelled {cancelled} of {at_most} left with a complete request, "
                f"{counts.num_left_reading} of them in mid-answer",
            )
        )
    if after.shows_work:
        told = {
            "running": after.num_running,
            "waiting": after.num_waiting,
            "blocks held": after.num_held,
            "cancels open": after.num_unacked,
        }
        checks.append(
            Check(
                "nothing is left behind in the server",
                after.is_idle,
                ", ".join(
                    f"{name} {number}" for name, number in told.items() if number is not None
                ),
            )
        )
    return checks


def _check_finished(counts: Counts, before: ServerCounts, after: ServerCounts) -> Check:
    assert after.num_finished is not None
    assert before.num_finished is not None
    finished = after.num_finished - before.num_finished
    failed = (after.num_failed or 0) - (before.num_failed or 0)
    answered = counts.outcomes[Outcome.ANSWERED]
    at_most = answered + counts.num_left_around + counts.num_open
    around = f", {counts.num_left_around} left as it ended" if counts.num_left_around else ""
    return Check(
        "the server finished what was answered, and nothing else",
        answered <= finished <= at_most and failed == 0,
        f"finished {finished} for {answered} answered{around}, failed {failed}",
    )
