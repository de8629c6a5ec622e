"""Clients that vanish behind a cut cable, between two network namespaces."""

import contextlib
import time

import pytest

from disconnect_watch import CancelToken, Connection, Reason, Watcher
from tests.support.net import Pair, fill
from tests.support.netns import cable

#: What a machine with other work may add to the bound, seconds. Without a cap on the
#: kernel's back-off the last of the cases would take five.
SLACK = 2.0


@pytest.mark.slow
def test_each_way_to_vanish_is_told_within_the_bound_and_no_sooner_than_the_cut() -> None:
    with contextlib.ExitStack() as stack:
        link = stack.enter_context(cable())
        watcher = stack.enter_context(Watcher())

        def watched() -> tuple[Pair, Connection, CancelToken]:
            pair = stack.enter_context(link.connected())
            conn = stack.enter_context(watcher.attach(pair.server, vanish_after=2))
            token = CancelToken()
            conn.arm(token)
            return pair, conn, token

        idle, in_flight, blocked = watched(), watched(), watched()
        everyone = (idle, in_flight, blocked)
        # A client that does not read, for longer than the bound. By its end the kernel
        # asks as seldom as it ever will.
        fill(blocked[0].server)
        deadline = time.monotonic() + 7
        while time.monotonic() < deadline:
            assert not any(token.wait(0.1) for _, _, token in everyone)

        link.cut()
        cut_at = time.monotonic()
        in_flight[0].server.send(b"x")
        for _, conn, token in everyone:
            bound = conn.info().vanish_bound
            assert bound is not None
            assert token.wait(bound + 5)
            assert token.reason is Reason.TIMED_OUT
            told_at = token.cancelled_at
            assert told_at is not None
            assert 0 < told_at - cut_at <= bound + SLACK
