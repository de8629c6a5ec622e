"""What each client will do, drawn from a seed while the clients begin.

The same seed and options give the same clients, whatever the server does. In which order
they meet the server depends on both sides' speed, and is not replayed.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from disconnect_watch.testing.ways import Way

__all__ = ["MAX_PIECES", "ClientPlan", "Leave", "PlanOptions", "Point", "Way", "plan_clients"]

#: The most that a client reads before it leaves in mid-stream.
MAX_PIECES = 8


class Point(StrEnum):
    """Where in its exchange a client leaves."""

    #: Connected, over TLS with the handshake done, and not a byte sent.
    CONNECTED = "connected"
    IN_REQUEST = "in_request"
    #: Right behind the last byte of the request.
    AT_ONCE = "at_once"
    #: After a while in which it read nothing.
    WAITING = "waiting"
    #: Once it has read a few pieces of the answer.
    STREAMING = "streaming"
    #: As above, and then a while in which it reads nothing, so that the answer piles up. With a
    #: part of it unread the kernel makes a reset of any close.
    STALLED = "stalled"
    #: At any time up to twice what an answer usually takes: it asks as those do who stay, so that
    #: its leaving meets the end of the answer, from both sides.
    AROUND = "around"


#: At which the client has received something of its answer.
_IN_ANSWER = (Point.STREAMING, Point.STALLED)
_BEHIND_WHOLE_REQUEST = (Way.BEHIND_REQUEST, Way.BEHIND_BODY)


@dataclass(frozen=True, slots=True)
class Leave:
    """One leaving. The numbers say where exactly, each for one point.

    Attributes:
        fraction: of the request that was sent, or of twice the usual time, in [0, 1).
        delay: seconds.
        num_pieces: of the answer that were read, from 1 on.
    """

    way: Way
    point: Point
    fraction: float
    delay: float
    num_pieces: int


@dataclass(frozen=True, slots=True)
class ClientPlan:
    """One client; without a ``leave`` it stays until it has its answer.

    Attributes:
        due: seconds after the run's begin; of an open loop.
        is_kept: whether it takes a connection that an earlier one left open, if there is one.
        is_slow: whether it reads a little at a time through a small window.
    """

    index: int
    leave: Leave | None
    due: float = 0.0
    is_kept: bool = False
    is_slow: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """What the clients are drawn from.

    Args:
        num_stay, num_leave: how many of either.
        ways, points: those to leave by and at, equally likely where both go together.
        max_delay: seconds; the longest that a leaving client waits without reading.
        kept: share of clients that take a connection which is open already.
        slow: share of those who stay that read slowly.
        rate: clients a second that begin, as a Poisson process, whatever became of those before;
            None for a closed loop, in which the next begins as one ends.
        seed: of all that is random.

    Raises:
        ValueError: nothing to choose from, or a share that is none.
    """

    num_stay: int
    num_leave: int
    ways: Sequence[Way]
    points: Sequence[Point] = tuple(Point)
    max_delay: float = 0.1
    kept: float = 0.0
    slow: float = 0.0
    rate: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.ways:
            raise ValueError("no way to leave is given, give at least one")
        if not self.points:
            raise ValueError("no point to leave at is given, give at least one")
        for name, share in (("kept", self.kept), ("slow", self.slow)):
            if not 0 <= share <= 1:
                raise ValueError(f"{name} is {share}, must be a share from 0 to 1")
        if self.rate is not None and self.rate <= 0:
            raise ValueError(f"rate is {self.rate}, must be above 0 clients a second")


def plan_clients(options: PlanOptions, *, max_pieces: int) -> Iterator[ClientPlan]:
    """Draw the clients, in the order in which they will begin, each as it is asked for.

    Args:
        options: what of.
        max_pieces: how many pieces of an answer can be read before its last; with 0
            nobody leaves in mid-stream.

    Raises:
        ValueError: the ways and points do not go together; before the first client.
    """
    cells = cells_of(options.ways, options.points, max_pieces=max_pieces)
    return _drawn(options, cells, max_pieces)


def cells_of(
    ways: Sequence[Way], points: Sequence[Point], *, max_pieces: int
) -> dict[Way, list[Point]]:
    """For each way, the points at which it can be gone.

    Raises:
        ValueError: there is none for a way.
    """
    cells = {way: [p for p in points if _go_together(way, p, max_pieces)] for way in ways}
    for way, fitting in cells.items():
        if not fitting:
            raise ValueError(
                f"nobody can leave by {way.value} at {', '.join(points)}: give another point"
            )
    return cells


def _go_together(way: Way, point: Point, max_pieces: int) -> bool:
    if point in _IN_ANSWER and not max_pieces:
        return False
    return way not in _BEHIND_WHOLE_REQUEST or point not in (Point.CONNECTED, Point.IN_REQUEST)


def _drawn(
    options: PlanOptions, cells: dict[Way, list[Point]], max_pieces: int
) -> Iterator[ClientPlan]:
    rng = random.Random(options.seed)
    num_stay, num_leave = options.num_stay, options.num_leave
    ways = list(cells)
    due = 0.0
    for index in range(num_stay + num_leave):
        # As in a shuffled list of both, of which none need be made.
        leaves = rng.random() * (num_stay + num_leave) < num_leave
        if leaves:
            num_leave -= 1
        else:
            num_stay -= 1
        way = rng.choice(ways)
        leave = Leave(
            way=way,
            point=rng.choice(cells[way]),
            fraction=rng.random(),
            delay=rng.uniform(0, options.max_delay),
            num_pieces=rng.randint(1, max(1, min(max_pieces, MAX_PIECES))),
        )
        is_kept, is_slow = rng.random() < options.kept, rng.random() < options.slow
        if options.rate is not None:
            due += rng.expovariate(options.rate)
        yield ClientPlan(index, leave if leaves else None, due, is_kept, is_slow and not leaves)
