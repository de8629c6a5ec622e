"""The engine's benchmark: what it counts as spent, what its oracle is told, and that it runs."""

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from bench import engine as bench_engine
from bench import engine_plot
from bench._engine_decode import make_prompts, tokens_per_second, vllm_python
from bench._engine_serving import Arrival, Served, make_arrivals, oracle_of, serve
from tests.support.engine import make_engine
from tests.unit.test_bench import RESULTS_DIR, assert_schema

SVG = "{http://www.w3.org/2000/svg}"


def stays(num_tokens: int) -> Arrival:
    return Arrival(tuple(range(1, 20)), num_tokens, None)


#: Its time to leave has come before anything is computed for it.
LEAVES_AT_ONCE = Arrival(tuple(range(1, 20)), 100, -1.0)


def test_every_token_is_delivered_where_nobody_leaves() -> None:
    served = serve(make_engine(), "on", [stays(n) for n in (5, 9, 3, 7)], num_clients=2)
    assert served.num_delivered == [5, 9, 3, 7]
    assert served.wastes == []
    assert served.throughput == pytest.approx(24 / served.seconds)


def test_who_left_gets_nothing_more_and_is_computed_to_the_end_if_nobody_finds_out() -> None:
    served = serve(make_engine(), "off", [LEAVES_AT_ONCE, stays(5)], num_clients=1)
    assert served.num_delivered[1] == 5
    assert served.num_delivered[0] < 100
    [waste] = served.wastes
    # All but what was computed before another thread came to set the flag.
    assert waste.tokens > 0
    assert waste.block_seconds > 0


@pytest.mark.parametrize("policy", ["on", "steps"])
def test_who_left_is_cancelled_by_whoever_finds_out(policy: Any) -> None:
    engine = make_engine()
    served = serve(engine, policy, [LEAVES_AT_ONCE, stays(5)], num_clients=1)
    assert served.num_delivered[1] == 5
    assert sum(served.num_computed) < 2 * 119
    assert {kind for kind, _ in engine.stats().outcomes} == {"finished", "cancelled"}


def test_the_oracle_is_told_what_each_got_before_it_left() -> None:
    arrivals = [stays(5), LEAVES_AT_ONCE, LEAVES_AT_ONCE, LEAVES_AT_ONCE]
    known = oracle_of(arrivals, Served([5, 7, 0, 0], [23, 26, 0, 11]))
    assert [(len(a.prompt), a.num_tokens, a.leaves_after) for a in known] == [
        (19, 5, None),
        (19, 7, None),
        # One never came to be computed; of the other's prompt a part was.
        (11, 1, None),
    ]


def test_work_that_reached_nobody_reaches_nobody_with_the_oracle() -> None:
    known = oracle_of([stays(5), LEAVES_AT_ONCE], Served([5, 0], [23, 11]))
    served = serve(make_engine(), "oracle", known, num_clients=2)
    assert served.num_delivered == [5, 0]


def test_arrivals_are_the_same_for_the_same_seed() -> None:
    def make(seed: int) -> list[Arrival]:
        return make_arrivals(50, share=0.5, mean_seconds=1, vocab_size=100, seed=seed)

    assert make(1) == make(1) != make(2)
    num_leaving = sum(arrival.leaves_after is not None for arrival in make(1))
    assert 10 < num_leaving < 40


def test_speed_of_decoding_is_that_without_the_first_token() -> None:
    orders: list[int] = []

    def generate(prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        orders.append(num_tokens)
        return [list(range(num_tokens * 10_000))[:num_tokens] for _ in prompts]

    speed, tokens = tokens_per_second(generate, make_prompts(3, 4, seed=0), 20)
    assert orders == [1, 20]
    assert [len(row) for row in tokens] == [20] * 3
    assert speed > 0


def test_vllm_is_left_out_where_its_venv_is_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("VLLM_VENV", str(tmp_path))
    assert vllm_python() is None
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    assert vllm_python() == tmp_path / "bin" / "python"


def results_of(value: float) -> dict[str, Any]:
    rows = [
        {"name": f"{what}, {name}, {share} % leave: mean", "median": value}
        for what, *_ in engine_plot.PANELS
        for name in bench_engine.NAMES.values()
        for share in bench_engine.SHARES
    ]
    return {"rows": rows}


def test_picture_has_a_bar_for_each_policy_as_high_as_what_it_spends() -> None:
    def heights(value: float) -> set[str | None]:
        root = ElementTree.fromstring(engine_plot.draw(results_of(value)))
        return {bar.get("height") for bar in root.iter(f"{SVG}rect")} - {"12"}

    assert heights(0) == {"0"}
    assert heights(1e3) == heights(1e9) == {str(engine_plot.PANEL_HEIGHT)}
    assert heights(1) == {f"{engine_plot.PANEL_HEIGHT / 2:g}"}


def test_picture_is_that_of_the_committed_results(tmp_path: Path) -> None:
    path = RESULTS_DIR / "engine.json"
    if not path.exists():
        pytest.skip("no full run of bench.engine is committed")
    engine_plot.main(["--out", str(tmp_path / "engine.svg")])
    assert (tmp_path / "engine.svg").read_text() == engine_plot.IMAGE.read_text()


@pytest.mark.exhaustive
def test_engine_bench_runs_and_writes_its_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_VENV", str(tmp_path))
    config = bench_engine.Config(1, 8, 4, 2, 1500, 1, 8, num_prompt_tokens=16)
    path = tmp_path / "engine.json"
    bench_engine.run(config).write(path)
    results = json.loads(path.read_text())
    assert_schema(results)
    assert any("vLLM was left out" in note for note in results["notes"])
    assert "transformers.generate: 4 of 4 answers are those of our engine" in results["notes"]
    names = {row["name"] for row in results["rows"]}
    assert "decode, 4 at once, our engine" in names
    assert "first token on an idle engine" in names
