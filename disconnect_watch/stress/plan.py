"""What each client will do, drawn from a seed before the first of them connects.

The same seed and options give the same plan, whatever the server does. In which order
the clients meet the server depends on both sides' speed, and is not replayed.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["MAX_PIECES", "ClientPlan", "Leave", "Point", "Way", "plan_clients"]

#: The most that a client reads before it leaves in mid-stream.
MAX_PIECES = 8


class Way(StrEnum):
    """How a client leaves; of the ways in ``disconnect_watch.testing`` those for any server.

    With a part of the answer unread, the kernel makes a reset of any close.
    """

    FIN = "fin"
    RST = "rst"
    #: ``shutdown(SHUT_WR)``; it reads on, since the server may take it for no leaving.
    HALF_CLOSE = "half_close"
    #: A close behind a second, complete request.
    BEHIND_REQUEST = "behind_request"


class Point(StrEnum):
    """Where in its exchange a client leaves."""

    IN_REQUEST = "in_request"
    #: Right behind the last byte of the request.
    AT_ONCE = "at_once"
    #: After a while in which it read nothing.
    WAITING = "waiting"
    #: Once it has read a few pieces of the answer.
    STREAMING = "streaming"


@dataclass(frozen=True, slots=True)
class Leave:
    """One leaving. The numbers say where exactly, each for one point.

    Attributes:
        fraction: of the request that was sent, in [0, 1).
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
    """One client; without a ``leave`` it stays until it has its answer."""

    index: int
    leave: Leave | None


def plan_clients(
    num_stay: int,
    num_leave: int,
    *,
    ways: Sequence[Way],
    max_delay: float,
    max_pieces: int,
    seed: int,
) -> list[ClientPlan]:
    """Draw the clients, in the order in which they will begin.

    Args:
        num_stay, num_leave: how many of either.
        ways: those to leave by, equally likely; at least one.
        max_delay: seconds.
        max_pieces: how many pieces of an answer can be read before its last; with 0
            nobody leaves in mid-stream.
        seed: of all that is random.
    """
    rng = random.Random(seed)
    leaves = [_draw_leave(rng, ways, max_delay, max_pieces) for _ in range(num_leave)]
    order: list[Leave | None] = [None] * num_stay + leaves
    rng.shuffle(order)
    return [ClientPlan(index, leave) for index, leave in enumerate(order)]


def _draw_leave(
    rng: random.Random, ways: Sequence[Way], max_delay: float, max_pieces: int
) -> Leave:
    way = rng.choice(ways)
    points = [Point.AT_ONCE, Point.WAITING]
    if way is not Way.BEHIND_REQUEST:
        points.append(Point.IN_REQUEST)
    if max_pieces:
        points.append(Point.STREAMING)
    return Leave(
        way=way,
        point=rng.choice(points),
        fraction=rng.random(),
        delay=rng.uniform(0, max_delay),
        num_pieces=rng.randint(1, max(1, min(max_pieces, MAX_PIECES))),
    )
