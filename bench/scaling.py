"""Close to flag, and CPU, with ten to 18,000 attached connections whose clients go on sending.

All connections are open from the start; every round attaches the first so many of
them for each level, in an order of its own, beside the bare C loop with as many.
The clients live in processes of their own: one that sends requests on all
connections, which nobody here reads, and one that leaves.
"""

import asyncio
import random
import resource
import socket
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass

from bench._bare_loop import BareLoop
from bench._harness import Report, ratio_of_medians, run_command
from bench._leaver import Leaver
from disconnect_watch import CancelToken, Watcher

__all__ = ["Config", "run"]

GIVE_UP = 10.0
#: Seconds before the client closes, in which requests have begun to flow.
DELAY = (0.0003, 0.0009)
#: Requests that flow while a client leaves.
NUM_MEANWHILE = 50
#: What else the process holds open.
NUM_OTHER_FDS = 200

Samples = dict[str, list[float]]


@dataclass(frozen=True, slots=True)
class Config:
    """How much is measured.

    Attributes:
        levels: connections attached, in ascending order.
        num_rounds: of all levels.
        num_leaves: clients that leave in a round at each level, and as many beside the
            bare loop.
        num_bursts: times in a round at each level that every attached connection gets
            a request.
        seed: of the order of levels and of the client's delays.
    """

    levels: tuple[int, ...]
    num_rounds: int
    num_leaves: int
    num_bursts: int
    seed: int = 0


FULL = Config((10, 100, 1_000, 10_000, 18_000), num_rounds=20, num_leaves=50, num_bursts=2)
QUICK = Config((10, 100, 1_000), num_rounds=5, num_leaves=20, num_bursts=2)


class Bench:
    """One run: the open connections, and what was found at each level."""

    def __init__(
        self, config: Config, *, crowd: Leaver, leaver: Leaver, bare: BareLoop, watcher: Watcher
    ) -> None:
        self._config = config
        self._crowd = crowd
        self._leaver = leaver
        self._bare = bare
        self._watcher = watcher
        self._random = random.Random(config.seed)
        self.samples: Samples = defaultdict(list)
        self.num_wakeups: Samples = defaultdict(list)

    def run_level(self, socks: list[socket.socket]) -> None:
        """One round with these connections attached."""
        level = len(socks)
        with self._attached(socks):
            self._burst(level)
            for _ in range(self._config.num_leaves):
                self._watched(level)
        with self._added(socks):
            for _ in range(self._config.num_leaves):
                self._beside(level)

    def _burst(self, level: int) -> None:
        """Note wake-ups, and CPU a request, while requests flow and nobody leaves."""
        num_requests = level * self._config.num_bursts
        wakeups_before = self._watcher.stats().num_wakeups
        cpu_before_ns = time.process_time_ns()
        for _ in range(self._config.num_bursts):
            self._crowd.request(level)
        cpu_ns = time.process_time_ns() - cpu_before_ns
        num_wakeups = self._watcher.stats().num_wakeups - wakeups_before
        self.num_wakeups[f"wake-ups by {num_requests} requests"].append(num_wakeups)
        self.samples[f"CPU of ours a request, {level} attached"].append(cpu_ns / num_requests)

    def _watched(self, level: int) -> None:
        token = CancelToken()
        with self._leaver.connect() as sock, self._watcher.attach(sock) as connection:
            connection.arm(token)
            closed_ns = self._leave(level)
            if not token.wait(GIVE_UP):
                raise TimeoutError(f"the watcher saw nothing for {GIVE_UP} seconds")
        self._note(f"close to flag, {level} attached", token.times()[1] - closed_ns)

    def _beside(self, level: int) -> None:
        with self._leaver.connect() as sock:
            self._bare.add(sock.fileno())
            closed_ns = self._leave(level)
            woken_ns = asyncio.run(self._bare.woken_ns())
            self._bare.remove(sock.fileno())
        self._note(f"close to bare loop, {level} attached", woken_ns - closed_ns)

    def _leave(self, level: int) -> int:
        """Have one client leave while requests flow to others."""
        self._leaver.order_close(delay=self._random.uniform(*DELAY), settle=0)
        self._crowd.request(min(level, NUM_MEANWHILE))
        return self._leaver.closed_ns()

    def _note(self, name: str, duration_ns: float) -> None:
        self.samples[name].append(duration_ns / 1000)

    @contextmanager
    def _attached(self, socks: list[socket.socket]) -> Iterator[None]:
        connections = [self._watcher.attach(sock) for sock in socks]
        try:
            yield
        finally:
            for connection in connections:
                connection.detach()

    @contextmanager
    def _added(self, socks: list[socket.socket]) -> Iterator[None]:
        for sock in socks:
            self._bare.add(sock.fileno())
        try:
            yield
        finally:
            for sock in socks:
                self._bare.remove(sock.fileno())


def run(config: Config) -> Report:
    """Measure, and compare each level with the bare loop and with the lowest level."""
    report = Report("scaling", asdict(config))
    levels = _within_limit(config.levels, report)
    order = random.Random(config.seed)
    with ExitStack() as stack:
        crowd = stack.enter_context(Leaver())
        bench = Bench(
            config,
            crowd=crowd,
            leaver=stack.enter_context(Leaver()),
            bare=stack.enter_context(BareLoop()),
            watcher=stack.enter_context(Watcher()),
        )
        # The crowd's newest connections get the requests: so attach these first.
        socks = [stack.enter_context(crowd.connect()) for _ in range(levels[-1])][::-1]
        for level in levels:
            bench.run_level(socks[:level])
        # The warm-up leaves the names behind, in the order in which they are reported.
        for values in (*bench.samples.values(), *bench.num_wakeups.values()):
            values.clear()
        for _ in range(config.num_rounds):
            for level in order.sample(levels, len(levels)):
                bench.run_level(socks[:level])
    _report(report, bench, levels)
    return report


def _report(report: Report, bench: Bench, levels: tuple[int, ...]) -> None:
    for name, values in bench.samples.items():
        report.add(name, "ns" if name.startswith("CPU") else "us", values)
    for name, values in bench.num_wakeups.items():
        report.add(name, "wake-ups", values)
    pairs = [(f"flag, {level}", f"bare loop, {level}") for level in levels]
    pairs += [(f"flag, {level}", f"flag, {levels[0]}") for level in levels[1:]]
    for ours, theirs in pairs:
        name, baseline = f"close to {ours} attached", f"close to {theirs} attached"
        report.ratios.append(
            ratio_of_medians(
                name, baseline, measured=bench.samples[name], baseline=bench.samples[baseline]
            )
        )


def _within_limit(levels: tuple[int, ...], report: Report) -> tuple[int, ...]:
    """Raise the limit of open files as far as it goes, and leave out what is beyond it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    possible = tuple(level for level in levels if level + NUM_OTHER_FDS <= hard)
    for level in levels[len(possible) :]:
        report.notes.append(f"{level} connections were left out: the limit is {hard} open files")
    return possible


if __name__ == "__main__":
    run_command("scaling", lambda is_quick: run(QUICK if is_quick else FULL))
