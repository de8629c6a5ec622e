"""Whether a server works on for who left, seen by what that does to another's latency.

For servers that tell nothing. Three times are compared: of a client alone; of one beside others
that are being served; and of one right behind the leaving of those others. On a server that
cancels the third is like the first, on one that works on it is like the second. Where the second
is no longer than the first, nothing can be told.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from disconnect_watch.stress.client import Outcome, run_client
from disconnect_watch.stress.connection import Connection, Connections
from disconnect_watch.stress.exchange import Exchange, WrongAnswerError
from disconnect_watch.stress.plan import ClientPlan
from disconnect_watch.testing import ways

__all__ = ["Effect", "Verdict", "measure_effect"]

#: Of the time beside others, what it must be of the time alone for anything to be told.
_LEAST_EFFECT = 1.5

Verdict = bool | None


@dataclass(frozen=True, slots=True)
class Effect:
    """The medians, in seconds.

    Attributes:
        alone: nobody else is there.
        beside: ``num_others`` are being served.
        behind: they have just left.
    """

    alone: float
    beside: float
    behind: float
    num_others: int

    @property
    def cancels(self) -> Verdict:
        """Whether the server stops for who leaves; None where that cannot be told."""
        if self.beside < _LEAST_EFFECT * self.alone:
            return None
        return self.behind - self.alone < (self.beside - self.alone) / 2

    @property
    def in_words(self) -> str:
        """The numbers."""
        return (
            f"an answer takes {1e3 * self.alone:.1f} ms alone, {1e3 * self.beside:.1f} ms beside "
            f"{self.num_others} others, {1e3 * self.behind:.1f} ms once they have left"
        )


async def measure_effect(
    connections: Connections,
    exchange: Exchange,
    *,
    num_others: int = 8,
    num_rounds: int = 5,
    within: float = 30.0,
    clock: Callable[[], float] = time.monotonic,
) -> Effect | None:
    """Measure it, on a server that nobody else uses; None if it did not answer right.

    Args:
        connections: to the server.
        exchange: what is asked; those who leave ask for the long answer.
        num_others: who leave together.
        num_rounds: of each of the three.
        within: seconds for each answer.
        clock: in seconds; another one for tests.
    """
    beside: list[float] = []
    behind: list[float] = []

    async def probe() -> float:
        began = clock()
        ending = await run_client(connections, exchange, plan=ClientPlan(0, None), within=within)
        if ending.outcome is not Outcome.ANSWERED:
            raise _NotAnsweredError
        return clock() - began

    async def beside_others(*, have_left: bool) -> float:
        """Each time beside others of their own: the last may have been served meanwhile."""
        async with contextlib.AsyncExitStack() as stack:
            others = [
                stack.enter_context(contextlib.closing(await connections.open()))
                for _ in range(num_others)
            ]
            async with asyncio.timeout(within):
                await asyncio.gather(
                    *(_begin(other, exchange, index) for index, other in enumerate(others))
                )
            if have_left:
                for other in others:
                    ways.part(other.sock, ways.Way.FIN)
            return await probe()

    try:
        alone = [await probe() for _ in range(num_rounds)]
        for _ in range(num_rounds):
            beside.append(await beside_others(have_left=False))
            behind.append(await beside_others(have_left=True))
    except (OSError, EOFError, WrongAnswerError, _NotAnsweredError, TimeoutError):
        return None
    return Effect(median(alone), median(beside), median(behind), num_others)


class _NotAnsweredError(Exception):
    """The probe was not."""


async def _begin(connection: Connection, exchange: Exchange, index: int) -> None:
    """Ask, and where the answer comes in pieces, see the first."""
    await connection.send(exchange.request(index, leaves=True))
    answer = exchange.answer(index)
    while exchange.max_pieces and not answer.num_pieces:
        data = await connection.receive(1 << 16)
        if not data:
            raise EOFError
        answer.feed(data)
