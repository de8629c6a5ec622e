"""How long after a client's close() who knows of it, beside a bare C epoll loop.

Every round has one trial of each (condition, who watches) in an order of its
own, so that a busy moment of the machine meets all of them alike. The client
lives in another process and reads the clock right before its close().

    close() ──► flag stored ──► callback on the loop
                    └────────► engine drops the request ──► its blocks are free
"""

import asyncio
import random
import time
from collections import defaultdict
from collections.abc import Coroutine
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any

from bench._bare_loop import BareLoop
from bench._conditions import Condition, Conditions
from bench._harness import Report, ratio_of_medians, run_command
from bench._leaver import Leaver
from disconnect_watch import CancelToken, Reason, Watcher
from disconnect_watch.aio import LoopMailbox, loop_mailbox

__all__ = ["Config", "run"]

#: Microseconds after the close, by row name.
Samples = dict[str, list[float]]

GIVE_UP = 5.0


@dataclass(frozen=True, slots=True)
class Config:
    """How much is measured.

    Attributes:
        num_rounds: trials of each condition and side.
        num_engine_rounds: trials of each condition with the engine at work; 0
            leaves the engine out.
        loop: "uvloop" or "asyncio".
        seed: of the order of trials and of the client's delays.
    """

    num_rounds: int
    num_engine_rounds: int
    loop: str = "uvloop"
    seed: int = 0


FULL = Config(num_rounds=2000, num_engine_rounds=300)
QUICK = Config(num_rounds=150, num_engine_rounds=25)


class Bench:
    """One run: the parts that all trials share, and what they found."""

    def __init__(
        self, leaver: Leaver, conditions: Conditions, *, bare: BareLoop, mailbox: LoopMailbox
    ) -> None:
        self._leaver = leaver
        self._conditions = conditions
        self._bare = bare
        self._mailbox = mailbox
        self.samples: Samples = defaultdict(list)

    async def watched(self, condition: Condition) -> None:
        """One client leaves a connection that the watcher has; note both times."""
        called = asyncio.get_running_loop().create_future()

        def note_call(reason: Reason, at_ns: int) -> None:
            called.set_result(time.monotonic_ns())

        token = CancelToken()
        with self._leaver.connect() as sock, self._mailbox.watcher.attach(sock) as connection:
            watch_id = self._mailbox.arm(connection, token, note_call)
            closed_ns = await self._conditions.leave_under(condition)
            called_ns = await asyncio.wait_for(called, GIVE_UP)
            self._mailbox.disarm(connection, watch_id)
        woken_ns, stored_ns = token.times()
        self._note(f"close to watcher awake, {condition}", closed_ns, woken_ns)
        self._note(f"close to flag, {condition}", closed_ns, stored_ns)
        self._note(f"close to callback, {condition}", closed_ns, called_ns)

    async def bare(self, condition: Condition) -> None:
        """One client leaves a connection that the bare loop has."""
        with self._leaver.connect() as sock:
            self._bare.add(sock.fileno())
            closed_ns = await self._conditions.leave_under(condition)
            woken_ns = await self._bare.woken_ns()
            self._bare.remove(sock.fileno())
        self._note(f"close to bare loop, {condition}", closed_ns, woken_ns)

    def _note(self, name: str, closed_ns: int, seen_ns: int) -> None:
        self.samples[name].append((seen_ns - closed_ns) / 1000)


def run(config: Config) -> Report:
    """Measure, and say how the watcher compares with the bare loop."""
    report = Report("latency", asdict(config))
    _report_samples(report, _run_on_loop(config.loop, _measure_watching(config)), "")
    if config.num_engine_rounds:
        # Here, because it loads torch, which takes seconds.
        from bench._engine_latency import measure_engine

        main = measure_engine(config.num_engine_rounds, config.seed)
        _report_samples(report, _run_on_loop(config.loop, main), "engine at work: ")
    return report


def _report_samples(report: Report, samples: Samples, prefix: str) -> None:
    for name, values in samples.items():
        report.add(name, "us", values)
    flag, bare = f"{prefix}close to flag", f"{prefix}close to bare loop"
    for condition in Condition:
        _compare(report, samples, f"{flag}, {condition}", f"{bare}, {condition}")
    for who in (flag, bare):
        for condition in list(Condition)[1:]:
            _compare(report, samples, f"{who}, {condition}", f"{who}, idle")


def _compare(report: Report, samples: Samples, name: str, baseline: str) -> None:
    report.ratios.append(
        ratio_of_medians(name, baseline, measured=samples[name], baseline=samples[baseline])
    )


def _run_on_loop(kind: str, main: Coroutine[Any, Any, Samples]) -> Samples:
    import uvloop

    factory = uvloop.new_event_loop if kind == "uvloop" else asyncio.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(main)


async def _measure_watching(config: Config) -> Samples:
    order = random.Random(config.seed)
    with (
        Leaver() as leaver,
        Conditions(leaver, seed=config.seed) as conditions,
        BareLoop() as bare,
        Watcher() as watcher,
        closing(loop_mailbox(watcher)) as mailbox,
    ):
        bench = Bench(leaver, conditions, bare=bare, mailbox=mailbox)
        trials = [(side, c) for c in Condition for side in (bench.bare, bench.watched)]
        for side, condition in trials:
            await side(condition)
        # The warm-up leaves the names behind, in the order in which they are reported.
        for values in bench.samples.values():
            values.clear()
        for _ in range(config.num_rounds):
            for side, condition in order.sample(trials, len(trials)):
                await side(condition)
        return bench.samples


if __name__ == "__main__":
    run_command("latency", lambda is_quick: run(QUICK if is_quick else FULL))
