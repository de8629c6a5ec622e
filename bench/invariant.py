"""What batch-invariant mode costs: the same decode steps and the same prompts with and without it.

Prompts are read with nothing cached. CPU time of the engine's thread; the two take turns.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from bench._harness import Report, median_of_ratios, run_command
from disconnect_watch.engine import Engine, EngineConfig, SamplingParams

__all__ = ["Config", "run"]

PROMPT_LEN = 64


@dataclass(frozen=True, slots=True)
class Config:
    """How much is measured.

    Attributes:
        num_rows: of the decode steps, for each comparison.
        prompt_lens: tokens of the prompts, likewise.
        num_rounds: of each, one sample with and one without.
        num_steps: in one sample of decoding.
    """

    num_rows: tuple[int, ...]
    prompt_lens: tuple[int, ...]
    num_rounds: int
    num_steps: int


FULL = Config((1, 32), (128, 512, 2048, 4000), 10, 10)
QUICK = Config((1, 32), (128, 512), 4, 3)


def run(config: Config) -> Report:
    """Measure all of it."""
    report = Report("invariant", asdict(config))
    for num_rows in config.num_rows:
        _compare(report, config, f"a step of {num_rows}", _decode, num_rows)
    for prompt_len in config.prompt_lens:
        _compare(report, config, f"a prompt of {prompt_len}", _prefill, prompt_len)
    return report


def _compare(
    report: Report,
    config: Config,
    what: str,
    make: Callable[[Config, int, bool], Callable[[], None]],
    size: int,
) -> None:
    names = {True: f"{what}, batch-invariant", False: what}
    works = {name: make(config, size, is_invariant) for is_invariant, name in names.items()}
    samples: dict[str, list[float]] = {name: [] for name in works}
    for round_ in range(config.num_rounds + 1):
        for name, work in works.items():
            start_ns = time.thread_time_ns()
            work()
            # The first round is the warm-up.
            if round_:
                samples[name].append((time.thread_time_ns() - start_ns) / 1e6)
    for name in works:
        report.add(name, "ms", samples[name])
    measured, baseline = (samples[names[is_invariant]] for is_invariant in (True, False))
    report.ratios.append(
        median_of_ratios(names[True], names[False], measured=measured, baseline=baseline)
    )


def _decode(config: Config, num_rows: int, is_invariant: bool) -> Callable[[], None]:
    engine = Engine.from_pretrained(config=EngineConfig(batch_invariant=is_invariant))
    params = SamplingParams(max_tokens=engine.max_model_len, ignore_eos=True)
    for index in range(num_rows):
        engine.add_request(_prompt(index, PROMPT_LEN), params, request_id=str(index))
    while engine.stats().num_generated_tokens < num_rows:
        engine.step()

    def work() -> None:
        for _ in range(config.num_steps):
            engine.step()

    return work


def _prefill(config: Config, prompt_len: int, is_invariant: bool) -> Callable[[], None]:
    engine = Engine.from_pretrained(
        config=EngineConfig(batch_invariant=is_invariant, enable_prefix_caching=False)
    )

    def work() -> None:
        engine.add_request(_prompt(1, prompt_len), SamplingParams(max_tokens=1), request_id="a")
        while engine.has_work:
            engine.step()

    return work


def _prompt(index: int, length: int) -> list[int]:
    return [1 + (index * 31 + position * 7) % 1000 for position in range(length)]


def main() -> None:
    run_command("invariant", lambda is_quick: run(QUICK if is_quick else FULL))


if __name__ == "__main__":
    main()
