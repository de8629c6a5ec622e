"""Whether one leave is noticed by the server behind a proxy, and after what time."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

from tests.proxies.cells import Cell
from tests.proxies.programs import FRONTS
from tests.proxies.visitors import H1, H2, Visitor, path_behind
from tests.support.net import wait_until
from tests.support.upstream import Call, Upstream, body_of

__all__ = ["Outcome", "measure"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the server made of it.

    Attributes:
        reason: what its token says; empty where it worked on to the end.
        ms: from the client's act to the token.
    """

    reason: str
    ms: float = 0.0

    def __str__(self) -> str:
        return f"{self.reason}, {self.ms:.1f} ms" if self.reason else "never"


def measure(cell: Cell, port: int, upstream: Upstream, *, patience: float = 0.0) -> Outcome:
    """Let one of two clients leave; the other must get its whole answer.

    Args:
        cell: what is tried.
        port: of the front.
        upstream: the server behind it.
        patience: seconds to wait for what is not expected to come.
    """
    front = FRONTS[cell.front]
    with _visitors(cell, port) as (stays, leaves):
        stays_call = _ask(stays, upstream, cell, is_buffering=front.is_buffering)
        call = _ask(leaves, upstream, cell, is_buffering=front.is_buffering)
        at_ns = time.monotonic_ns()
        leaves.leave(cell.way)
        if cell.is_noticed:
            wait_until(lambda: call.token.cancelled)
        else:
            with contextlib.suppress(AssertionError):
                wait_until(lambda: call.token.cancelled, patience)
        stays_call.may_finish.set()
        stays.read_whole(body_of(stays_call.path))
        seen_ns = call.token.cancelled_at_ns
        outcome = Outcome(call.reason, (seen_ns - at_ns) / 1e6) if seen_ns else Outcome("")
        if not outcome.reason:
            # The survivor's answer went through the proxy after the leave, and it has done
            # nothing about that.
            call.may_finish.set()
            if cell.way == "half_close":
                leaves.read_whole(body_of(call.path))
    wait_until(lambda: call.outcome and stays_call.outcome)
    assert stays_call.outcome == "whole"
    assert call.outcome == ("stopped" if outcome.reason else "whole")
    if outcome.reason:
        assert upstream.find(path_behind(call.path)) is None, "a request of who left was started"
    upstream.settle()
    return outcome


@contextlib.contextmanager
def _visitors(cell: Cell, port: int) -> Iterator[tuple[Visitor, Visitor]]:
    """Who stays and who leaves: two streams where only a stream is reset, else two connections."""
    stays: Visitor
    leaves: Visitor
    if FRONTS[cell.front].is_h2:
        elder = H2(port)
        stays, leaves = elder, H2(port, beside=elder if cell.way == "rst_stream" else None)
    else:
        stays, leaves = H1(port), H1(port)
    with contextlib.closing(stays), contextlib.closing(leaves):
        yield stays, leaves


def _ask(visitor: Visitor, upstream: Upstream, cell: Cell, *, is_buffering: bool) -> Call:
    path = upstream.name(cell.answer)
    visitor.ask(path)
    call = upstream.wait_for(path)
    if cell.answer != "wait":
        wait_until(lambda: call.num_sent)
        if not is_buffering:
            visitor.read_some()
    return call
