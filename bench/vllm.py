"""A plain vLLM and one with our plugin, in turn: what clients that leave cost those who stay.

Needs the venv that ``.ci/vllm`` makes.
"""

import asyncio
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from bench._engine_decode import vllm_python
from bench._harness import Report, median_of_ratios, run_command
from bench._vllm_load import LEAVES, after_prompt, idle, live_rate, until_idle
from tests.support.vllm_server import VllmServer, vllm_server

__all__ = ["Config", "run"]

OPTIONS = ("--max-num-seqs", "16", "--max-num-batched-tokens", "12288", "--block-size", "32")
STOCK, OURS = "stock", "with the plugin"
ALONE = "alone"


@dataclass(frozen=True, slots=True)
class Config:
    """How much is measured.

    Attributes:
        num_rounds: samples of each number, on each server.
    """

    num_rounds: int


FULL = Config(5)
QUICK = Config(1)


def run(config: Config) -> Report:
    """Measure all of it."""
    if vllm_python() is None:
        raise SystemExit("vLLM is not here: .ci/vllm makes a venv with it")
    report = Report("vllm", asdict(config))
    with TemporaryDirectory() as folder:
        stock, ours = Path(folder) / "stock", Path(folder) / "ours"
        for directory in (stock, ours):
            directory.mkdir()
        with (
            vllm_server(stock, *OPTIONS, DISCONNECT_WATCH_VLLM="0") as plain,
            vllm_server(ours, *OPTIONS, DISCONNECT_WATCH_VLLM="1") as watched,
        ):
            asyncio.run(_measure(report, config, {STOCK: plain, OURS: watched}))
    return report


async def _measure(report: Report, config: Config, servers: dict[str, VllmServer]) -> None:
    samples: dict[str, list[float]] = defaultdict(list)
    for number in range(config.num_rounds + 1):
        kept = samples if number else defaultdict(list)  # the first is the warm-up
        for name, server in servers.items():
            for leave in (None, *LEAVES):
                rate = await live_rate(server, leave)
                kept[f"tokens of who stays, {leave or ALONE}, {name}"].append(rate)
                await idle(server)
            for leave in LEAVES:
                took = await until_idle(server, leave)
                kept[f"until nothing runs, {leave}, {name}"].append(took)
            for leaves in (False, True):
                took = await after_prompt(server, leaves=leaves)
                what = "whose client left" if leaves else "of who stays"
                kept[f"behind a prompt {what}, {name}"].append(took)
                await idle(server)
    for row, values in samples.items():
        report.add(row, "1/s" if row.startswith("tokens") else "ms", values)
    clean, hidden = (f"tokens of who stays, {leave}, {OURS}" for leave in LEAVES)
    alone = f"tokens of who stays, {ALONE}"
    for row, baseline in ((hidden, clean), (f"{alone}, {OURS}", f"{alone}, {STOCK}")):
        report.ratios.append(
            median_of_ratios(row, baseline, measured=samples[row], baseline=samples[baseline])
        )


def main() -> None:
    run_command("vllm", lambda is_quick: run(QUICK if is_quick else FULL))


if __name__ == "__main__":
    main()
