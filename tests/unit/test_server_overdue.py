"""Cancels that have no effect: counted from their bound on, until they have it."""

from typing import Any

import pytest

from disconnect_watch.engine import Outcome
from disconnect_watch.server.overdue import Overdue
from disconnect_watch.server.running import Running
from disconnect_watch.token import CancelToken, Reason

SECOND = 1_000_000_000


class Stream:
    """The outputs of nothing."""

    def __init__(self) -> None:
        self.is_over = False

    def close(self) -> None:
        pass


class Clock:
    def __init__(self) -> None:
        self.ns = 0

    def __call__(self) -> int:
        return self.ns


def running(token: CancelToken | None = None, *, deadline_ns: int = 0) -> tuple[Running, Stream]:
    stream: Any = Stream()

    async def abort() -> Any:
        return None

    made = Running(
        stream,
        abort=abort,
        token=token or CancelToken(),
        prefix="",
        on_first=lambda: None,
        on_end=lambda *_: None,
        deadline_ns=deadline_ns,
    )
    return made, stream


def cancelled_at(token: CancelToken) -> int:
    token.cancel(Reason.FIN)
    return token.cancelled_at_ns


def test_a_cancel_is_overdue_behind_its_bound_until_the_work_is_over() -> None:
    clock = Clock()
    overdue = Overdue(2.0, clock=clock)
    token = CancelToken()
    work, stream = running(token)
    assert overdue.num_overdue([work], [token]) == 0
    at_ns = cancelled_at(token)
    clock.ns = at_ns + 2 * SECOND
    assert overdue.num_overdue([work], []) == 0
    clock.ns += 1
    assert overdue.num_overdue([work], []) == 1
    assert overdue.num_overdue([], [token]) == 1
    assert overdue.num_overdue([work], [token], [at_ns, clock.ns]) == 3
    stream.is_over = True  # though its client has read nothing of that
    assert overdue.num_overdue([work], []) == 0


@pytest.mark.asyncio
async def test_an_abort_and_a_deadline_are_asked_for_without_the_token() -> None:
    clock = Clock()
    overdue = Overdue(2.0, clock=clock)
    late, _ = running(deadline_ns=5 * SECOND)
    clock.ns = 7 * SECOND
    assert overdue.num_overdue([late], []) == 0
    clock.ns += 1
    assert overdue.num_overdue([late], []) == 1
    aborted, _ = running()
    assert aborted.due_at_ns == 0
    await aborted.abort()
    first = aborted.due_at_ns
    await aborted.abort()
    assert aborted.due_at_ns == first > 0


def test_what_nobody_reads_any_more_is_looked_after() -> None:
    clock = Clock()
    overdue = Overdue(2.0, clock=clock)
    work, stream = running()
    over, ended = running()
    ended.is_over = True
    for each in (work, over):
        each.close()
        overdue.left(each)
    clock.ns = work.due_at_ns + 3 * SECOND
    assert overdue.num_overdue([], []) == 1
    stream.is_over = True
    assert overdue.num_overdue([], []) == 0


def test_an_effect_that_came_late_is_counted() -> None:
    overdue = Overdue(2.0)
    for seconds in (1, 2, 3):
        overdue.ended(Outcome("cancelled", flag_at_ns=SECOND, freed_at_ns=(1 + seconds) * SECOND))
    overdue.ended(Outcome("finished"))
    assert overdue.num_late == 1
