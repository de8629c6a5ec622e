"""What can be asked of ``generate``, over a real engine: answers, stops, probabilities, time."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from disconnect_watch.token import Reason
from tests.support.net import wait_until
from tests.support.serve import Client, Serving, packaged_engine, serving_engine

GENERATE = "/v2/models/tiny/generate"
STREAM = "/v2/models/tiny/generate_stream"
BODY = {"text_input": "The class", "max_tokens": 12, "temperature": 0.8, "seed": 7}


@pytest.fixture(scope="module")
def shared() -> Iterator[Serving]:
    with serving_engine(packaged_engine()) as serving:
        yield serving


@pytest.fixture
def serving(shared: Serving) -> Iterator[Serving]:
    shared.outcomes.clear()
    yield shared
    wait_until(shared.is_idle)


def answer_to(serving: Serving, **fields: Any) -> dict[str, Any]:
    with Client(serving.port) as client:
        client.post(GENERATE, {**BODY, **fields})
        status, _, body = client.read_response()
    assert status == 200, body
    document: dict[str, Any] = json.loads(body)
    return document


def events_of(serving: Serving, **fields: Any) -> list[dict[str, Any]]:
    with Client(serving.port) as client:
        client.post(STREAM, {**BODY, **fields})
        status, _, body = client.read_response()
    assert status == 200, body
    events = body.strip().split(b"\n\n")
    return [json.loads(event.removeprefix(b"data: ")) for event in events]


def test_several_answers_are_an_array_in_their_order(serving: Serving) -> None:
    texts = answer_to(serving, n=3)["text_output"]
    assert len(set(texts)) == 3
    assert texts[0] == answer_to(serving)["text_output"]
    streamed = ["", "", ""]
    for event in events_of(serving, n=3):
        streamed[event["index"]] += event["text_output"]
    assert streamed == texts
    assert [len(outcomes) for outcomes in serving.outcomes.values()] == [1, 1, 1]


def test_the_best_of_several_is_one_answer(serving: Serving) -> None:
    text = answer_to(serving, best_of=4)["text_output"]
    assert isinstance(text, str)
    ((outcome,),) = serving.outcomes.values()
    assert outcome.num_generated_tokens > 12


def test_a_stop_string_ends_the_text_before_it(serving: Serving) -> None:
    whole = answer_to(serving)["text_output"]
    stop = whole[4:7]
    assert answer_to(serving, stop=stop)["text_output"] == whole[: whole.index(stop)]
    assert (
        "".join(e["text_output"] for e in events_of(serving, stop=[stop, "never"]))
        == (whole[: whole.index(stop)])
    )


def test_logprobs_are_json_for_each_token(serving: Serving) -> None:
    answer = answer_to(serving, logprobs=2, temperature=0)
    told = json.loads(answer["logprobs"])
    assert len(told) == 12
    assert all(each["logprob"] == each["top"][0][1] <= 0 for each in told)
    assert all(len(each["top"]) == 2 for each in told)
    streamed = [
        each
        for event in events_of(serving, logprobs=2, temperature=0)
        for each in json.loads(event["logprobs"])
    ]
    assert [each["token_id"] for each in streamed] == [each["token_id"] for each in told]
    assert "logprobs" not in answer_to(serving)


@pytest.mark.parametrize("path", [GENERATE, STREAM])
def test_a_time_that_is_over_is_504_and_not_to_be_retried(serving: Serving, path: str) -> None:
    with Client(serving.port) as client:
        client.post(path, {**BODY, "time_limit": 0})
        status, headers, body = client.read_response()
    assert (status, headers["x-should-retry"]) == (504, "false")
    assert "time that the request was given is over" in json.loads(body)["error"]
    ((outcome,),) = serving.outcomes.values()
    assert outcome.reason is Reason.DEADLINE


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"priority": "high"}, 'priority is "high", it must be an integer'),
        ({"time_limit": -1}, "time_limit is -1.0, it must be in [0,"),
        ({"text_input": "\u1234" * 1400}, "leaves no room to generate"),
    ],
)
def test_what_only_the_engine_knows_is_refused_by_it(
    serving: Serving, fields: dict[str, Any], complaint: str
) -> None:
    with Client(serving.port) as client:
        client.post(GENERATE, {**BODY, **fields})
        status, _, body = client.read_response()
    assert status == 400
    assert complaint in json.loads(body)["error"]
    assert serving.outcomes == {}


def test_a_lower_priority_waits_behind_a_higher_one() -> None:
    engine = packaged_engine(max_num_seqs=1)
    with serving_engine(engine) as serving, Client(serving.port) as holder:
        holder.post(STREAM, {**BODY, "max_tokens": 100_000, "ignore_eos": True, "priority": -1})
        holder.read_until(b"\n\n")
        clients = {priority: Client(serving.port) for priority in (5, 1, 3)}
        for priority, client in clients.items():
            client.post(GENERATE, {**BODY, "max_tokens": 1, "priority": priority})
        wait_until(lambda: serving.backend.stats().num_waiting == len(clients))
        holder.sock.close()
        ids = {}
        for priority, client in clients.items():
            status, headers, _ = client.read_response()
            assert status == 200
            ids[priority] = headers["x-request-id"]
            client.sock.close()
        wait_until(lambda: len(serving.outcomes) == 4)
        wait_until(serving.is_idle)
    assert list(serving.outcomes)[1:] == [ids[1], ids[3], ids[5]]
