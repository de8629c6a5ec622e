"""OpenAI's endpoints through OpenAI's own SDK, over a real engine and loopback."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.support.command import running
from tests.support.net import wait_until
from tests.support.serve import Client, Serving, packaged_engine, serving_engine

PROMPT = "The class"
ASK: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "max_tokens": 12, "seed": 7}
CHAT: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "The class statement"}],
    "max_tokens": 12,
    "seed": 7,
}


@pytest.fixture(scope="module")
def shared() -> Iterator[Serving]:
    with serving_engine(packaged_engine()) as serving:
        yield serving


@pytest.fixture
def serving(shared: Serving) -> Iterator[Serving]:
    shared.outcomes.clear()
    yield shared
    wait_until(shared.is_idle)
    shared.engine.check_integrity()


def client_at(port: int) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=30, max_retries=0
    )


@pytest.fixture
def client(serving: Serving) -> Iterator[openai.OpenAI]:
    with client_at(serving.port) as client:
        yield client


def test_models_are_listed_by_name(client: openai.OpenAI) -> None:
    (model,) = client.models.list()
    assert (model.id, model.object, model.owned_by) == ("tiny", "model", "disconnect_watch")
    assert client.models.retrieve("tiny") == model
    with pytest.raises(openai.NotFoundError, match="'nope' does not exist"):
        client.models.retrieve("nope")


def test_a_completion_is_the_engines_text_and_count(client: openai.OpenAI) -> None:
    whole = client.completions.create(**ASK)
    (choice,) = whole.choices
    assert whole.id.startswith("cmpl-")
    assert whole.object == "text_completion"
    assert choice.finish_reason == "length"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 12
    assert whole.usage.total_tokens == 12 + whole.usage.prompt_tokens
    chunks = list(client.completions.create(**ASK, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == choice.text
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "length"
    assert {chunk.choices[0].finish_reason for chunk in chunks[:-1]} <= {None}
    assert all(chunk.usage is None for chunk in chunks)


def test_the_temperature_is_1_unless_told() -> None:
    with serving_engine(packaged_engine()) as serving, client_at(serving.port) as client:
        texts = {
            client.completions.create(model="tiny", prompt=PROMPT).choices[0].text for _ in range(4)
        }
    assert len(texts) > 1


@pytest.mark.parametrize("stream", [False, True])
def test_each_prompt_has_n_choices(client: openai.OpenAI, stream: bool) -> None:
    ask: dict[str, Any] = {**ASK, "prompt": ["The class", "A list"], "n": 2}
    single = [
        client.completions.create(**{**ask, "prompt": prompt}).choices for prompt in ask["prompt"]
    ]
    expected = [choice.text for choices in single for choice in choices]
    assert len(set(expected)) == 4
    texts = [""] * 4
    if stream:
        for chunk in client.completions.create(**ask, stream=True):
            texts[chunk.choices[0].index] += chunk.choices[0].text
    else:
        answer = client.completions.create(**ask)
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        texts = [choice.text for choice in answer.choices]
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 4 * 12
    assert texts == expected


def test_tokens_are_a_prompt_too(serving: Serving, client: openai.OpenAI) -> None:
    tokens = serving.backend.tokenize(PROMPT)
    text = client.completions.create(**ASK).choices[0].text
    assert client.completions.create(**{**ASK, "prompt": tokens}).choices[0].text == text
    both = client.completions.create(**{**ASK, "prompt": [tokens, tokens]})
    assert [choice.text for choice in both.choices] == [text, text]
    echoed = client.completions.create(**{**ASK, "prompt": tokens}, echo=True)
    assert echoed.choices[0].text == PROMPT + text


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_comes_first_and_once(client: openai.OpenAI, stream: bool) -> None:
    text = client.completions.create(**ASK).choices[0].text
    if stream:
        chunks = client.completions.create(**ASK, echo=True, stream=True)
        told = "".join(chunk.choices[0].text for chunk in chunks)
    else:
        told = client.completions.create(**ASK, echo=True).choices[0].text
    assert told == PROMPT + text


def test_the_best_of_several_counts_all_of_them(client: openai.OpenAI) -> None:
    answer = client.completions.create(**ASK, best_of=3)
    assert len(answer.choices) == 1
    assert answer.usage is not None
    assert 12 < answer.usage.completion_tokens <= 3 * 12


def test_logprobs_of_a_completion_are_four_lists(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {**ASK, "temperature": 0, "logprobs": 2}
    (choice,) = client.completions.create(**ask).choices
    told = choice.logprobs
    assert told is not None
    assert "".join(told.tokens or ()) == choice.text
    assert told.text_offset is not None
    assert told.text_offset[:2] == [0, len((told.tokens or [""])[0])]
    for token, logprob, top in zip(
        told.tokens or (), told.token_logprobs or (), told.top_logprobs or (), strict=True
    ):
        assert len(top) == 2
        assert top[token] == logprob == max(top.values())
    streamed: list[int] = []
    for chunk in client.completions.create(**ask, stream=True):
        logprobs = chunk.choices[0].logprobs
        streamed += (logprobs and logprobs.text_offset) or []
    assert streamed == told.text_offset


def test_logprobs_of_a_chat_are_one_list(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {**CHAT, "temperature": 0, "logprobs": True, "top_logprobs": 3}
    (choice,) = client.chat.completions.create(**ask).choices
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    tokens = choice.logprobs.content
    assert len(tokens) == 12
    assert b"".join(bytes(token.bytes or ()) for token in tokens).decode() == (
        choice.message.content
    )
    assert all(token.top_logprobs[0].logprob == token.logprob for token in tokens)
    assert all(len(token.top_logprobs) == 3 for token in tokens)


def test_a_chat_goes_through_the_models_template(serving: Serving, client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**CHAT)
    (choice,) = whole.choices
    assert whole.id.startswith("chatcmpl-")
    assert choice.message.role == "assistant"
    template = serving.backend.chat_template
    assert template is not None
    prompt = serving.backend.tokenize(template.render(CHAT["messages"]), add_special_tokens=False)
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == len(prompt)
    same = client.completions.create(**{**ASK, "prompt": prompt})
    assert choice.message.content == same.choices[0].text
    parts = [{"type": "text", "text": "The class"}, {"type": "text", "text": " statement"}]
    as_parts: Any = [{"role": "user", "content": parts}]
    in_parts = client.chat.completions.create(**{**CHAT, "messages": as_parts})
    assert in_parts.choices[0].message.content == choice.message.content


def test_a_chat_streams_role_content_and_end(client: openai.OpenAI) -> None:
    text = client.chat.completions.create(**CHAT).choices[0].message.content
    chunks = list(
        client.chat.completions.create(**CHAT, stream=True, stream_options={"include_usage": True})
    )
    *content, last, usage = chunks
    assert content[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in content) == text
    assert last.choices[0].finish_reason == "length"
    assert usage.choices == []
    assert usage.usage is not None
    assert usage.usage.completion_tokens == 12
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_max_completion_tokens_stop_and_n_are_heard(client: openai.OpenAI) -> None:
    ask = {key: value for key, value in CHAT.items() if key != "max_tokens"}
    whole = client.chat.completions.create(**ask, max_completion_tokens=12, n=3)
    texts = [choice.message.content or "" for choice in whole.choices]
    assert len(set(texts)) == 3
    stop = texts[0][4:7]
    stopped = client.chat.completions.create(**CHAT, stop=[stop, "never said"])
    assert stopped.choices[0].message.content == texts[0][: texts[0].index(stop)]
    assert stopped.choices[0].finish_reason == "stop"


def test_the_async_client_is_served_as_well(serving: Serving) -> None:
    async def main() -> tuple[str, str]:
        async with openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{serving.port}/v1", api_key="none", max_retries=0
        ) as client:
            whole = await client.chat.completions.create(**CHAT)
            pieces = [
                chunk.choices[0].delta.content or ""
                async for chunk in await client.chat.completions.create(**CHAT, stream=True)
            ]
            return whole.choices[0].message.content or "", "".join(pieces)

    whole, streamed = asyncio.run(main())
    assert whole == streamed != ""


@pytest.mark.parametrize(
    ("path", "change", "status", "param", "complaint"),
    [
        ("completions", {"model": "nope"}, 404, "model", "'nope' does not exist"),
        ("completions", {"model": 5}, 400, "model", "Expected `str`, got `int`"),
        ("completions", {"prompt": []}, 400, "prompt", "prompt is empty"),
        ("completions", {"prompt": [[1], []]}, 400, "prompt", "prompt[1] is neither"),
        ("completions", {"prompt": ["a", True]}, 400, "prompt", "prompt[1] is neither"),
        ("completions", {"prompt": [1 << 40]}, 400, None, "token id outside"),
        ("completions", {"max_tokens": 0}, 400, "max_tokens", "max_tokens is 0"),
        ("completions", {"max_tokens": "x"}, 400, "max_tokens", "Expected `int | null`"),
        ("completions", {"temperature": -1}, 400, "temperature", "temperature is -1"),
        ("completions", {"n": 129}, 400, "n", "n is 129"),
        ("completions", {"stop": [""]}, 400, "stop", "none of them empty"),
        ("completions", {"logprobs": 21}, 400, "logprobs", "logprobs is 21"),
        ("completions", {"echo": True, "logprobs": 1}, 400, "echo", "echo with logprobs"),
        ("completions", {"suffix": "x"}, 400, "suffix", "this server cannot do"),
        ("completions", {"presence_penalty": 1}, 400, "presence_penalty", "cannot do"),
        ("completions", {"best_of": 2, "stream": True}, 400, "best_of", "cannot be streamed"),
        ("completions", {"stream_options": {}}, 400, "stream_options", "needs stream"),
        ("completions", {"timeout": "x"}, 400, "timeout", "Expected `float | null`"),
        ("chat/completions", {"messages": []}, 400, "messages", "length >= 1"),
        ("chat/completions", {"messages": [{}]}, 400, "messages", "messages[0].role is null"),
        ("chat/completions", {"messages": "hi"}, 400, "messages", "Expected `array`"),
        ("chat/completions", {"top_logprobs": 1}, 400, "top_logprobs", "needs logprobs"),
        (
            "chat/completions",
            {"logprobs": True, "top_logprobs": 21},
            400,
            "top_logprobs",
            "top_logprobs is 21",
        ),
        (
            "chat/completions",
            {"max_completion_tokens": 0},
            400,
            "max_completion_tokens",
            "max_completion_tokens is 0",
        ),
        ("chat/completions", {"tool_choice": "required"}, 400, "tool_choice", "cannot do"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            400,
            "messages",
            "only parts of text",
        ),
        (
            "chat/completions",
            {"response_format": {"type": "json_object"}},
            400,
            "response_format",
            "cannot do",
        ),
    ],
)
def test_what_makes_no_sense_is_named(
    serving: Serving,
    path: str,
    change: dict[str, Any],
    status: int,
    param: str | None,
    complaint: str,
) -> None:
    with Client(serving.port) as client:
        body = {**(CHAT if path.startswith("chat") else ASK), **change}
        client.post(f"/v1/{path}", body)
        answered, _, answer = client.read_response()
    error = json.loads(answer)["error"]
    assert (answered, error["param"]) == (status, param), error
    assert complaint in error["message"]
    assert error["type"] == ("not_found_error" if status == 404 else "invalid_request_error")
    assert serving.outcomes == {}


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000])
def test_what_is_no_request_at_all_is_400(serving: Serving, body: bytes) -> None:
    with Client(serving.port) as client:
        client.post("/v1/completions", body)
        status, _, answer = client.read_response()
    assert status == 400
    assert json.loads(answer)["error"]["param"] == "body"


def test_a_path_that_is_not_there_is_told_in_openais_form(serving: Serving) -> None:
    with Client(serving.port) as client:
        client.post("/v1/nowhere")
        status, _, answer = client.read_response()
        assert (status, json.loads(answer)["error"]["type"]) == (404, "not_found_error")
        client.post("/v1/models")
        assert client.read_response()[0] == 405


def test_tools_are_the_templates_and_a_call_is_text(serving: Serving) -> None:
    tools: Any = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    with client_at(serving.port) as client:
        answer = client.chat.completions.create(**CHAT, tools=tools, tool_choice="auto")
    assert answer.choices[0].message.content
    assert answer.choices[0].message.tool_calls is None


def test_one_prompt_of_several_that_is_refused_lets_none_begin(serving: Serving) -> None:
    num_before = serving.backend.stats().num_requests
    with client_at(serving.port) as client, pytest.raises(openai.BadRequestError, match="token id"):
        client.completions.create(**{**ASK, "prompt": [[1, 2], [3, 4], [1 << 30]]})
    with client_at(serving.port) as client:
        client.completions.create(**ASK)  # comes behind whatever the other has left
    wait_until(lambda: len(serving.outcomes) == 1)
    assert serving.backend.stats().num_requests == num_before + 1


def test_several_prompts_find_room_together_or_not_at_all() -> None:
    engine = packaged_engine(max_num_seqs=1, max_queue=2)
    endless: dict[str, Any] = {**ASK, "max_tokens": 100_000, "ignore_eos": True}
    with serving_engine(engine) as serving:
        with (
            client_at(serving.port) as client,
            Client(serving.port) as runs,
            Client(serving.port) as waits,
        ):
            runs.post("/v1/completions", endless)
            wait_until(lambda: serving.backend.stats().num_running == 1)
            waits.post("/v1/completions", endless)
            wait_until(lambda: serving.backend.stats().num_waiting == 1)
            with pytest.raises(openai.InternalServerError, match="queue size") as full:
                client.completions.create(**{**ASK, "prompt": ["a", "b"]})
            assert full.value.status_code == 503
            # However long it waits, there will not be room for so many.
            with pytest.raises(openai.BadRequestError, match="the queue holds 2") as never:
                client.completions.create(**{**ASK, "prompt": ["a", "b", "c"]})
            assert never.value.response.headers.get("retry-after") is None
            with pytest.raises(openai.BadRequestError, match="4 answers are wanted"):
                client.completions.create(**{**ASK, "prompt": ["a", "b"], "n": 2})
        wait_until(serving.is_idle)
        assert serving.backend.stats().num_requests == 2
        assert len(serving.outcomes) == 2


@pytest.mark.timeout(180)
def test_the_command_serves_the_sdk_and_prints_the_admins_token() -> None:
    with running() as server, client_at(server.port) as client:
        chunks = list(client.chat.completions.create(**CHAT, stream=True))
        assert chunks[-1].choices[0].finish_reason == "length"
        raw = client.completions.with_raw_response.create(**ASK)
        request_id = raw.headers["x-request-id"]
        assert raw.parse().id == f"cmpl-{request_id}"
        wait_until(lambda: any(line.startswith("admin token: dw-") for line in server.lines), 20)
        (line,) = (line for line in server.lines if line.startswith("admin token: "))
        token = line.removeprefix("admin token: ").strip()
        for key, status in ((token, 200), ("other", 401)):
            with Client(server.port) as other:
                other.post(f"/v1/requests/{request_id}/cancel", Authorization=f"Bearer {key}")
                assert other.read_response()[0] == status
        assert sum(token in line for line in server.lines) == 1
