"""A run: the clients of a plan, so many at a time or a second, and both ledgers after it."""

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from disconnect_watch.stress.checks import Check, check_clients, check_server
from disconnect_watch.stress.client import run_client
from disconnect_watch.stress.connection import Connections
from disconnect_watch.stress.effect import Effect, measure_effect
from disconnect_watch.stress.exchange import Exchange
from disconnect_watch.stress.ledger import ServerCounts, read_counts, settled_counts
from disconnect_watch.stress.plan import ClientPlan, PlanOptions, Point, Way, plan_clients
from disconnect_watch.stress.report import Report
from disconnect_watch.stress.tally import Counts
from disconnect_watch.stress.target import Target
from disconnect_watch.testing.ways import default_ways

__all__ = ["StressOptions", "run_stress", "usual_ways"]

T = TypeVar("T")

#: At which what the server does for a client can be known.
_USUAL_POINTS = tuple(point for point in Point if point is not Point.AROUND)


def usual_ways(target: Target, exchange: Exchange) -> tuple[Way, ...]:
    """Those in which clients can leave this server by the thousand.

    Not VANISH, which a server need not notice; nor KILLED, which costs a process and is a FIN to
    the server; nor, where no HTTP is spoken, a second request's body.
    """
    return tuple(
        way
        for way in default_ways(family=0, is_tls=target.is_tls)
        if way is not Way.KILLED and (exchange.is_http or way is not Way.BEHIND_BODY)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StressOptions:
    """What a run does.

    Args:
        num_stay, num_leave: clients of either kind.
        concurrency: clients at the same time; of an open loop the most.
        rate: clients a second, for an open loop; None for a closed one.
        ways: those to leave by; None for ``usual_ways``.
        points: those to leave at.
        max_delay: seconds; the longest that a leaving client waits without reading.
        kept: share of clients that use an open connection again.
        slow: share of those who stay that read slowly.
        seed: of the plan.
        timeout: seconds that a client has for all it does.
        max_seconds: after which no client begins; those that have go on to their end.
        settle: seconds that the server has to be done with the last of them.
        metrics: where the server's own counts are; None to do without.
        measures_effect: whether to find out by the effect on others what the server does for
            who leaves; None for where its metrics don't tell.
        same: whether all answers to who stays must be the same.
    """

    num_stay: int = 50
    num_leave: int = 50
    concurrency: int = 8
    rate: float | None = None
    ways: tuple[Way, ...] | None = None
    points: tuple[Point, ...] = _USUAL_POINTS
    max_delay: float = 0.1
    kept: float = 0.0
    slow: float = 0.0
    seed: int = field(default_factory=lambda: secrets.randbits(32))
    timeout: float = 30.0
    max_seconds: float = 60.0
    settle: float = 10.0
    metrics: Target | None = None
    measures_effect: bool | None = False
    same: bool = False

    def __post_init__(self) -> None:
        self.plan_options((Way.FIN,) if self.ways is None else self.ways)

    def plan_options(self, ways: tuple[Way, ...]) -> PlanOptions:
        """What the clients are drawn from; raises as ``PlanOptions`` does."""
        return PlanOptions(
            num_stay=self.num_stay,
            num_leave=self.num_leave,
            ways=ways,
            points=self.points,
            max_delay=self.max_delay,
            kept=self.kept,
            slow=self.slow,
            rate=self.rate,
            seed=self.seed,
        )

    def as_dict(self) -> dict[str, Any]:
        """For JSON; the metrics as a URL."""
        return asdict(self) | {"metrics": None if self.metrics is None else str(self.metrics)}


async def run_stress(
    target: Target,
    exchange: Exchange,
    *,
    options: StressOptions,
    stop: asyncio.Event | None = None,
    on_progress: Callable[[Counts], object] = lambda counts: None,
) -> Report:
    """Send the clients to a server, and report.

    Args:
        target: the server.
        exchange: what each client asks of it.
        options: how many clients, and so on.
        stop: once it is set, the clients are cut off and the report is of what there was.
        on_progress: called after each client that ended.

    Raises:
        OSError: there is no such host. A server that refuses is in the report.
        ValueError: the options do not go together.
    """
    ways = usual_ways(target, exchange) if options.ways is None else options.ways
    plans = plan_clients(options.plan_options(ways), max_pieces=exchange.max_pieces)
    stop = stop or asyncio.Event()
    with Connections(await target.resolve(), target) as connections:
        before = None if options.metrics is None else await read_counts(options.metrics)
        counts = Counts(
            options.num_stay + options.num_leave,
            outlasts=exchange.outlasts,
            texts=Counter() if options.same else None,
        )
        load = _Load(connections, exchange, options, counts, on_progress)
        is_interrupted = await _finish_unless(stop, load.workers(plans))
        seconds = load.now
        checks = check_clients(counts, is_interrupted=is_interrupted)
        after: ServerCounts | None = None
        if options.metrics is not None and before is not None:
            after = await _settled(options.metrics, counts, before, options.settle)
            checks += (
                [Check("the server is still there", False, f"nothing to read at {options.metrics}")]
                if after is None
                else check_server(counts, before, after)
            )
        is_server_checked = before is not None and (after is None or after.shows_work)
        effect: Effect | None = None
        if not is_interrupted and _wants_effect(options, is_server_checked=is_server_checked):
            effect = await _unless_stopped(stop, measure_effect(connections, exchange))
            if effect is not None and effect.cancels is not None:
                checks.append(
                    Check("the server stops for who leaves", effect.cancels, effect.in_words)
                )
    return Report(
        target=str(target),
        seed=options.seed,
        seconds=seconds,
        is_interrupted=is_interrupted,
        is_server_checked=is_server_checked,
        counts=counts,
        checks=tuple(checks),
        options=options.as_dict() | {"ways": ways},
        before=before,
        after=after,
        effect=effect,
    )


class _Load:
    """The clients of one run while they are at it."""

    def __init__(
        self,
        connections: Connections,
        exchange: Exchange,
        options: StressOptions,
        counts: Counts,
        on_progress: Callable[[Counts], object],
    ) -> None:
        self._connections = connections
        self._exchange = exchange
        self._options = options
        self._counts = counts
        self._on_progress = on_progress
        self._began = time.monotonic()

    @property
    def now(self) -> float:
        """Seconds since the begin."""
        return time.monotonic() - self._began

    def workers(self, plans: Iterator[ClientPlan]) -> list[Coroutine[None, None, None]]:
        """Together they run all clients, each at a time the next of all."""
        if self._options.rate is None:
            return [self._work(plans) for _ in range(self._options.concurrency)]
        return [self._begin_when_due(plans)]

    async def _work(self, plans: Iterator[ClientPlan]) -> None:
        for plan in plans:
            await self._run(plan, None)
            if self.now >= self._options.max_seconds:
                return

    async def _begin_when_due(self, plans: Iterator[ClientPlan]) -> None:
        slots = asyncio.Semaphore(self._options.concurrency)

        async def run(plan: ClientPlan) -> None:
            try:
                await self._run(plan, self._began + plan.due)
            finally:
                slots.release()

        async with asyncio.TaskGroup() as group:
            for plan in plans:
                if plan.due >= self._options.max_seconds:
                    return
                if (wait := plan.due - self.now) > 0:
                    await asyncio.sleep(wait)
                await slots.acquire()
                group.create_task(run(plan))

    async def _run(self, plan: ClientPlan, due: float | None) -> None:
        counts = self._counts
        counts.num_sent += 1
        ending = await run_client(
            self._connections,
            self._exchange,
            plan=plan,
            within=self._options.timeout,
            usual=counts.latencies.usual if plan.leave is not None else 0.0,
            due=due,
        )
        counts.add(plan, ending, at=self.now)
        self._on_progress(counts)


def _wants_effect(options: StressOptions, *, is_server_checked: bool) -> bool:
    return options.measures_effect or (options.measures_effect is None and not is_server_checked)


async def _finish_unless(stop: asyncio.Event, workers: list[Coroutine[None, None, None]]) -> bool:
    """Run the workers to their end; returns whether they were stopped before it."""
    done = await _unless_stopped(stop, _all_of(workers))
    return done is None


async def _all_of(workers: list[Coroutine[None, None, None]]) -> bool:
    async with asyncio.TaskGroup() as group:
        for worker in workers:
            group.create_task(worker)
    return True


async def _unless_stopped(stop: asyncio.Event, work: Coroutine[None, None, T]) -> T | None:
    """What it returns, or None once it was stopped."""
    working = asyncio.create_task(work)
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, stopping):
            task.cancel()
        await asyncio.gather(working, stopping, return_exceptions=True)


async def _settled(
    metrics: Target, counts: Counts, before: ServerCounts, settle: float
) -> ServerCounts | None:
    """The server's counts, once all that must be holds of them or the server has had its time."""

    def is_settled(after: ServerCounts) -> bool:
        return all(check.holds for check in check_server(counts, before, after))

    return await settled_counts(metrics, is_settled=is_settled, within=settle)
