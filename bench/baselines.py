"""How long after a client's close() who notices: ours beside what servers do today.

Every round has one trial of each way in an order of its own, all in one process
on one loop, the client in another process. A close is plain, or comes behind a
pipelined request, where most ways never notice: they are waited for a bounded
time, and the share that noticed is a row of its own.
"""

import asyncio
import random
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from functools import partial

import uvloop

from bench._bare_loop import BareLoop
from bench._conditions import Condition, Conditions
from bench._epoll_thread import EpollThread
from bench._harness import Report, ratio_of_medians, run_command
from bench._leaver import Leaver
from bench._uvicorn_ways import LISTEN, Endpoint, Way, poll_every, serve
from disconnect_watch import CancelToken, Reason, Watcher
from disconnect_watch.aio import LoopMailbox, loop_mailbox

__all__ = ["PIPELINED", "PLAIN", "WAYS", "Config", "run"]

PLAIN = "plain close"
PIPELINED = "close behind a pipelined request"

BARE, FLAG, CALLBACK = "bare C loop", "our flag", "our callback"
PYTHON_EPOLL = "Python epoll thread"
OUR_RECEIVE = "receive() with our protocol"
#: What an application under plain uvicorn can do.
UVICORN_WAYS: dict[str, Way] = {
    "receive() listener": LISTEN,
    "is_disconnected() every 10 ms": poll_every(0.010),
    "is_disconnected() every 100 ms": poll_every(0.100),
}
#: All who may notice, in the order of the report.
WAYS = (FLAG, CALLBACK, OUR_RECEIVE, BARE, PYTHON_EPOLL, *UVICORN_WAYS)

#: By who noticed: when, ``time.monotonic_ns``; None for not within the bound.
Noticed = dict[str, int | None]


@dataclass(frozen=True, slots=True)
class Config:
    """How much is measured.

    Attributes:
        num_rounds: trials of each way with a plain close.
        num_pipelined_rounds: and behind a pipelined request.
        give_up: seconds that a way has for noticing.
        seed: of the order of trials and of the client's delays.
    """

    num_rounds: int
    num_pipelined_rounds: int
    give_up: float = 0.5
    seed: int = 0


FULL = Config(num_rounds=500, num_pipelined_rounds=60)
QUICK = Config(num_rounds=80, num_pipelined_rounds=4)


class Bench:
    """One run: the parts that all trials share, and what they found."""

    def __init__(
        self,
        config: Config,
        *,
        leaver: Leaver,
        conditions: Conditions,
        bare: BareLoop,
        python_epoll: EpollThread,
        mailbox: LoopMailbox,
        plain: Endpoint,
        watched: Endpoint,
    ) -> None:
        self._config = config
        self._random = random.Random(config.seed)
        self._leaver = leaver
        self._conditions = conditions
        self._bare = bare
        self._python_epoll = python_epoll
        self._mailbox = mailbox
        self._plain = plain
        self._watched = watched
        #: Microseconds after the close, by close and who; no sample where nobody noticed.
        self.samples: dict[tuple[str, str], list[float]] = defaultdict(list)

    def trials(self) -> list[Callable[[str], Awaitable[None]]]:
        """One trial of each way, to be called with the kind of close."""

        under_uvicorn = [
            partial(self._serve, self._plain, way, name) for name, way in UVICORN_WAYS.items()
        ]
        under_ours = partial(self._serve, self._watched, LISTEN, OUR_RECEIVE)
        return [self._ours, self._bare_loop, self._epoll_thread, under_ours, *under_uvicorn]

    async def _ours(self, close: str) -> None:
        called = asyncio.get_running_loop().create_future()

        def note_call(reason: Reason, at_ns: int) -> None:
            called.set_result(time.monotonic_ns())

        token = CancelToken()
        with self._leaver.connect() as sock, self._mailbox.watcher.attach(sock) as connection:
            watch_id = self._mailbox.arm(connection, token, note_call)
            closed_ns = await self._leave(close)
            called_ns = await asyncio.wait_for(called, 10)
            self._mailbox.disarm(connection, watch_id)
        self._note(close, closed_ns, {FLAG: token.times()[1], CALLBACK: called_ns})

    async def _bare_loop(self, close: str) -> None:
        with self._leaver.connect() as sock:
            self._bare.add(sock.fileno())
            closed_ns = await self._leave(close)
            woken_ns = await self._bare.woken_ns()
            self._bare.remove(sock.fileno())
        self._note(close, closed_ns, {BARE: woken_ns})

    async def _epoll_thread(self, close: str) -> None:
        with self._leaver.connect() as sock:
            woken = self._python_epoll.add(sock.fileno())
            closed_ns = await self._leave(close)
            woken_ns = await asyncio.wait_for(woken, 10)
            self._python_epoll.remove(sock.fileno())
        self._note(close, closed_ns, {PYTHON_EPOLL: woken_ns})

    async def _serve(self, endpoint: Endpoint, way: Way, name: str, close: str) -> None:
        endpoint.expect(way)
        self._leaver.connect_to(endpoint.port)
        self._leaver.request()
        await endpoint.begun()
        # The close must not keep step with the looks.
        await asyncio.sleep(self._random.uniform(0, way.period))
        closed_ns = await self._leave(close)
        noticed_ns = await endpoint.noticed_ns(self._config.give_up)
        await endpoint.end()
        self._note(close, closed_ns, {name: noticed_ns})

    async def _leave(self, close: str) -> int:
        if close == PIPELINED:
            self._leaver.request()
        return await self._conditions.leave_under(Condition.IDLE)

    def _note(self, close: str, closed_ns: int, noticed: Noticed) -> None:
        for who, at_ns in noticed.items():
            samples = self.samples[close, who]
            if at_ns is not None:
                samples.append((at_ns - closed_ns) / 1000)


def run(config: Config) -> Report:
    """Measure, and say how ours compares with the others."""
    report = Report("baselines", asdict(config))
    samples = uvloop.run(_measure(config))
    num_trials = {PLAIN: config.num_rounds, PIPELINED: config.num_pipelined_rounds}
    for close, count in num_trials.items():
        for who in WAYS:
            if samples[close, who]:
                report.add(f"{who}, {close}", "us", samples[close, who], has_curve=True)
        for who in WAYS:
            share = 100 * len(samples[close, who]) / count
            report.add(f"noticed: {who}, {close}", "%", [share])
            if share < 100:
                report.notes.append(
                    f"{who}, {close}: noticed {len(samples[close, who])} of {count} within "
                    f"{config.give_up * 1000:g} ms"
                )
        _compare(report, samples, close, FLAG, (BARE, PYTHON_EPOLL))
        _compare(report, samples, close, CALLBACK, tuple(UVICORN_WAYS))
        _compare(report, samples, close, OUR_RECEIVE, ("receive() listener",))
    return report


def _compare(
    report: Report,
    samples: dict[tuple[str, str], list[float]],
    close: str,
    ours: str,
    baselines: tuple[str, ...],
) -> None:
    measured = samples[close, ours]
    for theirs in baselines:
        baseline = samples[close, theirs]
        if len(baseline) == len(measured):
            names = (f"{ours}, {close}", f"{theirs}, {close}")
            report.ratios.append(ratio_of_medians(*names, measured=measured, baseline=baseline))


async def _measure(config: Config) -> dict[tuple[str, str], list[float]]:
    order = random.Random(config.seed)
    async with AsyncExitStack() as stack:
        leaver = stack.enter_context(Leaver())
        watcher = stack.enter_context(Watcher())
        mailbox = loop_mailbox(watcher)
        stack.callback(mailbox.close)
        bench = Bench(
            config,
            leaver=leaver,
            conditions=stack.enter_context(Conditions(leaver, seed=config.seed)),
            bare=stack.enter_context(BareLoop()),
            python_epoll=stack.enter_context(EpollThread()),
            mailbox=mailbox,
            plain=await stack.enter_async_context(serve(is_watched=False)),
            watched=await stack.enter_async_context(serve(is_watched=True)),
        )
        trials = bench.trials()
        for trial in trials:
            await trial(PLAIN)
        bench.samples.clear()
        closes = [PLAIN] * config.num_rounds + [PIPELINED] * config.num_pipelined_rounds
        for close in order.sample(closes, len(closes)):
            for trial in order.sample(trials, len(trials)):
                await trial(close)
        return bench.samples


if __name__ == "__main__":
    run_command("baselines", lambda is_quick: run(QUICK if is_quick else FULL))
