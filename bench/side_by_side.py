"""Our servers beside others: who notices that a client left, how soon, and who pays if not.

Each server is started by itself and asked by ``stress``. In applications the work is
the same: 5 ms a step, four requests at a time, 10 steps for who stays and 100 for who leaves; the
engines generate with the model of the package.
"""

import asyncio
from dataclasses import asdict, dataclass

from bench._harness import Report, ratio_of_medians, run_command
from bench._sides_measure import LEAVES, leave_ms, load, ready
from bench._sides_peers import PEERS, Peer, Served

__all__ = ["Config", "run"]


@dataclass(frozen=True, slots=True)
class Config:
    """How much is measured.

    Attributes:
        num_leaves: of each way.
        num_rounds: of the load, each without and with those who leave.
        num_stay, num_leave: clients in a round.
        give_up: seconds after a leave, when the work is taken to go on.
    """

    num_leaves: int = 5
    num_rounds: int = 3
    num_stay: int = 60
    num_leave: int = 60
    give_up: float = 0.3


FULL = Config()
QUICK = Config(num_leaves=1, num_rounds=1, num_stay=8, num_leave=8)


def run(config: Config, peers: tuple[Peer, ...] = PEERS) -> Report:
    """Measure all that are here."""
    report = Report("side_by_side", asdict(config))
    for peer in peers:
        if why_not := peer.why_not():
            report.notes.append(f"{peer.name}: not measured, {why_not}")
            continue
        print(peer.name, flush=True)
        with peer.serve() as served:
            asyncio.run(_measure(report, peer.name, served, config))
    return report


async def _measure(report: Report, name: str, served: Served, config: Config) -> None:
    await ready(served)
    await load(served, num_stay=config.num_stay, num_leave=0, seed=0)  # what is made once
    for way in LEAVES:
        ended = [
            await leave_ms(served, way, give_up=config.give_up) for _ in range(config.num_leaves)
        ]
        noticed = [ms for ms in ended if ms is not None]
        report.add(f"{name}: noticed, {way}", "share", [float(ms is not None) for ms in ended])
        if noticed:
            report.add(f"{name}: leave to end of work, {way}", "ms", noticed)
    alone, among, wasted = [], [], []
    for index in range(config.num_rounds):
        quiet = await load(served, num_stay=config.num_stay, num_leave=0, seed=index)
        left = await load(served, num_stay=config.num_stay, num_leave=config.num_leave, seed=index)
        alone.append(quiet.answers_per_second)
        among.append(left.answers_per_second)
        wasted.append(100 * left.wasted)
        if quiet.num_failed or left.num_failed:
            report.notes.append(f"{name}: {quiet.num_failed} and {left.num_failed} clients failed")
    report.add(f"{name}: answers, nobody leaves", "1/s", alone)
    report.add(f"{name}: answers, half leave", "1/s", among)
    report.add(f"{name}: work done for who left", "%", wasted)
    report.ratios.append(
        ratio_of_medians(
            f"{name}: answers, half leave",
            f"{name}: answers, nobody leaves",
            measured=among,
            baseline=alone,
        )
    )


if __name__ == "__main__":
    run_command("side_by_side", lambda quick: run(QUICK if quick else FULL))
