"""What ``side_by_side`` asks of a server: does it notice, how soon, and who pays for it."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from bench._sides_peers import Counts, Served
from disconnect_watch.stress import Point, StressOptions, Way, run_stress
from disconnect_watch.stress.client import Outcome
from disconnect_watch.stress.connection import Connections
from disconnect_watch.stress.http import HttpResponse, request_bytes
from disconnect_watch.testing import ways

__all__ = ["LEAVES", "Load", "Looker", "leave_ms", "load", "ready"]

LEAVES = (Way.FIN, Way.RST, Way.HALF_CLOSE_FIN, Way.BEHIND_REQUEST, Way.BEHIND_BODY)
#: Seconds for what must come at all.
_PATIENCE = 120.0
_PERIOD = 0.0005


class Looker:
    """Reads a server's counts, over a connection that stays open while the server keeps it."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._connections: Connections | None = None

    async def counts(self) -> Counts:
        """Now."""
        page = self._served.page
        if page is None:
            return self._served.counts("")
        if self._connections is None:
            self._connections = Connections(await page.resolve(), page)
        connection = self._connections.take() or await self._connections.open()
        await connection.send(request_bytes(page, b"", method="GET"))
        response, body = HttpResponse(), b""
        while not response.is_complete:
            data = await connection.receive(1 << 16)
            if not data:
                connection.close()
                raise EOFError(f"{page} was closed")
            body += response.feed(data)
        if response.is_kept_alive:
            self._connections.keep(connection)
        else:
            connection.close()
        return self._served.counts(body.decode())

    async def until(self, num_running: int, within: float) -> float | None:
        """Wait until so many run, and return when; None if that never was."""
        deadline = time.monotonic() + within
        while time.monotonic() < deadline:
            counts = await self.counts()
            if counts.num_running == num_running:
                return time.monotonic()
            await asyncio.sleep(_PERIOD)
        return None

    def close(self) -> None:
        """Close it."""
        if self._connections is not None:
            self._connections.close()


async def ready(served: Served) -> None:
    """Wait until it answers."""
    deadline = time.monotonic() + _PATIENCE
    looker = Looker(served)
    while True:
        try:
            await looker.counts()
            looker.close()
            return
        except (OSError, EOFError, AssertionError):
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.05)


async def leave_ms(served: Served, way: Way, *, give_up: float) -> float | None:
    """Milliseconds from a client's leaving to the end of its work; None if it went on.

    Args:
        served: the server, which nobody else uses.
        way: to leave by, once its work was begun.
        give_up: seconds.
    """
    looker = Looker(served)
    with Connections(await served.target.resolve(), served.target) as connections:
        try:
            assert await looker.until(0, _PATIENCE) is not None, "the server is never idle"
            connection = await connections.open()
            request = served.exchange.request(0, leaves=True)
            await connection.send(request)
            assert await looker.until(1, _PATIENCE) is not None, "the request is never begun"
            if parting := ways.parting_bytes(way, request):
                await connection.send(parting)
            began = time.monotonic()
            ways.part(connection.sock, way)
            ended = await looker.until(0, give_up)
            return None if ended is None else 1e3 * (ended - began)
        finally:
            await looker.until(0, _PATIENCE)
            looker.close()


@dataclass(frozen=True, slots=True)
class Load:
    """Of one run.

    Attributes:
        answers_per_second: to those who stayed.
        wasted: of what those asked for who left, the share that was done.
        num_failed: clients that were answered wrong, or not.
    """

    answers_per_second: float
    wasted: float
    num_failed: int


async def load(
    served: Served, *, num_stay: int, num_leave: int, seed: int, leaves: Sequence[Way] = LEAVES
) -> Load:
    """Have clients stay and leave, eight at a time, until all are done."""
    looker = Looker(served)
    try:
        assert await looker.until(0, _PATIENCE) is not None, "the server is never idle"
        before = await looker.counts()
        options = StressOptions(
            num_stay=num_stay,
            num_leave=num_leave,
            ways=tuple(leaves),
            points=(Point.AT_ONCE, Point.WAITING),
            max_delay=0.03,
            seed=seed,
            timeout=_PATIENCE,
            max_seconds=_PATIENCE,
        )
        report = await run_stress(served.target, served.exchange, options=options)
        looker.close()  # a new connection is accepted behind those of the last to leave
        await looker.until(0, _PATIENCE)
        after = await looker.counts()
    finally:
        looker.close()
    counts = report.counts
    num_left = counts.outcomes[Outcome.LEFT]
    done = after.num_units - before.num_units - num_stay * served.stay_units
    return Load(
        answers_per_second=num_stay / report.seconds,
        wasted=max(0.0, done / (num_left * served.leave_units)) if num_left else 0.0,
        num_failed=counts.outcomes[Outcome.FAILED],
    )
