"""The embedded engine: what leaving clients cost those who stay, and how fast it is without them.

Live throughput while clients leave, by who finds out, beside an oracle; tokens and block-seconds
spent on a client after it left; how soon a long prefill ends and whether the next client notices;
tokens a second of a full batch, beside ``transformers.generate`` and vLLM.
"""

from collections import defaultdict
from dataclasses import asdict, dataclass

from bench._engine_decode import (
    OURS,
    generators,
    make_prompts,
    tokens_per_second,
    vllm_python,
)
from bench._engine_prefill import PrefillBench
from bench._engine_serving import POLICIES, Policy, Served, make_arrivals, oracle_of, serve
from bench._harness import Report, median_of_ratios, ratio_of_medians, run_command
from disconnect_watch.engine import DEFAULT_MODEL, Engine, EngineConfig

__all__ = ["NAMES", "SHARES", "Config", "run"]

#: How policies are called in the results.
NAMES: dict[Policy, str] = {
    "off": "cancel off",
    "steps": "cancel between steps",
    "on": "cancel in steps, too",
    "oracle": "oracle",
}
SHARES = (10, 50, 90)


@dataclass(frozen=True, slots=True)
class Config:
    """How much is measured.

    Attributes:
        num_rounds: of serving, each share and policy in turn.
        num_arrivals: clients in one run of serving.
        num_seqs: of the batch, in serving and decoding.
        num_prefills: of long prompts, each with one prompt on an idle engine.
        num_prefill_tokens: of a long prompt.
        num_decode_rounds: of each engine in turn.
        num_decode_tokens: that follow each prompt.
        num_prompt_tokens: of the prompts in decoding.
        seed: of everything random.
    """

    num_rounds: int
    num_arrivals: int
    num_seqs: int
    num_prefills: int
    num_prefill_tokens: int
    num_decode_rounds: int
    num_decode_tokens: int
    num_prompt_tokens: int = 64
    seed: int = 1


FULL = Config(11, 80, 32, 30, 8000, 10, 128)
QUICK = Config(1, 40, 32, 4, 2000, 2, 64)


def run(config: Config) -> Report:
    """Measure all of it."""
    report = Report("engine", asdict(config))
    _serving(report, config)
    _prefill(report, config)
    _decode(report, config)
    return report


def _serving(report: Report, config: Config) -> None:
    engine = Engine.from_pretrained(
        DEFAULT_MODEL,
        EngineConfig(num_threads=1, max_num_seqs=config.num_seqs, enable_prefix_caching=False),
    )
    num_clients = config.num_seqs + config.num_seqs // 4
    vocab_size = engine.model_config.vocab_size
    # How long a request takes on this machine, so that about half of those who leave are served
    # for a good while before.
    crowd = make_arrivals(
        config.num_arrivals, share=0, mean_seconds=1, vocab_size=vocab_size, seed=config.seed
    )
    served = serve(engine, "on", crowd, num_clients=num_clients)
    mean_seconds = served.seconds * num_clients / config.num_arrivals / 2
    report.notes.append(f"clients who leave do so after {mean_seconds:.2f} s in the mean")
    throughputs: dict[str, list[float]] = defaultdict(list)
    tokens: dict[str, list[float]] = defaultdict(list)
    block_seconds: dict[str, list[float]] = defaultdict(list)
    for round_ in range(config.num_rounds):
        for share in SHARES:
            arrivals = make_arrivals(
                config.num_arrivals,
                share=share / 100,
                mean_seconds=mean_seconds,
                vocab_size=vocab_size,
                seed=config.seed + 1 + round_,
            )
            served = serve(engine, "on", arrivals, num_clients=num_clients)
            known = oracle_of(arrivals, served)
            runs: dict[Policy, Served] = {
                "on": served,
                "oracle": serve(engine, "oracle", known, num_clients=num_clients),
                "steps": serve(engine, "steps", arrivals, num_clients=num_clients),
                "off": serve(engine, "off", arrivals, num_clients=num_clients),
            }
            for policy, result in runs.items():
                name = f"{NAMES[policy]}, {share} % leave"
                throughputs[name].append(result.throughput)
                tokens[name] += [waste.tokens for waste in result.wastes]
                block_seconds[name] += [waste.block_seconds for waste in result.wastes]
    for share in SHARES:
        names = {policy: f"{NAMES[policy]}, {share} % leave" for policy in POLICIES}
        for policy in POLICIES:
            name = names[policy]
            report.add(f"live throughput, {name}", "tokens/s", throughputs[name])
            if policy != "oracle" and tokens[name]:
                report.add(f"tokens after a leave, {name}", "1", tokens[name])
                report.add(f"tokens after a leave, {name}: mean", "1", [_mean(tokens[name])])
                report.add(f"block-seconds after a leave, {name}", "s", block_seconds[name])
                report.add(
                    f"block-seconds after a leave, {name}: mean", "s", [_mean(block_seconds[name])]
                )
        for policy in POLICIES[:-1]:
            report.ratios.append(
                median_of_ratios(
                    f"live throughput, {names[policy]}",
                    f"live throughput, {names['oracle']}",
                    measured=throughputs[names[policy]],
                    baseline=throughputs[names["oracle"]],
                )
            )


def _mean(samples: list[float]) -> float:
    return sum(samples) / len(samples)


def _prefill(report: Report, config: Config) -> None:
    bench = PrefillBench(config.num_prefill_tokens, seed=config.seed)
    bench.idle()
    samples: dict[str, list[float]] = defaultdict(list)
    long = f"a prefill of {config.num_prefill_tokens:,} tokens"
    idle, after = "first token on an idle engine", f"first token after {long} was cancelled"
    for _ in range(config.num_prefills):
        samples[idle].append(bench.idle())
        stopped, first, since_leave = bench.after_cancel()
        samples[after].append(first)
        samples[f"flag to the end of {long}"].append(stopped)
        samples["first token of who came when the other left"].append(since_leave)
    for name, values in samples.items():
        report.add(name, "ms", values)
    report.ratios.append(
        ratio_of_medians(after, idle, measured=samples[after], baseline=samples[idle])
    )


def _decode(report: Report, config: Config) -> None:
    python = vllm_python()
    if python is None:
        report.notes.append("vLLM was left out: .ci/vllm makes the venv that it runs in")
    samples: dict[str, list[float]] = defaultdict(list)
    prompts = make_prompts(config.num_seqs, config.num_prompt_tokens, seed=config.seed)
    with generators(config.num_seqs, vllm=python) as found:
        expected = None
        for round_ in range(config.num_decode_rounds + 1):
            for name, generate in found.items():
                speed, tokens = tokens_per_second(generate, prompts, config.num_decode_tokens)
                expected = tokens if expected is None else expected
                # The first round is the warm-up, and shows who computes the same.
                if round_:
                    samples[name].append(speed)
                else:
                    num_same = sum(a == b for a, b in zip(tokens, expected, strict=True))
                    report.notes.append(
                        f"{name}: {num_same} of {len(prompts)} answers are those of {OURS}"
                    )
    names = {who: f"decode, {config.num_seqs} at once, {who}" for who in samples}
    for who, name in names.items():
        report.add(name, "tokens/s", samples[who])
    for who in samples:
        if who != OURS:
            report.ratios.append(
                median_of_ratios(
                    names[OURS], names[who], measured=samples[OURS], baseline=samples[who]
                )
            )


if __name__ == "__main__":
    run_command("engine", lambda is_quick: run(QUICK if is_quick else FULL))
