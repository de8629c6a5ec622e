"""The generate routes: what is understood, what is refused, and how it is answered."""

import dataclasses
import json
from typing import Any

import httpx
import pytest

from disconnect_watch.adapters import TOKEN_KEY
from disconnect_watch.engine import Outcome, SamplingParams
from disconnect_watch.engine.errors import EngineClosedError, PromptTooLongError, QueueFullError
from disconnect_watch.server import Frontend, FrontendOptions, create_app
from disconnect_watch.server.errors import MalformedJSONError, ProtocolError
from disconnect_watch.server.generation import parse_generation
from disconnect_watch.token import CancelToken, Reason
from tests.support.backends import ScriptedBackend
from tests.support.serve import metrics_of, post_json

GENERATE = "/v2/models/script/generate"
STREAM = "/v2/models/script/generate_stream"


def parse(**fields: Any) -> SamplingParams:
    return parse_generation({"text_input": "hi", **fields}, ScriptedBackend()).params


def test_parameters_are_taken_from_the_top_level_and_from_parameters() -> None:
    params = parse(max_tokens=7, parameters={"temperature": 0.5, "top_k": 3, "seed": 2**64 - 1})
    assert params == SamplingParams(max_tokens=7, temperature=0.5, top_k=3, seed=2**64 - 1)


def test_a_tensor_may_be_an_array_of_one() -> None:
    generation = parse_generation(
        {"text_input": ["a"], "max_tokens": [5], "ignore_eos": [True]}, ScriptedBackend()
    )
    assert generation.prompt == "a"
    assert generation.params == SamplingParams(max_tokens=5, ignore_eos=True)


def test_every_sampling_parameter_can_be_given() -> None:
    given: dict[str, Any] = {
        "max_tokens": 3,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 4,
        "seed": 5,
        "ignore_eos": True,
        "stop": ["a", "b"],
        "stop_token_ids": [1, 2],
        "logprobs": 2,
        "n": 2,
        "best_of": 3,
    }
    assert given.keys() == {field.name for field in dataclasses.fields(SamplingParams)}
    expected = {**given, "stop": ("a", "b"), "stop_token_ids": (1, 2)}
    assert parse(**given) == SamplingParams(**expected)
    assert parse(stop="a", stop_token_ids=1) == SamplingParams(stop=("a",), stop_token_ids=(1,))


@pytest.mark.parametrize("nested", [True, False])
def test_priority_and_time_limit_are_the_requests_not_its_samplings(nested: bool) -> None:
    fields = {"priority": -3, "time_limit": 2}
    generation = parse_generation(
        {"text_input": "hi", **({"parameters": fields} if nested else fields)}, ScriptedBackend()
    )
    assert (generation.priority, generation.time_limit) == (-3, 2.0)
    assert generation.params == SamplingParams()


def test_unknown_parameters_are_carried_along_and_ignored() -> None:
    assert parse(presence=3, suffix="x", flag=True, deep=0.5) == SamplingParams()


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"max_tokens": "x"}, 'max_tokens is "x", it must be at least 1'),
        ({"max_tokens": -1}, "max_tokens is -1, it must be at least 1"),
        ({"max_tokens": 0}, "max_tokens is 0, it must be at least 1"),
        ({"max_tokens": True}, "max_tokens is true"),
        ({"max_tokens": 1.5}, "max_tokens is 1.5"),
        ({"max_tokens": None}, "max_tokens is null"),
        ({"parameters": {"max_tokens": "x"}}, 'max_tokens is "x"'),
        ({"temperature": -0.1}, "temperature is -0.1, it must be in [0, 3.4028235e+38]"),
        ({"temperature": "hot"}, 'temperature is "hot"'),
        ({"temperature": 10**400}, "it must be in [0, 3.4028235e+38]"),
        ({"top_p": 0}, "top_p is 0, it must be above 0, at most 1"),
        ({"top_k": -1}, "top_k is -1"),
        ({"seed": 2**64}, f"seed is {2**64}"),
        ({"ignore_eos": 1}, "ignore_eos is 1, it must be true or false"),
        ({"max_tokens": [1, 2]}, "can not convert input 'max_tokens' to tensor"),
        ({"stop": 5}, "stop is [5], it must be a tuple of at most 16 strings"),
        ({"stop": ["a", ""]}, 'stop is ["a", ""]'),
        ({"stop_token_ids": "x"}, 'stop_token_ids is ["x"]'),
        ({"logprobs": 21}, "logprobs is 21, it must be in [0, 20]"),
        ({"n": 0}, "n is 0, it must be in [1, 128]"),
        ({"n": 3, "best_of": 2}, "best_of is 2, it must be in [n, 128]"),
        ({"time_limit": "soon"}, 'time_limit is "soon", it must be a number of seconds'),
        ({"time_limit": None}, "time_limit is null, it must be a number of seconds"),
        ({"time_limit": True}, "time_limit is true, it must be a number of seconds"),
        ({"time_limit": 10**400}, "it must be a number of seconds"),
        ({"max_tokens": []}, "can not convert input 'max_tokens' to tensor"),
        ({"bad": {"x": 1}}, "parameter 'bad' has invalid type. It should be either 'int'"),
        ({"bad": None}, "parameter 'bad' has invalid type"),
        ({"parameters": [1]}, "'parameters' is [1], it must be a JSON object"),
        ({"max_tokens": 1, "parameters": {"max_tokens": 1}}, "'max_tokens' is given twice"),
        ({"id": 5}, "'id' is 5, it must be a string"),
    ],
)
def test_a_wrong_field_is_named_with_its_value(fields: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        parse(**fields)
    assert caught.value.status == 400
    assert complaint in str(caught.value)


LONG = "x" * 1_000_000


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": LONG},
        {"ignore_eos": [[LONG]]},
        {"temperature": 10**4000},
        {"parameters": [LONG]},
        {"id": [LONG]},
        {LONG: None},
        {LONG: 1, "parameters": {LONG: 1}},
        {"text_input": [LONG, LONG]},
    ],
)
def test_no_message_gives_a_long_value_back(fields: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError) as caught:
        parse(**fields)
    assert len(str(caught.value)) < 250


@pytest.mark.asyncio
async def test_no_message_gives_a_long_id_back() -> None:
    refused = ScriptedBackend(error=ValueError("no"))
    for body in ({"id": LONG}, {"id": LONG, "text_input": "x"}):
        response = await post_json(refused, GENERATE, body)
        assert response.status_code == 400
        assert "[request id: xxx" in response.json()["error"]
        assert len(response.content) < 500


def test_a_missing_text_is_told_in_tritons_words() -> None:
    with pytest.raises(ProtocolError) as caught:
        parse_generation({"max_tokens": 3}, ScriptedBackend())
    assert str(caught.value) == (
        "[request id: <id_unknown>] expected number of inputs between 1 and 14 but got 1 inputs "
        "for model 'script'. Got input(s) ['max_tokens'], but missing required input(s) "
        "['text_input']. Please provide all required input(s)."
    )


def test_a_text_that_is_a_number_is_tritons_internal_error() -> None:
    with pytest.raises(MalformedJSONError, match="access JSON non-string as string"):
        parse_generation({"text_input": 5}, ScriptedBackend())


@pytest.mark.asyncio
async def test_generate_answers_with_the_whole_text_in_chunks() -> None:
    response = await post_json(ScriptedBackend("one", " two"), GENERATE, {"text_input": "x"})
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    assert "content-length" not in response.headers
    assert response.content == (
        b'{"model_name":"script","model_version":"1","text_output":"one two"}'
    )


@pytest.mark.asyncio
async def test_the_clients_own_id_is_echoed() -> None:
    body = {"text_input": "x", "id": "r9"}
    assert (await post_json(ScriptedBackend("a"), GENERATE, body)).json()["id"] == "r9"
    streamed = await post_json(ScriptedBackend("a"), STREAM, body)
    assert json.loads(streamed.text.removeprefix("data: "))["id"] == "r9"


@pytest.mark.asyncio
async def test_a_stream_is_one_event_for_each_text_and_has_no_done_mark() -> None:
    backend = ScriptedBackend("one", "", " two")
    response = await post_json(backend, STREAM, {"text_input": "x"})
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["x-accel-buffering"] == "no"
    assert response.content == (
        b'data: {"model_name":"script","model_version":"1","text_output":"one"}\n\n'
        b'data: {"model_name":"script","model_version":"1","text_output":" two"}\n\n'
    )


@pytest.mark.asyncio
async def test_a_stream_of_nothing_is_empty_and_fine() -> None:
    response = await post_json(ScriptedBackend(), STREAM, {"text_input": "x"})
    assert (response.status_code, response.content) == (200, b"")


@pytest.mark.asyncio
@pytest.mark.parametrize("path", [GENERATE, STREAM])
async def test_a_request_without_text_output_of_its_own_closes_what_it_opened(path: str) -> None:
    backend = ScriptedBackend("a", "b")
    await post_json(backend, path, {"text_input": "x"})
    assert backend.num_open == 0


FAILED = Outcome("failed", phase="decode", error="the model's scores are not finite")
SHUTDOWN = Outcome("cancelled", reason=Reason.SHUTDOWN, phase="decode")
ABORTED = Outcome("cancelled", reason=Reason.ABORTED, phase="decode")
DEADLINE = Outcome("cancelled", reason=Reason.DEADLINE, phase="decode")


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("outcome", "status", "complaint"),
    [
        (FAILED, 500, "scores are not finite"),
        (SHUTDOWN, 503, "shutting down"),
        (ABORTED, 499, "cancelled: aborted"),
        (DEADLINE, 504, "time that the request was given is over"),
    ],
)
@pytest.mark.parametrize("texts", [(), ("part",)])
async def test_generate_never_presents_a_part_as_the_answer(
    outcome: Outcome, status: int, complaint: str, texts: tuple[str, ...]
) -> None:
    backend = ScriptedBackend(*texts, outcome=outcome)
    response = await post_json(backend, GENERATE, {"text_input": "x"})
    assert response.status_code == status
    assert response.json().keys() == {"error"}
    assert complaint in response.json()["error"]
    assert backend.num_open == 0


@pytest.mark.asyncio
@pytest.mark.parametrize("outcome", [ABORTED, DEADLINE])
async def test_a_request_that_was_cancelled_is_not_to_be_retried(outcome: Outcome) -> None:
    response = await post_json(ScriptedBackend(outcome=outcome), GENERATE, {"text_input": "x"})
    assert response.headers["x-should-retry"] == "false"


@pytest.mark.asyncio
@pytest.mark.parametrize("outcome", [FAILED, SHUTDOWN, ABORTED])
async def test_an_error_in_mid_stream_is_its_last_event(outcome: Outcome) -> None:
    backend = ScriptedBackend("part", outcome=outcome)
    response = await post_json(backend, STREAM, {"text_input": "x"})
    assert response.status_code == 200
    events = response.text.removesuffix("\n\n").split("\n\n")
    assert [json.loads(event.removeprefix("data: ")).keys() for event in events] == [
        {"model_name", "model_version", "text_output"},
        {"error"},
    ]


@pytest.mark.asyncio
async def test_a_stream_that_fails_at_once_has_the_status_of_the_failure() -> None:
    response = await post_json(ScriptedBackend(outcome=FAILED), STREAM, {"text_input": "x"})
    assert response.status_code == 500
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.text == f'data: {{"error":"{FAILED.error}"}}\n\n'


@pytest.mark.asyncio
@pytest.mark.parametrize("outcome", [SHUTDOWN, ABORTED])
async def test_a_stream_cancelled_before_its_head_is_a_plain_error(outcome: Outcome) -> None:
    backend = ScriptedBackend(outcome=outcome)
    response = await post_json(backend, STREAM, {"text_input": "x"})
    assert response.status_code in (503, 499)
    assert response.headers["content-type"] == "application/json"
    assert backend.num_open == 0


@pytest.mark.asyncio
@pytest.mark.parametrize("path", [GENERATE, STREAM])
@pytest.mark.parametrize(
    ("error", "status", "complaint"),
    [
        (PromptTooLongError(70, 64), 400, "70 tokens"),
        (QueueFullError(4), 503, "[request id: q3] Exceeds maximum queue size"),
        (ValueError("prompt has no tokens, send at least one"), 400, "no tokens"),
        (EngineClosedError("the engine thread died"), 500, "engine thread died"),
    ],
)
async def test_what_the_engine_refuses_is_told_with_its_status(
    path: str, error: Exception, status: int, complaint: str
) -> None:
    response = await post_json(ScriptedBackend(error=error), path, {"text_input": "x", "id": "q3"})
    assert response.status_code == status
    assert complaint in response.json()["error"]


@pytest.mark.asyncio
async def test_a_value_error_after_the_first_output_is_a_bug_and_no_clients_mistake() -> None:
    with pytest.raises(ValueError, match="a bug"):  # for the server's log
        await post_json(
            ScriptedBackend("a", error=ValueError("a bug")), GENERATE, {"text_input": "x"}
        )


@pytest.mark.asyncio
async def test_an_engine_that_dies_in_mid_stream_is_told_in_the_stream() -> None:
    backend = ScriptedBackend("a", error=EngineClosedError("the engine thread died"))
    response = await post_json(backend, STREAM, {"text_input": "x"})
    assert response.text.endswith(
        'data: {"error":"[request id: <id_unknown>] the engine thread died"}\n\n'
    )


@pytest.mark.asyncio
@pytest.mark.parametrize("path", [GENERATE, STREAM])
async def test_nothing_new_is_taken_while_draining(path: str) -> None:
    backend = ScriptedBackend("a")
    frontend = Frontend(backend)
    frontend.begin_drain()
    response = await post_json(frontend, path, {"text_input": "x"})
    assert response.status_code == 503
    assert backend.calls == []


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("path", "status", "message"),
    [
        ("/v2/models/nope/generate", 404, "Request for unknown model: 'nope' is not found"),
        ("/v2/models/nope/generate_stream", 404, "Request for unknown model: 'nope' is not found"),
        (
            "/v2/models/script/versions/5/generate",
            404,
            "Request for unknown model: 'script' version 5 is not found",
        ),
        (
            f"/v2/models/script/versions/{'9' * 5000}/generate",
            404,
            f"Request for unknown model: 'script' version {'9' * 5000} is not found",
        ),
        ("/v2/models/s%63ript/generate", 404, "Request for unknown model: 's%63ript' is not found"),
    ],
)
async def test_an_unknown_model_is_told_in_tritons_words(
    path: str, status: int, message: str
) -> None:
    response = await post_json(ScriptedBackend("a"), path, {"text_input": "x"})
    assert response.status_code == status
    assert response.json() == {"error": message}


@pytest.mark.asyncio
async def test_a_version_can_be_named() -> None:
    path = "/v2/models/script/versions/1/generate"
    assert (await post_json(ScriptedBackend("a"), path, {"text_input": "x"})).status_code == 200


@pytest.mark.asyncio
async def test_an_encoded_body_is_refused() -> None:
    response = await post_json(
        ScriptedBackend("a"), GENERATE, {"text_input": "x"}, headers={"content-encoding": "gzip"}
    )
    assert response.status_code == 400
    assert "only 'identity' is supported" in response.json()["error"]


@pytest.mark.asyncio
@pytest.mark.parametrize("announces", [True, False])
async def test_a_body_over_the_limit_is_refused(announces: bool) -> None:
    body = json.dumps({"text_input": "x" * 100}).encode()

    async def chunks() -> Any:
        for start in range(0, len(body), 10):
            yield body[start : start + 10]

    response = await post_json(
        Frontend(ScriptedBackend("a"), options=FrontendOptions(max_body_bytes=100)),
        GENERATE,
        body if announces else chunks(),
    )
    assert response.status_code == 400
    assert "exceeds the maximum allowed input size of 100 bytes" in response.json()["error"]
    assert "--max-body-bytes" in response.json()["error"]


@pytest.mark.asyncio
async def test_the_route_hands_its_connections_token_to_the_backend() -> None:
    backend = ScriptedBackend("a")
    token = CancelToken()
    token.cancel(Reason.FIN)
    seen: list[CancelToken] = []

    async def submit(request_id: str, *args: Any, cancel: CancelToken, **options: Any) -> Any:
        seen.append(cancel)
        return await ScriptedBackend("a").submit(request_id, *args, cancel=cancel, **options)

    backend.submit = submit  # type: ignore[method-assign]
    frontend = Frontend(backend)
    inner = create_app(frontend, metrics_of(frontend))

    async def app(scope: Any, receive: Any, send: Any) -> None:
        scope.setdefault("state", {})[TOKEN_KEY] = token
        await inner(scope, receive, send)

    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        await client.post(GENERATE, json={"text_input": "x"})
    assert seen == [token]
