"""The step loop with everyone staying: limits, ends, neighbours, preemption, failures."""

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch

from disconnect_watch.engine import Engine, Outcome, SamplingParams
from disconnect_watch.engine.errors import (
    DuplicateRequestError,
    PromptTooLongError,
    QueueFullError,
)
from disconnect_watch.engine.model import DecoderLayer, LlamaModel
from tests.support.engine import dense_greedy, make_engine, run_to_end, tiny_model, tokens_of

PROMPTS = [[(i * 37 + j * 11) % 256 for j in range(5 + 7 * i)] for i in range(6)]


def params(num_tokens: int, **fields: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": num_tokens, "ignore_eos": True, **fields})


def generate(engine: Engine, prompts: list[list[int]], sampling: SamplingParams) -> list[list[int]]:
    """The tokens of each prompt, all of them submitted at once."""
    for index, prompt in enumerate(prompts):
        engine.add_request(prompt, sampling, request_id=str(index))
    outputs = run_to_end(engine)
    return [tokens_of(outputs[str(index)]) for index in range(len(prompts))]


def end_token_of(prompt: list[int], position: int) -> int:
    """The greedy token at a position that none before it equals."""
    tokens = dense_greedy(tiny_model(), prompt, position + 1)
    assert tokens[position] not in tokens[:position]
    return tokens[position]


def with_end_token(monkeypatch: pytest.MonkeyPatch, engine: Engine, token: int) -> None:
    monkeypatch.setattr(engine, "eos_token_ids", (token,))


def test_a_batch_of_many_lengths_gives_each_its_own_tokens() -> None:
    expected = [dense_greedy(tiny_model(), prompt, 20) for prompt in PROMPTS]
    assert generate(make_engine(), PROMPTS, params(20)) == expected


@pytest.mark.parametrize(
    "fields", [{"seed": 5}, {"seed": 5, "top_k": 20}, {"seed": -1, "top_p": 0.9}]
)
def test_sampled_tokens_depend_on_seed_and_prompt_only(fields: dict[str, Any]) -> None:
    sampling = params(20, temperature=0.9, **fields)
    alone = [generate(make_engine(), [prompt], sampling)[0] for prompt in PROMPTS]
    assert generate(make_engine(), PROMPTS, sampling) == alone
    chunked = make_engine(max_num_batched_tokens=8)
    assert generate(chunked, PROMPTS, sampling) == alone
    preempting = make_engine(num_blocks=32)
    assert generate(preempting, PROMPTS, sampling) == alone
    assert preempting.stats().num_preemptions > 0


def test_without_a_seed_two_requests_differ() -> None:
    first, second = generate(make_engine(), [PROMPTS[0]] * 2, params(20, temperature=1.0))
    assert first != second


def test_preempted_requests_go_on_with_the_tokens_they_would_have_had() -> None:
    engine = make_engine(num_blocks=34)
    expected = [dense_greedy(tiny_model(), prompt, 40) for prompt in PROMPTS]
    assert generate(engine, PROMPTS, params(40)) == expected
    stats = engine.stats()
    assert stats.num_preemptions > 0
    assert stats.num_generated_tokens == 6 * 40
    assert sum(len(record.preempted) for record in engine.step_log) == stats.num_preemptions


def test_max_tokens_ends_with_length() -> None:
    engine = make_engine()
    engine.add_request([1, 2], params(3), request_id="a")
    outputs = run_to_end(engine)["a"]
    assert [output.num_generated_tokens for output in outputs] == [1, 2, 3]
    outcome = outputs[-1].outcome
    assert outcome is not None
    assert 0 < outcome.block_ns < 60e9
    assert replace(outcome, block_ns=0) == Outcome(
        "finished",
        finish_reason="length",
        num_prompt_tokens=2,
        num_generated_tokens=3,
        num_blocks_freed=1,
    )
    assert [output.outcome for output in outputs[:-1]] == [None, None]


def test_the_context_ends_with_length_at_its_last_token() -> None:
    engine = make_engine(max_model_len=16)
    engine.add_request([1] * 10, params(100), request_id="a")
    [*_, last] = run_to_end(engine)["a"]
    assert last.num_generated_tokens == 6
    assert last.outcome is not None
    assert last.outcome.finish_reason == "length"


def test_an_end_token_stops_and_shows_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    token = end_token_of(PROMPTS[1], 4)
    with_end_token(monkeypatch, engine, token)
    engine.add_request(PROMPTS[1], SamplingParams(max_tokens=50), request_id="a")
    [*_, last] = run_to_end(engine)["a"]
    assert last.outcome is not None
    assert (last.outcome.finish_reason, last.num_generated_tokens) == ("stop", 5)


def test_an_end_token_is_one_among_others_with_ignore_eos(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    with_end_token(monkeypatch, engine, end_token_of(PROMPTS[1], 4))
    assert len(generate(engine, [PROMPTS[1]], params(9))[0]) == 9


def test_text_and_tokens_are_given_once() -> None:
    engine = make_engine()
    engine.add_request("héllo", params(30), request_id="a")
    outputs = run_to_end(engine)["a"]
    text = "".join(output.text_delta for output in outputs)
    assert text == engine.tokenizer._tokenizer.decode(tokens_of(outputs))


def test_a_prompt_that_leaves_no_room_is_refused() -> None:
    engine = make_engine(max_model_len=16)
    with pytest.raises(PromptTooLongError, match="send at most 15") as caught:
        engine.add_request([1] * 16, request_id="a")
    assert (caught.value.num_prompt_tokens, caught.value.max_model_len) == (16, 16)
    engine.add_request([1] * 15, params(5), request_id="a")
    assert len(tokens_of(run_to_end(engine)["a"])) == 1


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "no tokens"),
        ([], "no tokens"),
        ([264], "outside"),
        ([-1], "outside"),
        # Symptom: it came as far as the prefix cache, and was the end of the engine.
        ([1.0, 2.0, 3.0, 4.0, 5.0], "no integer"),
        ("\udc80", "lone"),
    ],
)
def test_a_prompt_that_is_no_prompt_is_refused(prompt: Any, message: str) -> None:
    engine = make_engine()
    with pytest.raises(ValueError, match=message):
        engine.add_request(prompt, request_id="a")
    assert not engine.has_work


def test_a_full_queue_refuses_and_takes_again_when_it_has_room() -> None:
    engine = make_engine(max_queue=2)
    engine.add_request([1], params(1), request_id="a")
    engine.add_request([1], params(1), request_id="b")
    with pytest.raises(QueueFullError, match="2 requests wait already"):
        engine.add_request([1], request_id="c")
    engine.step()
    engine.add_request([1], params(1), request_id="c")
    assert set(run_to_end(engine)) == {"c"}
    assert engine.stats().num_requests == 3


def test_an_id_is_taken_while_its_request_lives_and_free_after() -> None:
    engine = make_engine()
    engine.add_request([1], params(2), request_id="a")
    with pytest.raises(DuplicateRequestError, match="'a' is in use"):
        engine.add_request([1], request_id="a")
    first = tokens_of(run_to_end(engine)["a"])
    engine.add_request([1], params(2), request_id="a")
    assert tokens_of(run_to_end(engine)["a"]) == first


def test_the_numbers_add_up() -> None:
    engine = make_engine()
    generate(engine, PROMPTS, params(10))
    stats = engine.stats()
    assert stats.num_prompt_tokens == sum(map(len, PROMPTS))
    assert stats.num_generated_tokens == 60
    assert stats.outcomes == {("finished", None): 6}
    assert (stats.num_waiting, stats.num_running, stats.num_blocks_used) == (0, 0, 0)
    assert stats.num_blocks_available == stats.num_blocks
    scheduled = sum(sum(record.scheduled.values()) for record in engine.step_log)
    assert scheduled == sum(map(len, PROMPTS)) + 6 * 9


def test_every_step_logs_what_each_layer_computed() -> None:
    engine = make_engine()
    generate(engine, PROMPTS[:2], params(2))
    assert [record.layer_tokens for record in engine.step_log] == [(17,) * 3, (2,) * 3]
    freed = [block for record in engine.step_log for block in record.freed_block_ids]
    assert sorted(freed) == [0, 1, 2, 3, 4, 5]


def test_the_step_log_is_bounded() -> None:
    engine = make_engine(step_log_size=3)
    generate(engine, PROMPTS[:1], params(10))
    assert [record.step for record in engine.step_log] == [8, 9, 10]


def test_a_callback_hears_each_outcome_once_and_its_errors_harm_nobody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = make_engine()
    heard: list[tuple[str, str]] = []

    def hear(request_id: str, outcome: Outcome) -> None:
        heard.append((request_id, outcome.kind))
        raise RuntimeError("my mistake")

    engine.on_outcome = hear
    with caplog.at_level(logging.CRITICAL, "disconnect_watch.engine"):
        generate(engine, PROMPTS[:3], params(3))
    assert sorted(heard) == [("0", "finished"), ("1", "finished"), ("2", "finished")]


@pytest.fixture
def poisoned() -> LlamaModel:
    """A model of its own, whose token 255 makes whatever sees it not a number."""
    model = LlamaModel(tiny_model().config)
    model.load_state_dict(tiny_model().state_dict())
    model.embed_tokens.weight.data[255] = torch.nan
    # The output side is tied to the input side; give it weights that are finite.
    model.lm_head = torch.nn.Linear(64, 264, bias=False)
    model.lm_head.weight.data = tiny_model().embed_tokens.weight.data.clone()
    return model.requires_grad_(False)


def test_scores_that_are_no_numbers_fail_their_request_alone(poisoned: LlamaModel) -> None:
    engine = make_engine(poisoned)
    prompts = [PROMPTS[2], [1, 255, 2], PROMPTS[3]]
    for index, prompt in enumerate(prompts):
        engine.add_request(prompt, params(12), request_id=str(index))
    outputs = run_to_end(engine)
    [failed] = outputs["1"]
    assert failed.outcome is not None
    assert (failed.outcome.kind, failed.outcome.phase) == ("failed", "prefill")
    assert failed.outcome.error == "FloatingPointError: scores of the next token are not finite"
    for index in (0, 2):
        assert tokens_of(outputs[str(index)]) == dense_greedy(tiny_model(), prompts[index], 12)


def test_blocks_of_a_failed_request_do_not_spoil_their_next_owner(poisoned: LlamaModel) -> None:
    engine = make_engine(poisoned, num_blocks=16, max_model_len=64, max_num_seqs=2)
    engine.add_request([255] * 60, params(2), request_id="bad")
    run_to_end(engine)
    # Every block now holds NaN. Two rows of unlike length are padded to one context.
    prompts = [PROMPTS[0], PROMPTS[1]]
    expected = [dense_greedy(tiny_model(), prompt, 8) for prompt in prompts]
    assert generate(engine, prompts, params(8)) == expected


def test_an_error_in_the_model_fails_the_request_that_causes_it_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # By torch, whose layers an error can be put into.
    engine = make_engine(arithmetic="torch")
    heads = DecoderLayer.heads

    def fail_on_77(self: DecoderLayer, hidden: torch.Tensor, *args: Any) -> Any:
        token = tiny_model().embed_tokens.weight[77]
        if self.index == 0 and (hidden == token).all(-1).any():
            raise RuntimeError("77 again")
        return heads(self, hidden, *args)

    monkeypatch.setattr(DecoderLayer, "heads", fail_on_77)
    prompts = [PROMPTS[0], [1, 77], PROMPTS[2]]
    for index, prompt in enumerate(prompts):
        engine.add_request(prompt, params(3), request_id=str(index))
    with caplog.at_level(logging.CRITICAL, "disconnect_watch.engine"):
        outputs = run_to_end(engine)
    monkeypatch.undo()
    [failed] = outputs["1"]
    assert failed.outcome is not None
    assert failed.outcome.error == "RuntimeError: 77 again"
    for index in (0, 2):
        assert tokens_of(outputs[str(index)]) == dense_greedy(tiny_model(), prompts[index], 3)
    assert engine.stats().outcomes == {("finished", None): 2, ("failed", "prefill"): 1}


def test_a_prompt_whose_beginning_is_cached_gives_the_same_tokens() -> None:
    engine = make_engine()
    prompt = PROMPTS[5]
    [first] = generate(engine, [prompt], params(12))
    assert engine.stats().num_blocks_cached == 12
    [second] = generate(engine, [prompt], params(12))
    assert first == second == dense_greedy(tiny_model(), prompt, 12)
    assert engine.step_log[-12].scheduled == {"0": 4}
    assert engine.stats().num_cached_tokens == 36


def test_a_conversation_goes_on_from_the_blocks_of_its_answer() -> None:
    engine = make_engine()
    prompt = PROMPTS[3]
    [answer] = generate(engine, [prompt], params(10))
    [more] = generate(engine, [prompt + answer], params(4))
    assert more == dense_greedy(tiny_model(), prompt + answer, 4)
    # The last token of the answer was never an input, all others were.
    assert engine.stats().num_cached_tokens == (len(prompt) + 9) // 4 * 4


def test_blocks_of_a_request_whose_scores_were_spoilt_are_not_shared(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = make_engine(max_num_batched_tokens=16)
    prompt = PROMPTS[5]
    engine.add_request(prompt, params(4), request_id="spoilt")
    engine.step()
    engine._runner.logits_hook = lambda logits: torch.full_like(logits, torch.nan)
    outputs = run_to_end(engine)
    engine._runner.logits_hook = None
    assert outputs["spoilt"][-1].outcome is not None
    assert outputs["spoilt"][-1].outcome.kind == "failed"
    assert engine.stats().num_blocks_cached == 0
    assert generate(engine, [prompt], params(4)) == [dense_greedy(tiny_model(), prompt, 4)]
    assert engine.stats().num_cached_tokens == 0
