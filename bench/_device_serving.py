"""A batch that is kept full while clients leave it, by different rules for who finds that out.

The engine is the plainest that the rules can be compared with: launch so many steps, wait, look
whose rows are over, refill. What differs is who looks at a flag and when.
"""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from bench._device_loop import DeviceLoop
from bench._device_work import DecodeWork
from bench._leavers import Leavers
from disconnect_watch import CancelToken

__all__ = ["ORACLE", "POLICIES", "Arrival", "Policy", "Served", "make_arrivals", "serve"]


@dataclass(frozen=True, slots=True)
class Policy:
    """How a leave becomes a free row.

    Attributes:
        name: in the rows of the results.
        looks: ``device``, the latch reads the flags; ``host``, the host does between launches;
            ``none``, nobody, the request runs to its end; ``oracle``, the host was told
            beforehand, and takes a row out before the step in which its client leaves.
        steps_per_launch: between two turns of the host.
        lag: launches that are under way already when the host has seen a leave.
        delay: seconds after a leave in which the host ignores it.
    """

    name: str
    looks: Literal["device", "host", "none", "oracle"]
    steps_per_launch: int = 1
    lag: int = 0
    delay: float = 0.0


ORACLE = "oracle"
POLICIES = (
    Policy("no cancel", "none", 8),
    Policy("host, each step", "host"),
    Policy("host, a step late", "host", lag=1),
    Policy("host, every 8 steps", "host", 8),
    Policy("host, every 32 steps", "host", 32),
    Policy("host, 2 s late", "host", delay=2.0),
    Policy("device, every 8 steps", "device", 8),
    Policy("device, every 32 steps", "device", 32),
    Policy(ORACLE, "oracle"),
)


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request: how many tokens it wants, and when after its first step its client leaves."""

    num_tokens: int
    leaves_after: float | None


def make_arrivals(
    num: int, *, share: float, num_tokens: int, mean_seconds: float, seed: int = 0
) -> list[Arrival]:
    """Make requests of which a share leaves, at exponentially distributed times."""
    rng = random.Random(seed)
    return [
        Arrival(
            rng.randrange(num_tokens // 2, num_tokens + 1),
            rng.expovariate(1 / mean_seconds) if rng.random() < share else None,
        )
        for _ in range(num)
    ]


@dataclass(slots=True)
class Served:
    """What became of them.

    Attributes:
        num_tokens: that reached a client.
        num_wasted: that were computed for one who had left.
        seconds: from the first launch to the end of the last.
        num_left: clients that left before their end.
        reusable_ms: of each leave, until the row could be given to another.
        gaps_ms: between two tokens of a client that is there; those of one launch come at once,
            and are told as if they had come evenly.
    """

    num_tokens: int = 0
    num_wasted: int = 0
    seconds: float = 0.0
    num_left: int = 0
    reusable_ms: list[float] = field(default_factory=list)
    gaps_ms: list[float] = field(default_factory=list)


@dataclass(slots=True)
class _Row:
    arrival: Arrival
    token: CancelToken
    leaves_at: float | None
    told_at: float
    num_drawn: int = 0
    looks: int = 0


def serve(
    work: DecodeWork, loop: DeviceLoop, policy: Policy, arrivals: Sequence[Arrival]
) -> Served:
    """Serve all of them by one policy."""
    waiting = list(reversed(arrivals))
    rows: list[_Row | None] = [None] * work.rows.num_rows
    served = Served()
    step_seconds = 0.0
    begin = time.perf_counter()
    with Leavers(waits_for_ack=policy.looks == "device") as leavers:
        while waiting or any(rows):
            now = time.perf_counter()
            for index, row in enumerate(rows):
                if row is None and waiting:
                    rows[index] = _admit(work, index, waiting.pop(), policy, leavers)
                elif (
                    row is not None
                    and policy.looks == "oracle"
                    and _leaves_by(row, now + step_seconds)
                ):
                    work.retire(index)
                    rows[index] = None
                    served.num_left += 1
            loop.launch(policy.steps_per_launch)
            loop.wait()
            step_seconds = (time.perf_counter() - now) / policy.steps_per_launch
            _collect(work, rows, policy, served)
        served.seconds = time.perf_counter() - begin
    served.reusable_ms += leavers.reusable_ms
    return served


def _admit(
    work: DecodeWork, index: int, arrival: Arrival, policy: Policy, leavers: Leavers
) -> _Row:
    token = CancelToken()
    leaves_at = None
    if arrival.leaves_after is not None:
        leaves_at = time.perf_counter() + arrival.leaves_after
        leavers.add(leaves_at, token)
    seen = token if policy.looks == "device" else None
    work.put(index, num_tokens=arrival.num_tokens, token=seen)
    return _Row(arrival, token, leaves_at, time.perf_counter())


def _leaves_by(row: _Row, at: float) -> bool:
    return row.leaves_at is not None and row.leaves_at <= at


def _collect(work: DecodeWork, rows: list[_Row | None], policy: Policy, served: Served) -> None:
    """After a launch: count the tokens, and free the rows that are over."""
    num_drawn, live = work.state.num_drawn.tolist(), work.rows.live.tolist()
    now = time.perf_counter()
    for index, row in enumerate(rows):
        if row is None:
            continue
        new = num_drawn[index] - row.num_drawn
        row.num_drawn = num_drawn[index]
        if not row.token.cancelled:
            served.num_tokens += new
            if new:
                served.gaps_ms.append((now - row.told_at) * 1e3 / new)
                row.told_at = now
            if not live[index]:
                rows[index] = None
            continue
        served.num_wasted += new
        at = row.token.cancelled_at
        since = 0.0 if at is None else time.monotonic() - at
        row.looks += since >= policy.delay
        is_over = not live[index]
        if policy.looks in ("host", "oracle") and row.looks > policy.lag:
            work.retire(index)
            is_over = True
        if is_over:
            rows[index] = None
            served.num_left += 1
            if policy.looks != "device":
                served.reusable_ms.append(since * 1e3)
