"""Several decode steps in one launch, interpreted: the engine's own step, without the host between.

On a CPU the loop is the host's, over the same step and latch that a GPU has in a graph.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from disconnect_watch.engine import (
    Engine,
    EngineConfig,
    EngineThread,
    RequestOutput,
    SamplingParams,
)
from disconnect_watch.engine.kernel_decoder import KernelDecoder
from disconnect_watch.kernels import DecodeState, FlagView, Kernels, RowState, Sampling
from disconnect_watch.token import CancelToken, Reason
from tests.support.engine import (
    collect,
    dense_greedy,
    make_engine,
    run_to_end,
    tiny_model,
    tokens_of,
)
from tests.support.loops import LoopRunner

STEPS = 4
PROMPTS = {
    name: [(13 * index + 41 * len(name)) % 256 for index in range(length)]
    for name, length in (("a", 3), ("bb", 21), ("ccc", 9))
}


@pytest.fixture(autouse=True)
def _interpreted(interpreted: Kernels) -> None:
    """All of this file needs Triton in its interpreter."""


def params(num_tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": num_tokens, "ignore_eos": True, **more})


def loop_engine(**config: Any) -> Engine:
    return make_engine(**{"arithmetic": "triton", "device_steps": STEPS, **config})


class Watched:
    """An engine whose loop is looked into.

    Attributes:
        num_steps: that the device has run, by step of the engine.
        logits: of each of them, [num_rows, vocab_size].
        at: what to do when so many have run, before the next latch.
    """

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine = engine
        self.num_steps: list[int] = []
        self.logits: list[Tensor] = []
        self.at: dict[int, Any] = {}
        decoder = engine._runner.decoder
        assert isinstance(decoder, KernelDecoder)
        self.cache = decoder.cache
        self.kernels = kernels = decoder._kernels
        sample, advance, decode = kernels.sample, kernels.advance, decoder.decode

        def on_sample(logits: Tensor, positions: Tensor, sampling: Sampling) -> Tensor:
            self.logits.append(logits.clone())
            return sample(logits, positions, sampling)

        def on_advance(tokens: Tensor, state: DecodeState) -> None:
            advance(tokens, state)
            self.num_steps[-1] += 1

        def on_decode(*args: Any, **options: Any) -> Any:
            self.num_steps.append(0)
            self.logits.clear()
            return decode(*args, **options)

        def on_look(step: int, layer: int) -> None:
            if self.num_steps and (act := self.at.pop(self.num_steps[-1], None)):
                act()

        monkeypatch.setattr(kernels, "sample", on_sample)
        monkeypatch.setattr(kernels, "advance", on_advance)
        monkeypatch.setattr(decoder, "decode", on_decode)
        engine.layer_hook = on_look


def begin(engine: Engine, num_tokens: int, **more: Any) -> dict[str, CancelToken]:
    """Submit all, and read their prompts; the next step is a loop."""
    tokens = {name: CancelToken() for name in PROMPTS}
    for seed, (name, prompt) in enumerate(PROMPTS.items()):
        given = params(num_tokens, seed=seed, **more)
        engine.add_request(prompt, given, request_id=name, cancel=tokens[name])
    return tokens


def told(outputs: list[RequestOutput]) -> dict[str, list[RequestOutput]]:
    by_name: dict[str, list[RequestOutput]] = {}
    collect(outputs, by_name)
    return by_name


@pytest.mark.slow
def test_tokens_are_those_of_single_steps_and_of_torch() -> None:
    drawn = {"temperature": 1.1, "top_k": 20, "top_p": 0.9}
    found = []
    for steps, arithmetic in ((STEPS, "triton"), (1, "triton"), (1, "torch")):
        engine = loop_engine(device_steps=steps, arithmetic=arithmetic)
        begin(engine, 5)
        engine.add_request(PROMPTS["bb"], params(4, seed=2**64 - 5, **drawn), request_id="drawn")
        found.append({name: tokens_of(outputs) for name, outputs in run_to_end(engine).items()})
        assert engine.stats().num_steps == (5 if steps == 1 else 1 + 1)
    assert found[0] == found[1] == found[2]
    for name, prompt in PROMPTS.items():
        assert found[0][name] == dense_greedy(tiny_model(), prompt, 5)


def test_tokens_of_a_launch_are_told_in_order_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(loop_engine(), monkeypatch)
    begin(watched.engine, 9)
    assert all(len(outputs) == 1 for outputs in told(watched.engine.step()).values())
    for name, outputs in told(watched.engine.step()).items():
        assert [len(output.token_ids) for output in outputs] == [1] * STEPS
        assert [output.num_generated_tokens for output in outputs] == [2, 3, 4, 5]
        assert tokens_of(outputs) == dense_greedy(tiny_model(), PROMPTS[name], 5)[1:]
    assert watched.num_steps == [STEPS]
    assert watched.engine.step_log[-1].layer_tokens == (3 * STEPS,) * 3


@pytest.mark.slow
@pytest.mark.parametrize("way", ["token", "abort", "deadline"])
def test_who_ends_in_the_loop_is_out_with_the_same_step_and_others_keep_every_bit(
    monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    calm = Watched(loop_engine(), monkeypatch)
    begin(calm.engine, 6)
    calm.engine.step()
    calm.engine.step()

    watched = Watched(loop_engine(), monkeypatch)
    engine = watched.engine
    now = 1
    engine.clock = lambda: now
    leaves = CancelToken()
    for seed, (name, prompt) in enumerate(PROMPTS.items()):
        is_leaver = name == "bb"
        engine.add_request(
            prompt,
            params(6, seed=seed),
            request_id=name,
            cancel=leaves if is_leaver else CancelToken(),
            time_limit=1.0 if is_leaver else None,
        )
    engine.step()
    # Where its next keys would lie: 22 tokens are known now, and 23 when two steps have run.
    canaries: list[int] = []
    key = watched.cache.keys[0]

    def end() -> None:
        nonlocal now
        blocks = engine._pool.block_ids("bb")
        canaries.extend(blocks[at // 4] * 4 + at % 4 for at in (23, 24))
        key[canaries] = 7.0
        if way == "token":
            leaves.cancel(Reason.FIN)
        elif way == "abort":
            request = engine.find("bb")
            assert request is not None
            assert request.mark_cancelled(Reason.ABORTED)
        else:
            now += 2_000_000_000

    acked: list[int] = []
    watched.at[2] = end
    watched.at[3] = lambda: acked.append(leaves.acked)
    outputs = told(engine.step())
    assert watched.num_steps == [STEPS], "the others go on"
    assert acked == [2 if way == "token" else 0], "by the device, with the number of the step"
    assert bool((key[canaries] == 7.0).all()), "a dead row has written"
    outcome = outputs["bb"][-1].outcome
    assert outcome is not None
    assert (outcome.kind, outcome.phase) == ("cancelled", "decode")
    assert (
        outcome.reason
        is {
            "token": Reason.FIN,
            "abort": Reason.ABORTED,
            "deadline": Reason.DEADLINE,
        }[way]
    )
    assert [output.token_ids for output in outputs["bb"]] == [()], "none after the flag"
    assert outcome.num_wasted_tokens == 2
    for given, expected in zip(watched.logits, calm.logits, strict=True):
        for row in (0, 2):
            assert torch.equal(given[row], expected[row])
    for name, more in run_to_end(engine).items():
        outputs[name] += more
    for name in ("a", "ccc"):
        assert tokens_of(outputs[name]) == dense_greedy(tiny_model(), PROMPTS[name], 6)[1:]
    assert engine.stats().num_blocks_available == engine.stats().num_blocks


def test_the_launch_ends_when_the_last_row_is_dead_or_done(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(loop_engine(device_steps=16), monkeypatch)
    engine = watched.engine
    tokens = begin(engine, 30)
    engine.add_request(PROMPTS["a"], params(3), request_id="short")
    engine.step()

    def leave() -> None:
        for token in tokens.values():
            token.cancel(Reason.RESET)

    watched.at[5] = leave
    outputs = told(engine.step())
    assert watched.num_steps == [5]
    assert tokens_of(outputs["short"]) == dense_greedy(tiny_model(), PROMPTS["a"], 3)[1:]
    assert {outputs[name][-1].outcome is None for name in PROMPTS} == {False}
    assert engine.stats().num_wasted_tokens == 3 * 5
    assert not engine.has_work
    assert engine.stats().num_blocks_available == engine.stats().num_blocks


def test_a_batch_that_left_before_the_launch_runs_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(loop_engine(), monkeypatch)
    tokens = begin(watched.engine, 9)
    watched.engine.step()
    # The host has looked, and launches.
    watched.at[0] = lambda: [token.cancel(Reason.FIN) for token in tokens.values()]
    outputs = told(watched.engine.step())
    assert watched.num_steps == [0]
    assert all(each[-1].outcome is not None for each in outputs.values())
    assert watched.engine.stats().num_wasted_tokens == 0


@pytest.mark.parametrize("many", [False, True])
def test_a_stop_token_ends_its_row_on_the_device(
    monkeypatch: pytest.MonkeyPatch, many: bool
) -> None:
    """Each row has its own; that of one is no stop of another."""
    watched = Watched(loop_engine(device_steps=8), monkeypatch)
    engine = watched.engine
    answer = dense_greedy(tiny_model(), PROMPTS["a"], 12)
    stop = answer[4]
    others = tuple(token for token in range(256) if token not in answer)[:200] if many else ()
    engine.add_request(PROMPTS["a"], params(12, stop_token_ids=(*others, stop)), request_id="stops")
    engine.add_request(PROMPTS["a"], params(7), request_id="goes on")
    engine.step()
    outputs = told(engine.step())
    at = answer.index(stop)
    assert watched.num_steps == [6]
    assert tokens_of(outputs["stops"]) == answer[1 : at + 1]
    outcome = outputs["stops"][-1].outcome
    assert outcome is not None
    assert (outcome.finish_reason, outcome.stop_reason) == ("stop", stop)
    assert tokens_of(outputs["goes on"]) == answer[1:7]
    assert engine.stats().num_wasted_tokens == 0


def test_an_end_token_ends_its_row_unless_it_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(loop_engine(device_steps=8), monkeypatch)
    engine = watched.engine
    answer = dense_greedy(tiny_model(), PROMPTS["a"], 8)
    object.__setattr__(engine.model_config, "eos_token_ids", (answer[2],))
    engine.eos_token_ids = (answer[2],)
    engine.add_request(PROMPTS["a"], params(8, ignore_eos=False), request_id="ends")
    engine.step()
    assert tokens_of(told(engine.step())["ends"]) == answer[1 : answer.index(answer[2]) + 1]
    assert watched.num_steps == [answer.index(answer[2])]


def test_a_stop_string_is_found_behind_the_launch_and_the_rest_is_wasted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = loop_engine(device_steps=1)
    plain.add_request(PROMPTS["a"], params(12), request_id="a")
    pieces = [output.text_delta for output in run_to_end(plain)["a"]]
    stop = pieces[2]
    at = pieces.index(stop)
    assert stop
    watched = Watched(loop_engine(device_steps=8), monkeypatch)
    engine = watched.engine
    engine.add_request(PROMPTS["a"], params(12, stop=(stop,)), request_id="a")
    outputs = run_to_end(engine)["a"]
    assert "".join(output.text_delta for output in outputs) == "".join(pieces[:at])
    assert outputs[-1].outcome is not None
    assert outputs[-1].outcome.stop_reason == stop
    assert len(tokens_of(outputs)) == at + 1
    assert watched.num_steps == [8]
    assert engine.stats().num_wasted_tokens == 8 - at
    assert engine.stats().num_stale_events == 0


@pytest.mark.slow
@pytest.mark.parametrize(("num_blocks", "num_steps"), [(4, 2), (3, 3)])
def test_a_full_cache_shortens_the_launch_and_sends_nobody_away(
    num_blocks: int, num_steps: int
) -> None:
    """Each needs two blocks of four tokens; who finds one draws what that holds first."""
    engine = loop_engine(num_blocks=num_blocks, max_model_len=8, enable_prefix_caching=False)
    for name in "xy":
        engine.add_request(PROMPTS["a"], params(5), request_id=name)
    for outputs in run_to_end(engine).values():
        assert tokens_of(outputs) == dense_greedy(tiny_model(), PROMPTS["a"], 5)
    assert engine.stats().num_preemptions == 0
    assert engine.stats().num_steps == num_steps


def test_scores_that_are_no_numbers_fail_their_row_behind_what_was_drawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watched = Watched(loop_engine(), monkeypatch)
    engine = watched.engine
    begin(engine, 9)
    engine.step()

    def spoil() -> None:
        watched.cache.values[0][engine._pool.block_ids("a")[0] * 4] = torch.nan

    watched.at[2] = spoil
    outputs = told(engine.step())
    assert tokens_of(outputs["a"]) == dense_greedy(tiny_model(), PROMPTS["a"], 3)[1:]
    outcome = outputs["a"][-1].outcome
    assert outcome is not None
    assert outcome.kind == "failed"
    assert "not finite" in (outcome.error or "")
    assert tokens_of(outputs["ccc"]) == dense_greedy(tiny_model(), PROMPTS["ccc"], 5)[1:]


def test_a_step_with_a_prompt_is_a_single_one(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(loop_engine(), monkeypatch)
    engine = watched.engine
    engine.add_request(PROMPTS["a"], params(12), request_id="a")
    engine.step()
    engine.add_request(PROMPTS["ccc"], params(2), request_id="comes")
    assert len(tokens_of(told(engine.step())["a"])) == 1
    assert watched.num_steps == []
    assert len(tokens_of(told(engine.step())["a"])) == STEPS


@pytest.mark.slow
def test_logarithms_of_a_launch_are_those_of_single_steps() -> None:
    """Each to who asks for them; and the best of several are chosen by them."""
    found = []
    for steps in (STEPS, 1):
        engine = loop_engine(device_steps=steps)
        drawn = {"temperature": 1.0, "seed": 3}
        engine.add_request(PROMPTS["a"], params(5, logprobs=2, **drawn), request_id="two")
        engine.add_request(PROMPTS["a"], params(3, logprobs=0, **drawn), request_id="own")
        engine.add_request(PROMPTS["a"], params(4, **drawn), request_id="none")
        engine.add_request(PROMPTS["bb"], params(4, n=1, best_of=2, **drawn), request_id="best")
        found.append(run_to_end(engine))
        # Siblings share all of the prompt but its last token, so a launch takes them, too.
        assert engine.stats().num_steps == (5 if steps == 1 else 2)
    for name, singles in found[1].items():
        assert tokens_of(found[0][name]) == tokens_of(singles)
        ours, theirs = (
            [each for output in outputs for each in output.logprobs]
            for outputs in (found[0][name], singles)
        )
        assert [(each.token_id, len(each.top)) for each in ours] == [
            (each.token_id, len(each.top)) for each in theirs
        ]
        for given, expected in zip(ours, theirs, strict=True):
            assert given.logprob == pytest.approx(expected.logprob, abs=1e-4)
            assert [token for token, _ in given.top] == [token for token, _ in expected.top]
            assert [of for _, of in given.top] == pytest.approx(
                [of for _, of in expected.top], abs=1e-4
            )
    assert [len(output.logprobs) for output in found[0]["two"]] == [1] * 5
    assert [len(output.logprobs) for output in found[0]["none"]] == [0] * 4


def test_streams_hear_the_tokens_of_a_launch_in_order(run: LoopRunner) -> None:
    async def main() -> None:
        engine = loop_engine()
        with EngineThread(engine) as thread:
            streams = [
                await thread.submit(name, prompt, params(5)) for name, prompt in PROMPTS.items()
            ]
            for stream, prompt in zip(streams, PROMPTS.values(), strict=True):
                outputs = [output async for output in stream]
                assert tokens_of(outputs) == dense_greedy(tiny_model(), prompt, 5)
                assert [output.num_generated_tokens for output in outputs] == list(range(1, 6))

    run(main)


def test_blocks_that_the_launch_filled_can_be_found_by_the_next() -> None:
    engine = loop_engine(device_steps=8)
    engine.add_request(PROMPTS["ccc"], params(9), request_id="a")
    tokens = tokens_of(run_to_end(engine)["a"])
    follow_up = [*PROMPTS["ccc"], *tokens]
    engine.add_request(follow_up, params(2), request_id="b")
    outputs = run_to_end(engine)["b"]
    assert outputs[-1].outcome is not None
    # Of 18 tokens 17 are computed: four blocks of four.
    assert outputs[-1].outcome.num_cached_tokens == 16
    assert tokens_of(outputs) == dense_greedy(tiny_model(), follow_up, 2)


def test_a_launch_has_room_for_no_more_than_a_request_can_have() -> None:
    engine = loop_engine(device_steps=10_000)
    engine.add_request(PROMPTS["a"], params(4), request_id="a")
    assert tokens_of(run_to_end(engine)["a"]) == dense_greedy(tiny_model(), PROMPTS["a"], 4)
    decoder = engine._runner.decoder
    assert isinstance(decoder, KernelDecoder)
    [loop] = decoder._loops.values()
    assert loop._state.drawn.shape == (1, engine.max_model_len)


def test_it_needs_the_kernels() -> None:
    for arithmetic in ("auto", "native", "torch"):
        with pytest.raises(ValueError, match=r"device_steps is 8, which needs arithmetic 'triton'"):
            EngineConfig(device_steps=8, arithmetic=arithmetic)
    with pytest.raises(ValueError, match="device_steps is 0, it must be at least 1"):
        EngineConfig(device_steps=0)


def test_rows_beyond_the_batch_are_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors are for a power of two; what an error left there of a launch must not run on."""
    steps = 2
    watched = Watched(loop_engine(device_steps=steps), monkeypatch)
    engine = watched.engine
    kernels = watched.kernels
    latch, live = kernels.latch, []

    def on_latch(flags: FlagView, rows: RowState) -> None:
        live.append(rows.live.tolist())
        latch(flags, rows)

    def fail() -> None:
        raise RuntimeError("a bug in the middle of a launch")

    tokens = [CancelToken() for _ in range(4)]
    for index, token in enumerate(tokens):
        engine.add_request(PROMPTS["a"], params(20), request_id=f"r{index}", cancel=token)
    outputs = told(engine.step())
    watched.at[1] = fail
    # Then each by itself; nobody is guilty.
    collect(engine.step(), outputs)
    assert [len(tokens_of(each)) for each in outputs.values()] == [1 + steps] * 4
    tokens[3].cancel(Reason.FIN)
    monkeypatch.setattr(kernels, "latch", on_latch)
    collect(engine.step(), outputs)
    assert live[0] == [1, 1, 1, 0]
    for index in range(3):
        expected = dense_greedy(tiny_model(), PROMPTS["a"], 1 + 2 * steps)
        assert tokens_of(outputs[f"r{index}"]) == expected
