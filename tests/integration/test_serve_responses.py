"""``/v1/responses`` through OpenAI's own SDK, over a real engine and loopback."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent

from tests.support.gate import gated
from tests.support.net import wait_until
from tests.support.serve import Client, Serving, packaged_engine, serving_engine

ASK: dict[str, Any] = {
    "model": "tiny",
    "input": "The class statement",
    "max_output_tokens": 8,
    "extra_body": {"seed": 7, "ignore_eos": True},
}
ENDLESS: dict[str, Any] = {**ASK, "max_output_tokens": 100_000}

#: Of a stream with text, but for the deltas.
AROUND = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
]


@pytest.fixture(scope="module")
def shared() -> Iterator[Serving]:
    with serving_engine(packaged_engine()) as serving:
        yield serving


@pytest.fixture
def serving(shared: Serving) -> Iterator[Serving]:
    shared.outcomes.clear()
    yield shared
    wait_until(shared.is_idle)
    wait_until(lambda: shared.frontend.responses.num_running == 0)
    assert shared.frontend.ledger.live() == []
    shared.engine.check_integrity()


def client_of(serving: Serving) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"http://127.0.0.1:{serving.port}/v1", api_key="none", timeout=40, max_retries=0
    )


@pytest.fixture
def client(serving: Serving) -> Iterator[openai.OpenAI]:
    with client_of(serving) as client:
        yield client


def poll(client: openai.OpenAI, response_id: str) -> Response:
    """Ask until it has ended, as clients do."""
    seen: list[Response] = []

    def has_ended() -> bool:
        seen.append(client.responses.retrieve(response_id))
        return seen[-1].status not in ("queued", "in_progress")

    wait_until(has_ended)
    return seen[-1]


def kinds(events: list[ResponseStreamEvent]) -> list[str]:
    """The types of events, each run of deltas as one, held to their numbering."""
    numbers = [event.sequence_number for event in events]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    told: list[str] = []
    for event in events:
        if event.type != "response.output_text.delta" or told[-1:] != [event.type]:
            told.append(event.type)
    return told


def test_a_response_is_the_engines_text_and_count(client: openai.OpenAI) -> None:
    made = client.responses.create(**ASK, metadata={"a": "b"})
    assert made.id.startswith("resp_")
    assert (made.object, made.status, made.model) == ("response", "incomplete", "tiny")
    assert made.incomplete_details is not None
    assert made.incomplete_details.reason == "max_output_tokens"
    assert made.background is False
    assert made.metadata == {"a": "b"}
    assert made.usage is not None
    assert made.usage.output_tokens == 8
    assert made.usage.total_tokens == made.usage.input_tokens + 8
    (message,) = made.output
    assert message.type == "message"
    assert (message.role, message.status) == ("assistant", "incomplete")
    chat = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": ASK["input"]}],
        max_tokens=8,
        seed=7,
        extra_body={"ignore_eos": True},
    )
    assert made.output_text == chat.choices[0].message.content
    assert client.responses.retrieve(made.id) == made


def test_one_that_comes_to_its_end_is_completed(client: openai.OpenAI) -> None:
    text = client.responses.create(**ASK).output_text
    stop = text[6:9]
    extra = ASK["extra_body"] | {"stop": stop}
    made = client.responses.create(**ASK | {"extra_body": extra})
    assert made.output_text == text[: text.index(stop)]
    assert made.status == "completed"
    assert made.completed_at is not None
    assert made.incomplete_details is None
    (message,) = made.output
    assert message.type == "message"
    assert message.status == "completed"


def test_items_are_a_chat(serving: Serving, client: openai.OpenAI) -> None:
    items: list[Any] = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "The class"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "x"}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"role": "user", "content": "statement"},
    ]
    made = client.responses.create(**ASK | {"input": items, "instructions": "Speak."})
    assert made.instructions == "Speak."
    template = serving.backend.chat_template
    assert template is not None
    messages = [
        {"role": "system", "content": "Speak."},
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "The class"},
        {"role": "assistant", "content": "x"},
        {"role": "user", "content": "statement"},
    ]
    prompt = serving.backend.tokenize(template.render(messages), add_special_tokens=False)
    assert made.usage is not None
    assert made.usage.input_tokens == len(prompt)
    same = client.completions.create(
        model="tiny", prompt=prompt, max_tokens=8, extra_body=ASK["extra_body"]
    )
    assert made.output_text == same.choices[0].text
    counted = client.responses.input_tokens.count(model="tiny", input=items, instructions="Speak.")
    assert counted.input_tokens == len(prompt)


def test_a_stream_tells_every_event_in_order(client: openai.OpenAI) -> None:
    made = client.responses.create(**ASK)
    with client.responses.create(**ASK, stream=True) as stream:
        assert stream.response.headers["content-type"].startswith("text/event-stream")
        events = list(stream)
    *around, last = kinds(events)
    assert around == [*AROUND[:4], "response.output_text.delta", *AROUND[4:]]
    assert last == "response.incomplete"
    assert events[0].sequence_number == 0
    first, end = events[0], events[-1]
    assert first.type == "response.created"
    assert (first.response.status, first.response.output) == ("in_progress", [])
    assert first.response.usage is None
    assert end.type == "response.incomplete"
    assert end.response.output_text == made.output_text
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert "".join(event.delta for event in deltas) == made.output_text
    (item_id,) = {event.item_id for event in deltas}
    assert end.response.output[0].id == item_id
    assert client.responses.retrieve(first.response.id) == end.response


def test_the_helper_of_the_sdk_accumulates_a_stream(client: openai.OpenAI) -> None:
    text = client.responses.create(**ASK).output_text
    extra = ASK["extra_body"] | {"stop": text[6:9]}
    with client.responses.stream(**ASK | {"extra_body": extra}) as stream:
        final = stream.get_final_response()
    assert final.status == "completed"
    assert final.output_text == text[: text.index(text[6:9])]


def test_logprobs_come_where_they_are_asked_for(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {
        **ASK,
        # The other is of items that no response here has.
        "include": ["reasoning.encrypted_content", "message.output_text.logprobs"],
        "top_logprobs": 2,
        "temperature": 0,
    }
    made = client.responses.create(**ask)
    (message,) = made.output
    assert message.type == "message"
    (part,) = message.content
    assert part.type == "output_text"
    assert part.logprobs is not None
    assert len(part.logprobs) == 8
    assert "".join(entry.token for entry in part.logprobs) == part.text
    assert all(entry.top_logprobs[0].logprob == entry.logprob for entry in part.logprobs)
    streamed = [
        entry
        for event in client.responses.create(**ask, stream=True)
        if event.type == "response.output_text.delta"
        for entry in event.logprobs
    ]
    assert [entry.logprob for entry in streamed] == [entry.logprob for entry in part.logprobs]


def test_one_that_is_not_stored_is_not_found(client: openai.OpenAI) -> None:
    made = client.responses.create(**ASK, store=False)
    assert made.output_text
    streamed = list(client.responses.create(**ASK, store=False, stream=True))
    assert streamed[0].type == "response.created"
    for response_id in (made.id, streamed[0].response.id):
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(response_id)


def test_the_background_is_queued_polled_and_ends(serving: Serving, client: openai.OpenAI) -> None:
    text = client.responses.create(**ASK).output_text
    with gated(serving.engine) as gate:
        made = client.responses.create(**ASK, background=True)
        assert (made.status, made.background, made.output) == ("queued", True, [])
        gate.wait()
        gate.pass_steps(2)
        wait_until(lambda: client.responses.retrieve(made.id).status == "in_progress")
        with pytest.raises(openai.BadRequestError, match="has not ended yet"):
            client.responses.create(**ASK, previous_response_id=made.id)
        gate.open()
        ended = poll(client, made.id)
    assert ended.status == "incomplete"
    assert ended.output_text == text
    assert client.responses.cancel(made.id) == ended


def test_a_stream_of_the_background_is_left_and_taken_up_again(
    serving: Serving, client: openai.OpenAI
) -> None:
    num_signals = sum(serving.watcher.stats().num_signals.values())
    with gated(serving.engine) as gate:
        heard: list[ResponseStreamEvent] = []
        with client.responses.create(**ASK, background=True, stream=True) as stream:
            gate.wait()
            gate.pass_steps(3)
            for event in stream:
                heard.append(event)
                if event.type == "response.output_text.delta":
                    break
        gate.wait()
        assert heard[0].type == "response.created"
        response_id = heard[0].response.id
        assert heard[1].type == "response.queued"
        last = heard[-1].sequence_number
        # Its client is seen to have left, which cancels nothing.
        wait_until(lambda: sum(serving.watcher.stats().num_signals.values()) > num_signals)
        gate.open()
        rest = list(client.responses.retrieve(response_id, stream=True, starting_after=last))
    assert rest[0].sequence_number == last + 1
    whole = list(client.responses.retrieve(response_id, stream=True))
    assert whole == [*heard, *rest]
    assert kinds(whole)[-1] == "response.incomplete"
    (outcome,) = [outcome for (outcome,) in serving.outcomes.values()]
    assert outcome.kind == "finished"


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_replay_of_what_has_ended_is_the_stream_again(
    client: openai.OpenAI, is_streamed: bool
) -> None:
    if is_streamed:
        events = list(client.responses.create(**ASK, stream=True))
        assert events[0].type == "response.created"
        response_id = events[0].response.id
    else:
        response_id = client.responses.create(**ASK).id
        events = list(client.responses.retrieve(response_id, stream=True))
    for number in (0, 3, len(events) - 2):
        rest = client.responses.retrieve(response_id, stream=True, starting_after=number)
        assert list(rest) == events[number + 1 :]
    for number in (len(events) - 1, 1 << 50):
        assert not list(client.responses.retrieve(response_id, stream=True, starting_after=number))


def test_a_cancel_in_the_background_is_acked_and_idempotent(
    serving: Serving, client: openai.OpenAI
) -> None:
    made = client.responses.create(**ENDLESS, background=True)
    follower = client.responses.retrieve(made.id, stream=True)
    for event in follower:
        if event.type == "response.output_text.delta":
            break
    ended = client.responses.cancel(made.id)
    assert serving.engine.block_owners == set()
    assert ended.status == "cancelled"
    assert ended.error is None
    (message,) = ended.output
    assert message.type == "message"
    assert message.status == "incomplete"
    assert ended.output_text
    assert ended.usage is not None
    assert ended.usage.output_tokens > 0
    # Whoever follows it is let go, and so is who asks later; there is no event for it.
    assert {event.type for event in follower} <= {"response.output_text.delta"}
    assert kinds(list(client.responses.retrieve(made.id, stream=True)))[-1] == (
        "response.output_text.delta"
    )
    assert client.responses.cancel(made.id) == ended
    assert client.responses.retrieve(made.id) == ended


def test_one_that_waits_is_cancelled_without_ever_running() -> None:
    engine = packaged_engine(max_num_seqs=1)
    with serving_engine(engine) as serving, client_of(serving) as client:
        holder = client.responses.create(**ENDLESS, background=True)
        wait_until(lambda: serving.backend.stats().num_running == 1)
        made = client.responses.create(**ENDLESS, background=True)
        ended = client.responses.cancel(made.id)
        assert (ended.status, ended.output) == ("cancelled", [])
        request_id = made.id.removeprefix("resp_")
        assert not any(request_id in record.scheduled for record in engine.step_log)
        assert [event.type for event in client.responses.retrieve(made.id, stream=True)] == [
            "response.created",
            "response.queued",
        ]
        client.responses.cancel(holder.id)
        wait_until(serving.is_idle)


def test_an_effect_that_takes_longer_is_told_as_what_it_is(
    serving: Serving, client: openai.OpenAI
) -> None:
    with gated(serving.engine) as gate:
        made = client.responses.create(**ENDLESS, background=True)
        gate.wait()
        answer = client.responses.with_raw_response.cancel(made.id, extra_query={"wait": 0})
        assert answer.http_response.status_code == 202
        assert answer.parse().status == "queued"
        gate.open()
        assert client.responses.cancel(made.id).status == "cancelled"


def test_the_foreground_is_not_cancelled_by_its_id(serving: Serving, client: openai.OpenAI) -> None:
    ended = client.responses.create(**ASK)
    with client.responses.create(**ENDLESS, stream=True) as stream:
        first = next(iter(stream))
        assert first.type == "response.created"
        for response_id in (ended.id, first.response.id):
            with pytest.raises(openai.BadRequestError) as caught:
                client.responses.cancel(response_id)
            assert caught.value.code == "response_not_background"
        with pytest.raises(openai.BadRequestError, match="close its connection"):
            client.responses.delete(first.response.id)
        assert client.responses.retrieve(first.response.id).status == "in_progress"


def test_what_is_deleted_is_not_found(client: openai.OpenAI) -> None:
    made = client.responses.create(**ASK)
    client.responses.delete(made.id)
    for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError):
            call(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.input_items.list(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id, stream=True)


def test_a_delete_of_what_runs_cancels_it(serving: Serving, client: openai.OpenAI) -> None:
    made = client.responses.create(**ENDLESS, background=True)
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)
    wait_until(serving.is_idle)
    (outcome,) = [outcome for (outcome,) in serving.outcomes.values()]
    assert (outcome.kind, outcome.reason) == ("cancelled", "aborted")


def test_one_goes_on_from_another(serving: Serving, client: openai.OpenAI) -> None:
    first = client.responses.create(**ASK, instructions="Speak.")
    second = client.responses.create(**ASK | {"input": "Go on."}, previous_response_id=first.id)
    assert second.previous_response_id == first.id
    third = client.responses.create(**ASK | {"input": "More."}, previous_response_id=second.id)
    template = serving.backend.chat_template
    assert template is not None
    messages = [
        {"role": "user", "content": ASK["input"]},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "Go on."},
        {"role": "assistant", "content": second.output_text},
        {"role": "user", "content": "More."},
    ]
    prompt = serving.backend.tokenize(template.render(messages), add_special_tokens=False)
    assert third.usage is not None
    assert third.usage.input_tokens == len(prompt)
    client.responses.delete(first.id)
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**ASK, previous_response_id=third.id)
    assert (caught.value.code, caught.value.param) == (
        "previous_response_not_found",
        "previous_response_id",
    )


def test_input_items_are_listed_in_pages(client: openai.OpenAI) -> None:
    items: list[Any] = [{"role": "user", "content": f"text {index}"} for index in range(7)]
    made = client.responses.create(**ASK | {"input": items})

    def texts(**options: Any) -> list[str]:
        listed = client.responses.input_items.list(made.id, **options)
        return [item.content[0].text for item in listed]  # type: ignore[index, union-attr]

    expected = [item["content"] for item in items]
    assert texts() == expected[::-1]
    assert texts(limit=3) == expected[::-1]
    assert texts(order="asc", limit=2) == expected
    page = client.responses.input_items.list(made.id, order="asc", limit=3)
    assert [item.id for item in page.data] == [f"msg_{made.id[5:]}_{index}" for index in range(3)]
    assert page.has_more
    assert page.data[0].status == "completed"  # type: ignore[union-attr]
    with pytest.raises(openai.BadRequestError, match="no item has that id"):
        texts(after="msg_0")
    ids = [item.id for item in client.responses.input_items.list(made.id, order="asc")]

    def between(order: Literal["asc", "desc"], **query: str) -> list[str]:
        listed = client.responses.input_items.list(
            made.id, order=order, extra_query=query, limit=100
        )
        return [item.id for item in listed.data]

    assert between("asc", before=ids[2]) == ids[:2]
    assert between("desc", before=ids[2]) == ids[:2:-1]
    assert between("asc", after=ids[0], before=ids[3]) == ids[1:3]
    assert between("asc", after=ids[3], before=ids[1]) == []
    with pytest.raises(openai.BadRequestError, match="before is"):
        between("asc", before="msg_0")


def test_calls_of_functions_are_shown_to_the_template(
    serving: Serving, client: openai.OpenAI
) -> None:
    items: list[Any] = [
        {"role": "user", "content": "What is it?"},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "nothing"},
    ]
    tools: Any = [{"type": "function", "name": "look", "parameters": {}, "strict": False}]
    made = client.responses.create(**ASK | {"input": items}, tools=tools, parallel_tool_calls=False)
    assert made.tools[0].type == "function"
    assert made.parallel_tool_calls is False
    listed = list(client.responses.input_items.list(made.id, order="asc"))
    assert [item.type for item in listed] == ["message", "function_call", "function_call_output"]


@pytest.mark.parametrize(
    ("change", "param", "complaint"),
    [
        ({"model": "nope"}, "model", "'nope' does not exist"),
        ({"input": []}, "input", "input is empty"),
        ({"input": 5}, "input", "Expected"),
        ({"input": [{"role": "nobody", "content": "x"}]}, "input", "input[0].role"),
        ({"input": [{"role": ["user"], "content": "x"}]}, "input", "input[0].role"),
        ({"input": [{"role": "user"}]}, "input", "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input", "of text"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "item_reference"),
        ({"input": [{"type": "function_call", "name": "x"}]}, "input", "call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "x"}]}, "input", "output"),
        ({"max_output_tokens": 0}, "max_output_tokens", "must be at least 1"),
        ({"temperature": -1}, "temperature", "temperature is -1"),
        ({"top_logprobs": 1}, "top_logprobs", "needs include"),
        ({"include": ["message.output_text.logprob"]}, "include", "which is not known"),
        ({"background": True, "store": False}, "background", "is stored"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "is known"),
        ({"text": {"format": {"type": "json_object"}}}, "text", "cannot do"),
        ({"truncation": "auto"}, "truncation", "cannot do"),
        ({"tool_choice": "required"}, "tool_choice", "cannot do"),
        ({"conversation": "conv_1"}, "conversation", "cannot do"),
        ({"prompt": {"id": "x"}}, "prompt", "cannot do"),
        ({"tools": [{"type": "web_search"}]}, "tools", "only functions"),
        ({"metadata": {"a": 1}}, "metadata", "Expected `str`"),
        ({"metadata": {str(key): "" for key in range(17)}}, "metadata", "length <= 16"),
    ],
)
def test_a_request_that_cannot_be_done_is_refused_by_name(
    serving: Serving, change: dict[str, Any], param: str, complaint: str
) -> None:
    body = {"model": "tiny", "input": "x", "max_output_tokens": 1} | change
    with httpx.Client(timeout=40) as http:
        answer = http.post(f"http://127.0.0.1:{serving.port}/v1/responses", json=body)
    error = answer.json()["error"]
    assert answer.status_code == (404 if param == "model" else 400)
    assert error["param"] == param
    assert complaint in error["message"]
    assert serving.outcomes == {}


@pytest.mark.parametrize(
    ("query", "complaint"),
    [
        ("?stream=maybe", "must be true or false"),
        ("?stream=true&starting_after=-1", "must be a number"),
        ("/input_items?limit=0", "from 1 to 100"),
        ("/input_items?limit=101", "from 1 to 100"),
        ("/input_items?order=up", "asc or desc"),
    ],
)
def test_a_question_that_makes_no_sense_is_refused(
    serving: Serving, client: openai.OpenAI, query: str, complaint: str
) -> None:
    made = client.responses.create(**ASK)
    with httpx.Client(timeout=40) as http:
        answer = http.get(f"http://127.0.0.1:{serving.port}/v1/responses/{made.id}{query}")
    assert answer.status_code == 400
    assert complaint in answer.json()["error"]["message"]


def test_the_async_client_is_served_as_well(serving: Serving) -> None:
    async def main() -> tuple[str, str, str]:
        async with openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{serving.port}/v1", api_key="none", max_retries=0
        ) as client:
            whole = await client.responses.create(**ASK)
            streamed = [
                event.delta
                async for event in await client.responses.create(**ASK, stream=True)
                if event.type == "response.output_text.delta"
            ]
            replayed = [
                event.delta
                async for event in await client.responses.retrieve(whole.id, stream=True)
                if event.type == "response.output_text.delta"
            ]
            return whole.output_text, "".join(streamed), "".join(replayed)

    assert len(set(asyncio.run(main()))) == 1


def test_frames_carry_their_event_and_its_number(serving: Serving) -> None:
    with Client(serving.port) as client:
        body = {"model": "tiny", "input": "x", "max_output_tokens": 1, "stream": True}
        client.post("/v1/responses", body)
        status, headers, raw = client.read_response()
    assert (status, headers["cache-control"]) == (200, "no-cache")
    frames = raw.decode().removesuffix("\n\n").split("\n\n")
    for number, text in enumerate(frames):
        event, data = text.split("\n")
        told = json.loads(data.removeprefix("data: "))
        assert event == f"event: {told['type']}"
        assert told["sequence_number"] == number
