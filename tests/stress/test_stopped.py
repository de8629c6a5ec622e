"""Our server is stopped (SIGSTOP) while clients come and leave, and goes on: both ledgers agree."""

import asyncio
import os
import signal
from collections.abc import Callable

import pytest

from disconnect_watch.stress import Point, StressOptions, Way, parse_target, run_stress
from disconnect_watch.stress.client import Outcome
from disconnect_watch.stress.generate import GenerateExchange
from disconnect_watch.stress.tally import Counts
from tests.support.command import Process, running

NUM_STAY, NUM_LEAVE = 6, 60
#: Clients that have ended when the server stops, and when it goes on.
STOPS, GOES_ON = 10, 40


def stopping(process: Process) -> Callable[[Counts], None]:
    """Stops the server and lets it go on, as clients end."""

    def signalled(counts: Counts) -> None:
        if counts.num_ended == STOPS:
            os.kill(process.process.pid, signal.SIGSTOP)
        elif counts.num_ended == GOES_ON:
            os.kill(process.process.pid, signal.SIGCONT)

    return signalled


@pytest.mark.slow
def test_who_left_while_the_server_was_stopped_is_not_worked_for() -> None:
    with running() as process:
        url = f"http://127.0.0.1:{process.port}/v2/models/tiny/generate_stream"
        target = parse_target(url)
        options = StressOptions(
            num_stay=NUM_STAY,
            num_leave=NUM_LEAVE,
            concurrency=NUM_STAY + 4,  # those who stay wait for it all at once, at worst
            ways=(Way.FIN, Way.RST, Way.BEHIND_REQUEST),
            points=(Point.AT_ONCE, Point.WAITING),
            seed=2,
            timeout=120.0,
            max_seconds=float("inf"),
            settle=60.0,
            metrics=target.with_path("/metrics"),
            same=True,
        )
        exchange = GenerateExchange(target, max_tokens=4)
        report = asyncio.run(
            run_stress(target, exchange, options=options, on_progress=stopping(process))
        )
    assert report.holds, report.as_text()
    assert report.counts.outcomes[Outcome.ANSWERED] >= NUM_STAY
    assert report.counts.num_ended == NUM_STAY + NUM_LEAVE
