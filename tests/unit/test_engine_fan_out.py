"""Several answers to one request: one id, one prefill, one outcome, and all leave together."""

from typing import Any

import pytest
import torch

from disconnect_watch.engine import Engine, Outcome, RequestOutput, SamplingParams
from disconnect_watch.engine.errors import DuplicateRequestError, QueueFullError
from disconnect_watch.engine.request import Request
from disconnect_watch.token import CancelToken, Reason
from tests.support.engine import (
    collect,
    dense_greedy,
    dense_logits,
    make_engine,
    run_to_end,
    tiny_model,
    tokens_of,
)

PROMPT = [(13 * index + 3) % 256 for index in range(30)]


def submit(engine: Engine, request_id: str, **fields: Any) -> CancelToken:
    token = CancelToken()
    params = SamplingParams(
        **{"max_tokens": 12, "ignore_eos": True, "temperature": 1.0, "seed": 7, "n": 3, **fields}
    )
    engine.add_request(PROMPT, params, request_id=request_id, cancel=token)
    return token


def by_index(outputs: list[RequestOutput]) -> dict[int, list[RequestOutput]]:
    answers: dict[int, list[RequestOutput]] = {}
    for output in outputs:
        answers.setdefault(output.index, []).append(output)
    return answers


def outcome_of(outputs: list[RequestOutput]) -> Outcome:
    outcome = outputs[-1].outcome
    assert outcome is not None
    return outcome


def test_each_answer_is_what_a_request_with_its_seed_would_get() -> None:
    engine = make_engine()
    submit(engine, "a")
    outputs = run_to_end(engine)["a"]
    answers = by_index(outputs)
    assert sorted(answers) == [0, 1, 2]
    for index, answer in answers.items():
        alone = make_engine()
        submit(alone, "b", n=1, seed=7 + index)
        assert tokens_of(answer) == tokens_of(run_to_end(alone)["b"])
        assert [output.finish_reason for output in answer] == [None] * 11 + ["length"]
        assert answer[-1].num_generated_tokens == 12
    assert len({tuple(tokens_of(answer)) for answer in answers.values()}) == 3


def test_one_outcome_comes_with_the_last_output_and_counts_all_answers() -> None:
    engine = make_engine()
    told: list[tuple[str, Outcome]] = []
    engine.on_outcome = lambda name, outcome: told.append((name, outcome))
    submit(engine, "a")
    outputs = run_to_end(engine)["a"]
    assert [output.outcome for output in outputs[:-1]] == [None] * 35
    outcome = outcome_of(outputs)
    assert told == [("a", outcome)]
    assert (outcome.num_prompt_tokens, outcome.num_generated_tokens) == (30, 36)
    # Seven blocks of the prompt are shared, of the other four each answer has its own.
    assert outcome.num_blocks_freed == 7 + 3 * 4
    stats = engine.stats()
    assert (stats.num_requests, stats.num_prompt_tokens) == (1, 30)
    assert stats.outcomes == {("finished", None): 1}


def test_the_prompt_is_read_once_for_all_answers() -> None:
    engine = make_engine(max_num_batched_tokens=16)
    submit(engine, "a")
    run_to_end(engine)
    assert [dict(record.scheduled) for record in list(engine.step_log)[:3]] == [
        {"a": 16},
        {"a": 14},
        {"a": 1, "a#1": 2, "a#2": 2},
    ]


def test_without_a_prefix_cache_the_answers_do_not_wait_for_each_other() -> None:
    engine = make_engine(max_num_batched_tokens=128, enable_prefix_caching=False)
    submit(engine, "a")
    engine.step()
    assert engine.step_log[-1].scheduled == {"a": 30, "a#1": 30, "a#2": 30}


def test_all_answers_leave_at_once_whatever_each_of_them_is_doing() -> None:
    engine = make_engine(max_num_seqs=2)
    token = submit(engine, "a")
    engine.step()
    engine.step()
    assert engine.step_log[-1].scheduled == {"a": 1, "a#1": 2}
    assert engine.stats().num_waiting == 1
    token.cancel(Reason.FIN)
    [output] = engine.step()
    engine.check_integrity()
    outcome = outcome_of([output])
    assert (outcome.kind, outcome.reason, outcome.phase) == ("cancelled", Reason.FIN, "decode")
    assert engine.step_log[-1].aborted == ("a",)
    assert engine.step_log[-1].scheduled == {}
    assert (engine.block_owners, engine.has_work) == (set(), False)
    assert outcome.num_blocks_freed == 9


def test_answers_that_have_ended_do_not_save_the_others() -> None:
    engine = make_engine()
    submit(engine, "plain")
    answers = by_index(run_to_end(engine)["plain"])
    tokens = tokens_of(answers[1])
    stop = next(t for t in tokens[1:8] if all(t not in tokens_of(answers[i]) for i in (0, 2)))
    token = submit(engine, "a", stop_token_ids=(stop,))
    outputs: dict[str, list[RequestOutput]] = {}
    for _ in range(11):
        collect(engine.step(), outputs)
    assert by_index(outputs["a"])[1][-1].finish_reason == "stop"
    assert outputs["a"][-1].outcome is None
    token.cancel(Reason.FIN)
    [last] = engine.step()
    outcome = outcome_of([last])
    assert outcome.kind == "cancelled"
    assert outcome.num_generated_tokens == len(outputs["a"])
    assert engine.stats().outcomes == {("finished", None): 1, ("cancelled", "decode"): 1}


def test_a_step_in_which_they_leave_tells_nothing_of_any_and_counts_what_it_wasted() -> None:
    engine = make_engine()
    submit(engine, "stays", n=1)
    token = submit(engine, "a")
    engine.step()
    engine.step()

    def leave(_: int, layer: int) -> None:
        if layer == 2:
            token.cancel(Reason.FIN)

    engine.layer_hook = leave
    outputs = engine.step()
    assert [output.request_id for output in outputs] == ["stays", "a"]
    assert outcome_of(outputs).num_wasted_tokens == 3
    assert engine.step_log[-1].withheld == ("a",)
    assert engine.stats().num_wasted_tokens == 3
    engine.check_integrity()


def test_an_abort_by_id_takes_all_answers_and_a_siblings_key_is_no_id() -> None:
    engine = make_engine()
    submit(engine, "a")
    engine.step()
    engine.step()
    assert engine.abort("a#1").outcome == "not_found"
    result = engine.abort("a")
    assert (result.outcome, result.num_blocks_freed) == ("cancelled", 10)
    assert engine.block_owners == set()
    assert engine.abort("a").outcome == "already_cancelled"
    assert run_to_end(engine)["a"][-1].outcome is not None


def test_an_abort_finds_a_request_whose_first_answer_has_ended() -> None:
    engine = make_engine(max_num_seqs=1)
    submit(engine, "a", max_tokens=2)
    for _ in range(3):
        engine.step()
    first = engine.find("a")
    assert first is not None
    assert (first.status, first.outcome) == ("ended", None)
    assert engine.abort("a").outcome == "cancelled"


def test_a_mark_on_an_answer_that_has_ended_ends_the_others_in_the_next_step() -> None:
    engine = make_engine(max_num_seqs=1)
    submit(engine, "a", max_tokens=2)
    for _ in range(3):
        engine.step()
    first = engine.find("a")
    assert first is not None
    assert first.status == "ended"
    # As a stream that is closed does, and an abort from another thread.
    assert first.mark_cancelled(Reason.ABORTED)
    assert outcome_of(engine.step()).reason is Reason.ABORTED
    assert engine.finish_abort(first, is_first=True).outcome == "cancelled"
    assert engine.finish_abort(first, is_first=False).outcome == "already_cancelled"


def test_the_error_of_one_answer_is_the_end_of_all(caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine()
    submit(engine, "stays", n=1)
    submit(engine, "a")
    engine.step()

    def spoil(scores: torch.Tensor) -> torch.Tensor:
        if len(scores) == 4:
            scores[2] = torch.nan
        return scores

    engine._runner.logits_hook = spoil
    outputs: dict[str, list[RequestOutput]] = {}
    collect(engine.step(), outputs)
    outcome = outcome_of(outputs["a"])
    assert (outcome.kind, outcome.phase) == ("failed", "decode")
    engine.check_integrity()
    assert engine.stats().num_running == 1
    assert outcome_of(run_to_end(engine)["stays"]).kind == "finished"


def test_answers_are_admitted_to_the_queue_all_or_none() -> None:
    engine = make_engine(max_queue=4)
    submit(engine, "a", n=2)
    with pytest.raises(QueueFullError):
        submit(engine, "b")
    assert engine.stats().num_waiting == 2
    submit(engine, "c", n=2)
    with pytest.raises(ValueError, match="5 answers are wanted"):
        submit(engine, "d", n=5)
    assert engine.find("b") is None


def test_several_requests_are_admitted_all_or_none() -> None:
    engine = make_engine(max_queue=6)
    params = SamplingParams(n=2, max_tokens=1)

    def make(*names: str) -> list[Request]:
        return [engine.make_request(PROMPT, params, request_id=name) for name in names]

    engine.admit(*make("a"))
    with pytest.raises(QueueFullError):
        engine.admit(*make("b", "c", "d"))
    with pytest.raises(DuplicateRequestError, match="'a'"):
        engine.admit(*make("b", "a"))
    with pytest.raises(ValueError, match="8 answers are wanted, the queue holds 6"):
        engine.admit(*make("b", "c", "d", "e"))
    with pytest.raises(DuplicateRequestError, match="'b'"):
        engine.admit(*make("b", "b"))
    assert (engine.stats().num_requests, engine.find("b")) == (1, None)
    engine.admit(*make("b", "c"))
    assert set(run_to_end(engine)) == {"a", "b", "c"}
    assert engine.stats().num_requests == 3


def test_an_id_that_reads_like_a_siblings_key_is_refused_while_that_lives() -> None:
    engine = make_engine()
    submit(engine, "a")
    with pytest.raises(DuplicateRequestError):
        submit(engine, "a#1", n=1)
    with pytest.raises(DuplicateRequestError):
        submit(engine, "a", n=1)
    run_to_end(engine)
    submit(engine, "a#1", n=1)
    with pytest.raises(DuplicateRequestError):
        submit(engine, "a")
    assert engine.find("a") is None
    assert outcome_of(run_to_end(engine)["a#1"]).kind == "finished"


@pytest.mark.parametrize("index", [0, 1])
def test_an_id_that_reads_like_the_key_of_an_answer_that_has_ended_is_refused(index: int) -> None:
    """Symptom: with the end of the other answers came a KeyError, and the end of the engine."""
    engine = make_engine()
    submit(engine, "a", n=2)
    answers = by_index(run_to_end(engine)["a"])
    first_tokens = [tokens_of(answers[0])[0], tokens_of(answers[1])[0]]
    assert first_tokens[0] != first_tokens[1]
    submit(engine, "a", n=2, stop_token_ids=(first_tokens[index],))
    request = engine.find("a")
    assert request is not None
    ended = request.siblings[index]
    while ended.status != "ended":
        engine.step()
    assert request.outcome is None
    with pytest.raises(DuplicateRequestError):
        submit(engine, ended.key, n=1)
    assert outcome_of(run_to_end(engine)["a"]).kind == "finished"
    submit(engine, ended.key, n=1)
    assert outcome_of(run_to_end(engine)[ended.key]).kind == "finished"


def test_the_likeliest_of_several_answers_are_told_at_the_end() -> None:
    engine = make_engine()
    submit(engine, "all", n=4)
    answers = by_index(run_to_end(engine)["all"])

    def score(tokens: list[int]) -> float:
        rows = dense_logits(tiny_model(), PROMPT + tokens[:-1]).log_softmax(-1)
        picked = rows[len(PROMPT) - 1 :].gather(-1, torch.tensor(tokens)[:, None])
        return float(picked.mean())

    ranked = sorted((tokens_of(answer) for answer in answers.values()), key=score, reverse=True)
    submit(engine, "best", n=2, best_of=4)
    outputs = run_to_end(engine)["best"]
    assert [output.index for output in outputs] == [0, 1]
    assert [list(output.token_ids) for output in outputs] == ranked[:2]
    assert [output.logprobs for output in outputs] == [(), ()]
    assert [output.outcome is None for output in outputs] == [True, False]
    assert outcome_of(outputs).num_generated_tokens == 48


@pytest.mark.parametrize("best_of", [None, 3])
def test_the_outcome_ends_as_the_answer_that_is_told_first(best_of: int | None) -> None:
    """Whichever ended last, and whether that is told or not."""
    engine = make_engine()
    for seed in range(12):
        fields = {"n": 3} if best_of is None else {"n": 1, "best_of": best_of}
        stops = tuple(range(0, 256, 5))
        submit(engine, "a", seed=seed, stop_token_ids=stops, max_tokens=20, **fields)
        outputs = run_to_end(engine)["a"]
        first = by_index(outputs)[0][-1]
        outcome = outcome_of(outputs)
        assert outcome.finish_reason == first.finish_reason == "stop"
        assert outcome.stop_reason == first.stop_reason == first.token_ids[-1]


def test_nothing_of_the_best_is_told_after_a_cancel() -> None:
    engine = make_engine()
    token = submit(engine, "a", n=1, best_of=3, logprobs=1)
    for _ in range(5):
        assert engine.step() == []
    token.cancel(Reason.FIN)
    [output] = engine.step()
    assert (output.token_ids, output.text_delta) == ((), "")
    assert outcome_of([output]).kind == "cancelled"


def test_answers_end_when_their_time_is_over() -> None:
    engine = make_engine()
    now = 1_000_000_000
    engine.clock = lambda: now
    params = SamplingParams(n=3, max_tokens=50, ignore_eos=True)
    engine.add_request(PROMPT, params, request_id="a", time_limit=1.0)
    engine.step()
    engine.step()
    now += 1_000_000_000
    assert outcome_of(engine.step()).reason is Reason.DEADLINE
    assert not engine.has_work


def test_greedy_answers_are_all_the_likeliest() -> None:
    engine = make_engine(num_blocks=34)
    submit(engine, "a", temperature=0, max_tokens=9)
    expected = dense_greedy(tiny_model(), PROMPT, 9)
    for answer in by_index(run_to_end(engine)["a"]).values():
        assert tokens_of(answer) == expected


@pytest.mark.parametrize("fields", [{"n": 0}, {"n": 129}, {"n": 3, "best_of": 2}, {"n": True}])
def test_a_number_of_answers_that_is_none_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"n is|best_of is"):
        SamplingParams(**fields)
