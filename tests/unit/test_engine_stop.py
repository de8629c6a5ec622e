"""Where a text stops, and how likely its tokens were."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from disconnect_watch.engine import Engine, Outcome, RequestOutput, SamplingParams
from disconnect_watch.engine.text_stream import TextStream
from disconnect_watch.token import CancelToken, Reason
from tests.support.engine import (
    dense_greedy,
    dense_logits,
    engine_tokenizer,
    make_engine,
    run_to_end,
    tiny_model,
    tokens_of,
)

PROMPT = [5, 6, 7]
TOKENIZER = engine_tokenizer()


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text)


def told(stream: TextStream, text: str) -> list[str]:
    """What is told after each byte of the text, and at its end."""
    return [*(stream.feed(token) for token in ids_of(text)), stream.flush()]


def test_a_stop_string_is_no_part_of_the_text_nor_is_what_follows() -> None:
    stream = TextStream(TOKENIZER, stop=["END"])
    assert told(stream, "abENDcd") == ["a", "b", "", "", "", "", "", ""]
    assert stream.stopped_by == "END"


def test_what_only_looks_like_a_stop_string_is_told_as_soon_as_it_is_none() -> None:
    stream = TextStream(TOKENIZER, stop=["ENDE"])
    assert told(stream, "ENDE"[:3] + "x") == ["", "", "", "ENDx", ""]
    assert told(TextStream(TOKENIZER, stop=["ab"]), "aab") == ["", "a", "", ""]
    assert told(TextStream(TOKENIZER, stop=["ab"]), "xa") == ["x", "", "a"]


def test_the_stop_string_that_begins_first_counts_and_of_two_the_longer() -> None:
    stream = TextStream(TOKENIZER, stop=["é", "éx"])
    # One token with all of it, as large vocabularies have them.
    assert stream._take("aéxé") == "a"
    assert stream.stopped_by == "éx"


@settings(deadline=None)
@given(
    text=st.text(alphabet="abé", max_size=30),
    stop=st.lists(st.text(alphabet="abé", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_pieces_give_the_text_up_to_the_first_stop_string_to_be_complete(
    text: str, stop: list[str]
) -> None:
    stream = TextStream(TOKENIZER, stop=stop)
    pieces: list[str] = []
    for token in ids_of(text):
        pieces.append(stream.feed(token))
        if stream.stopped_by is not None:
            break
    else:
        pieces.append(stream.flush())
    ends = [end for end in range(len(text) + 1) if any(text[:end].endswith(s) for s in stop)]
    expected = text
    if ends:
        whole = text[: ends[0]]
        expected = whole[: min(whole.find(s) for s in stop if s in whole)]
        assert stream.stopped_by in stop
    assert "".join(pieces) == expected


def outcome_of(outputs: list[RequestOutput]) -> Outcome:
    outcome = outputs[-1].outcome
    assert outcome is not None
    return outcome


def text_of(outputs: list[RequestOutput]) -> str:
    return "".join(output.text_delta for output in outputs)


def generate(engine: Engine, **fields: Any) -> list[RequestOutput]:
    params = SamplingParams(**{"max_tokens": 20, "ignore_eos": True, **fields})
    engine.add_request(PROMPT, params, request_id="a")
    return run_to_end(engine)["a"]


def test_generation_ends_with_the_token_that_completes_a_stop_string() -> None:
    plain = generate(make_engine())
    text = text_of(plain)
    stop = text[4:7]
    assert stop not in text[:6]
    engine = make_engine()
    outputs = generate(engine, stop=(stop,))
    outcome = outcome_of(outputs)
    assert text_of(outputs) == text[:4]
    assert (outcome.kind, outcome.finish_reason, outcome.stop_reason) == ("finished", "stop", stop)
    assert outcome.num_generated_tokens < 20
    assert tokens_of(outputs) == tokens_of(plain)[: outcome.num_generated_tokens]
    assert engine.step_log[-1].finished == ("a",)
    assert engine.block_owners == set()


def test_a_stop_token_ends_generation_and_its_text_is_not_told() -> None:
    tokens = dense_greedy(tiny_model(), PROMPT, 20)
    index = next(i for i in range(3, 20) if tokens[i] not in tokens[:i])
    outputs = generate(make_engine(), stop_token_ids=(tokens[index],))
    outcome = outcome_of(outputs)
    assert tokens_of(outputs) == tokens[: index + 1]
    assert (outcome.finish_reason, outcome.stop_reason) == ("stop", tokens[index])
    assert text_of(outputs) == text_of(generate(make_engine(), max_tokens=index))


def test_text_that_was_held_back_is_told_at_the_end_but_not_after_a_cancel() -> None:
    text = text_of(generate(make_engine()))
    stop = text[-1] + "never"
    assert text_of(generate(make_engine(), stop=(stop,))) == text
    token = CancelToken()
    engine = make_engine()
    params = SamplingParams(max_tokens=21, ignore_eos=True, stop=(stop,))
    engine.add_request(PROMPT, params, request_id="a", cancel=token)
    outputs = [output for _ in range(20) for output in engine.step()]
    assert text_of(outputs) == text[: text.rindex(text[-1])]
    token.cancel(Reason.FIN)
    assert text_of(engine.step()) == ""


def test_logprobs_are_those_of_the_model_whatever_the_sampling() -> None:
    outputs = generate(make_engine(), logprobs=3, temperature=1.5, top_k=5, seed=4, max_tokens=6)
    tokens = tokens_of(outputs)
    scores = dense_logits(tiny_model(), PROMPT + tokens[:-1]).log_softmax(-1)[len(PROMPT) - 1 :]
    told = [logprobs for output in outputs for logprobs in output.logprobs]
    assert [logprobs.token_id for logprobs in told] == tokens
    for row, logprobs in zip(scores, told, strict=True):
        assert math.isclose(logprobs.logprob, float(row[logprobs.token_id]), abs_tol=1e-4)
        values, indices = row.topk(3)
        assert [token for token, _ in logprobs.top] == indices.tolist()
        torch.testing.assert_close(
            torch.tensor([value for _, value in logprobs.top]), values, atol=1e-4, rtol=0
        )


def test_neighbours_get_logprobs_only_if_they_want_them_and_as_many() -> None:
    engine = make_engine()
    for name, logprobs in (("none", None), ("zero", 0), ("two", 2)):
        params = SamplingParams(max_tokens=4, ignore_eos=True, logprobs=logprobs)
        engine.add_request(PROMPT, params, request_id=name)
    outputs = run_to_end(engine)
    assert [output.logprobs for output in outputs["none"]] == [()] * 4
    assert [len(output.logprobs[0].top) for output in outputs["zero"]] == [0] * 4
    assert [len(output.logprobs[0].top) for output in outputs["two"]] == [2] * 4
    assert [o.logprobs[0].logprob for o in outputs["zero"]] == [
        o.logprobs[0].logprob for o in outputs["two"]
    ]


@pytest.mark.parametrize(
    "fields",
    [
        {"stop": "text"},
        {"stop": ("",)},
        {"stop": ("a",) * 17},
        {"stop": (1,)},
        {"stop_token_ids": [3]},
        {"stop_token_ids": (-1,)},
        {"stop_token_ids": (1,) * 1025},
        {"stop_token_ids": (2**63,)},
        {"max_tokens": 2**63},
        {"logprobs": -1},
        {"logprobs": 21},
        {"logprobs": True},
    ],
)
def test_a_parameter_out_of_its_range_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(fields))):
        SamplingParams(**fields)
