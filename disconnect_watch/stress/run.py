"""A run: so many clients at a time, until all have ended, or time or the user says stop."""

import asyncio
import secrets
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any

from disconnect_watch.stress.client import run_client
from disconnect_watch.stress.exchange import Exchange
from disconnect_watch.stress.ledger import ServerCounts, read_counts, settled_counts
from disconnect_watch.stress.plan import ClientPlan, Way, plan_clients
from disconnect_watch.stress.report import Check, Counts, Report, check_clients, check_server
from disconnect_watch.stress.target import Target

__all__ = ["StressOptions", "run_stress"]


@dataclass(frozen=True, slots=True)
class StressOptions:
    """What a run does.

    Args:
        num_stay, num_leave: clients of either kind.
        concurrency: clients at the same time.
        ways: those to leave by.
        max_delay: seconds; the longest that a leaving client waits without reading.
        seed: of the plan.
        timeout: seconds that a client has for all it does.
        max_seconds: after which no client begins; those that have go on to their end.
        settle: seconds that the server has to be done with the last of them.
        metrics: where the server's own counts are; None to do without.
    """

    num_stay: int = 50
    num_leave: int = 50
    concurrency: int = 8
    ways: tuple[Way, ...] = tuple(Way)
    max_delay: float = 0.1
    seed: int = field(default_factory=lambda: secrets.randbits(32))
    timeout: float = 30.0
    max_seconds: float = 60.0
    settle: float = 10.0
    metrics: Target | None = None

    def __post_init__(self) -> None:
        if not self.ways:
            raise ValueError("no way to leave is given, give at least one")


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
    """
    address = await target.resolve()
    before = None if options.metrics is None else await read_counts(options.metrics)
    plans = plan_clients(
        options.num_stay,
        options.num_leave,
        ways=options.ways,
        max_delay=options.max_delay,
        max_pieces=exchange.max_pieces,
        seed=options.seed,
    )
    counts = Counts(len(plans))
    loop = asyncio.get_running_loop()
    began = loop.time()

    async def work(plans: Iterable[ClientPlan]) -> None:
        for plan in plans:
            counts.num_sent += 1
            ending = await run_client(address, exchange, plan=plan, within=options.timeout)
            counts.add(plan, ending)
            on_progress(counts)
            if loop.time() >= began + options.max_seconds:
                return

    queue = iter(plans)  # one for all: each takes the next
    is_interrupted = await _finish_unless(
        stop or asyncio.Event(), [work(queue) for _ in range(options.concurrency)]
    )
    seconds = loop.time() - began
    checks = check_clients(counts, is_interrupted=is_interrupted)
    if options.metrics is not None and before is not None:
        checks += await _check_server(options.metrics, counts, before, options.settle)
    return Report(
        target=str(target),
        seed=options.seed,
        seconds=seconds,
        is_interrupted=is_interrupted,
        is_server_checked=before is not None,
        counts=counts,
        checks=tuple(checks),
    )


async def _finish_unless(stop: asyncio.Event, workers: list[Coroutine[None, None, None]]) -> bool:
    """Run the workers to their end; returns whether they were stopped before it."""
    working = [asyncio.create_task(worker) for worker in workers]
    all_done = asyncio.gather(*working)
    stopping = asyncio.create_task(stop.wait())
    waited: set[asyncio.Future[Any]] = {all_done, stopping}
    try:
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if all_done.done():
            all_done.result()
            return False
        return True
    finally:
        for task in (*working, stopping):
            task.cancel()
        await asyncio.gather(*working, *waited, return_exceptions=True)


async def _check_server(
    metrics: Target, counts: Counts, before: ServerCounts, settle: float
) -> list[Check]:
    """The server's part of the checks, once it holds or the server has had its time."""

    def is_settled(after: ServerCounts) -> bool:
        return all(check.holds for check in check_server(counts, before, after))

    after = await settled_counts(metrics, is_settled=is_settled, within=settle)
    if after is None:
        return [Check("the server is still there", False, f"nothing to read at {metrics}")]
    return check_server(counts, before, after)
