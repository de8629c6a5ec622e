"""Not one bit of anybody's scores depends on who leaves, nor, if asked for, on who is there.

Within a step that holds however the engine computes: nobody's tokens change their place or their
company while it runs. From step to step it holds in batch-invariant mode alone.
"""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from disconnect_watch.engine import Engine, EngineConfig, RequestOutput, SamplingParams, batch
from disconnect_watch.engine.logprobs import token_logprobs
from disconnect_watch.engine.model import LlamaModel
from disconnect_watch.engine.request import Request
from disconnect_watch.engine.sampler import sample
from disconnect_watch.engine.schedule import ScheduledRow
from disconnect_watch.token import CancelToken, Reason
from tests.support.engine import (
    TINY_CONFIG,
    collect,
    make_engine,
    random_model,
    record_scores,
    run_to_end,
    tiny_model,
    tokens_of,
)

MODES: dict[str, dict[str, Any]] = {
    "native": {"arithmetic": "native"},
    "torch": {"arithmetic": "torch"},
    "invariant": {"batch_invariant": True},
}
#: What a row goes through besides, family by family.
GEMMA = {
    **TINY_CONFIG,
    "architectures": ["Gemma2ForCausalLM"],
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 21,
    "query_pre_attn_scalar": 24,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 5.0,
}
QWEN = {**TINY_CONFIG, "architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": False}
MODELS = {"llama": TINY_CONFIG, "gemma2": GEMMA, "qwen3": QWEN}


def prompt_of(index: int, length: int) -> list[int]:
    return [(index * 31 + position * 7 + position // 13) % 256 for position in range(length)]


def params(num_tokens: int, **fields: Any) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, ignore_eos=True, **fields)


def assert_same(ours: list[torch.Tensor], theirs: list[torch.Tensor], whose: str) -> None:
    assert len(ours) == len(theirs), whose
    for position, (row, other) in enumerate(zip(ours, theirs, strict=True)):
        assert torch.equal(row, other), f"token {position} of {whose}"


@pytest.fixture(params=list(MODELS))
def model(request: pytest.FixtureRequest) -> LlamaModel:
    return random_model(MODELS[request.param])


def scores_of_crowd(mode: str, leaves: dict[str, int]) -> dict[str, list[torch.Tensor]]:
    """Scores of one step of decodes, short and long prompts, in which clients leave at a layer."""
    engine = make_engine(max_num_batched_tokens=256, num_blocks=128, max_num_seqs=16, **MODES[mode])
    tokens: dict[str, CancelToken] = {}

    def submit(kind: str, lengths: list[int]) -> None:
        for index, length in enumerate(lengths):
            name = f"{kind}{index}"
            tokens[name] = CancelToken()
            prompt = prompt_of(len(tokens), length)
            engine.add_request(prompt, params(9), request_id=name, cancel=tokens[name])

    submit("decode", [3, 9, 20, 33, 50])
    engine.step()
    submit("short", [5, 17, 31])
    submit("long", [32, 50, 77])

    def hook(step: int, layer: int) -> None:
        for name, at in leaves.items():
            if step == 2 and layer == at:
                tokens[name].cancel(Reason.FIN)

    engine.layer_hook = hook
    scores = record_scores(engine)
    told = {output.request_id for output in engine.step() if output.token_ids}
    engine.check_integrity()
    assert told == set(tokens) - set(leaves)
    return {name: scores[name] for name in told}


@pytest.mark.parametrize("mode", MODES)
def test_a_leave_within_a_step_changes_no_bit_of_those_who_stay(mode: str) -> None:
    undisturbed = scores_of_crowd(mode, {})
    assert len(undisturbed) == 11
    rng = random.Random(5)
    crowds = [{name: layer for name in ("long1", "short1", "decode2")} for layer in range(3)]
    crowds += [
        {name: rng.randrange(3) for name in rng.sample(sorted(undisturbed), rng.randint(1, 10))}
        for _ in range(12)
    ]
    for leaves in crowds:
        for name, scores in scores_of_crowd(mode, leaves).items():
            assert_same(scores, undisturbed[name], f"{name}, when {leaves} leave")


@pytest.mark.parametrize("mode", MODES)
def test_of_two_long_prompts_only_the_one_whose_client_left_is_dropped(mode: str) -> None:
    engine = make_engine(max_num_batched_tokens=256, num_blocks=128, **MODES[mode])
    token = CancelToken()
    engine.add_request(prompt_of(1, 60), params(2), request_id="leaves", cancel=token)
    engine.add_request(prompt_of(2, 40), params(2), request_id="stays")

    def hook(_: int, layer: int) -> None:
        if layer == 1:
            token.cancel(Reason.FIN)

    engine.layer_hook = hook
    engine.step()
    assert engine.step_log[-1].layer_tokens == (100, 40, 40)


def make_invariant(model: LlamaModel | None = None, **config: Any) -> Engine:
    return make_engine(
        model,
        **{
            "batch_invariant": True,
            "num_blocks": 512,
            "max_num_seqs": 40,
            "max_num_batched_tokens": 256,
            **config,
        },
    )


def scores_alone(
    model: LlamaModel | None, prompt: list[int], sampling: SamplingParams, **config: Any
) -> tuple[list[torch.Tensor], list[int]]:
    """What a request gets in an engine of its own: scores and tokens."""
    engine = make_invariant(model, **config)
    scores = record_scores(engine)
    engine.add_request(prompt, sampling, request_id="a")
    tokens = tokens_of(run_to_end(engine)["a"])
    return scores["a"], tokens


def test_any_number_of_neighbours_changes_no_bit(model: LlamaModel) -> None:
    prompts = [prompt_of(index, 1 + index * 5 % 41) for index in range(33)]
    sampling = params(3, logprobs=2)
    alone = [scores_alone(model, prompt, sampling)[0] for prompt in prompts]
    for num_rows in range(1, 34):
        engine = make_invariant(model)
        scores = record_scores(engine)
        for index in range(num_rows):
            engine.add_request(prompts[index], sampling, request_id=str(index))
        run_to_end(engine)
        for index in range(num_rows):
            assert_same(scores[str(index)], alone[index], f"row {index} of {num_rows}")


@pytest.mark.parametrize("chunk", [1, 2, 7, 16, 31, 33, 64])
def test_chunks_change_no_bit_of_what_is_read_whole(model: LlamaModel, chunk: int) -> None:
    prompt = prompt_of(1, 101)
    whole, _ = scores_alone(model, prompt, params(4))
    in_chunks, _ = scores_alone(
        model, prompt, params(4), max_num_batched_tokens=chunk, max_num_seqs=1
    )
    assert_same(in_chunks, whole, f"chunks of {chunk}")


def test_a_prompt_whose_beginning_was_cached_has_the_bits_of_one_that_was_read(
    model: LlamaModel,
) -> None:
    prompt = prompt_of(2, 90)
    read, _ = scores_alone(model, prompt, params(6))
    engine = make_invariant(model)
    # Computed in other company, in other chunks, and by decoding in part.
    engine.add_request(prompt[:37], params(20), request_id="first")
    engine.add_request(prompt[:66], params(1), request_id="second")
    engine.add_request(prompt_of(3, 50), params(9), request_id="third")
    run_to_end(engine)
    scores = record_scores(engine)
    engine.add_request(prompt, params(6), request_id="a")
    outcome = run_to_end(engine)["a"][-1].outcome
    assert outcome is not None
    assert outcome.num_cached_tokens >= 64
    assert_same(scores["a"], read, "the cached prompt")


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "seed": 3}])
def test_those_who_stay_get_the_bits_of_a_run_in_which_nobody_left(
    sampling: dict[str, Any],
) -> None:
    stay = {f"stays{index}": prompt_of(index, 3 + 17 * index) for index in range(5)}
    expected = {
        name: scores_alone(None, prompt, params(16, **sampling)) for name, prompt in stay.items()
    }
    for seed in range(3):
        rng = random.Random(seed)
        # Little room, so that some are preempted and compute anew in other company.
        engine = make_invariant(num_blocks=44, max_num_batched_tokens=40, max_num_seqs=8)
        scores = record_scores(engine)
        outputs: dict[str, list[RequestOutput]] = {}
        leavers: list[CancelToken] = []

        def hook(_: int, __: int, rng: random.Random = rng, all_: Any = leavers) -> None:
            if all_ and rng.random() < 0.3:
                all_.pop(rng.randrange(len(all_))).cancel(Reason.FIN)

        engine.layer_hook = hook
        waiting = list(stay)
        for index in range(60):
            leavers.append(CancelToken())
            engine.add_request(
                prompt_of(rng.randrange(9), rng.randint(1, 70)),
                params(30, **sampling),
                request_id=f"leaves{index}",
                cancel=leavers[-1],
            )
            if waiting and rng.random() < 0.3:
                name = waiting.pop()
                engine.add_request(stay[name], params(16, **sampling), request_id=name)
            collect(engine.step(), outputs)
            engine.check_integrity()
        assert not waiting
        for token in leavers:
            token.cancel(Reason.FIN)
        for name, more in run_to_end(engine).items():
            outputs.setdefault(name, []).extend(more)
        for name, (logits, tokens) in expected.items():
            assert tokens_of(outputs[name]) == tokens, name
            assert_same(scores[name], logits, name)
        assert engine.stats().outcomes["finished", None] >= len(stay)


def test_a_draw_from_equal_scores_is_the_same_among_any_number_of_rows() -> None:
    logits = torch.randn(33, 264, generator=torch.Generator().manual_seed(1)) * 3
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.8},
        {"temperature": 1.3, "top_k": 9},
        {"temperature": 1.0, "top_p": 0.7},
    ]
    requests = [
        Request(str(index), [1] * (1 + index), params=params(5, **kinds[index % 4]), seed=index)
        for index in range(33)
    ]
    alone = [sample(logits[i : i + 1], [requests[i]])[0] for i in range(33)]
    likely = [token_logprobs(logits[i : i + 1], [alone[i] or 0], [3])[0] for i in range(33)]
    for num_rows in range(1, 34):
        drawn = sample(logits[:num_rows], requests[:num_rows])
        assert drawn == alone[:num_rows]
        told = token_logprobs(logits[:num_rows], [token or 0 for token in drawn], [3] * num_rows)
        assert told == likely[:num_rows]


@pytest.mark.parametrize("arithmetic", MODES)
def test_a_long_prompt_is_left_in_the_middle_of_a_layer(
    monkeypatch: pytest.MonkeyPatch, arithmetic: str
) -> None:
    """Whatever computes it looks before each piece of 64 tokens but the first, and at the end."""
    engine = make_engine(
        max_num_batched_tokens=256, max_model_len=256, num_blocks=128, **MODES[arithmetic]
    )
    token = CancelToken()
    engine.add_request(prompt_of(1, 250), params(3), request_id="leaves", cancel=token)
    engine.add_request(prompt_of(2, 5), params(3), request_id="stays")
    num_looks = 0
    are_left = batch.are_left

    def look(rows: Sequence[ScheduledRow]) -> bool:
        nonlocal num_looks
        if rows[0].request.request_id == "leaves":
            num_looks += 1
            # Of the four looks of a layer the second one of the second layer.
            if num_looks == 6:
                token.cancel(Reason.FIN)
        return are_left(rows)

    monkeypatch.setattr(batch, "are_left", look)
    outputs = {output.request_id: output for output in engine.step()}
    assert 6 <= num_looks <= 7, "it is still computed"
    [record] = engine.step_log
    assert record.scheduled == {"leaves": 250, "stays": 5}
    assert record.layer_tokens == (255, 5, 5)
    assert record.dropped == {"leaves": 2}
    assert outputs["leaves"].token_ids == ()
    assert len(outputs["stays"].token_ids) == 1
    engine.check_integrity()
    assert engine.block_owners == {"stays"}


def test_batch_invariance_is_refused_where_it_cannot_be_had() -> None:
    with pytest.raises(ValueError, match="batch_invariant needs arithmetic 'native' or 'auto'"):
        EngineConfig(batch_invariant=True, arithmetic="torch")
    model = LlamaModel(tiny_model().config).to(torch.bfloat16).eval().requires_grad_(False)
    with pytest.raises(ValueError, match=r"batch_invariant is set.*weights are torch\.bfloat16"):
        make_engine(model, batch_invariant=True)
