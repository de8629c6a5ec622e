"""A client of OpenAI's endpoints leaves, the engine stops: judged by the engine's step log."""

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest

from disconnect_watch.adapters import LEAVES
from disconnect_watch.engine import Outcome
from disconnect_watch.token import Reason
from tests.support.gate import gated
from tests.support.net import wait_until
from tests.support.serve import Client, Serving, packaged_engine, serving_engine

#: Longer than any test waits for: it ends by being cancelled, or not in this test.
ENDLESS: dict[str, Any] = {"max_tokens": 100_000, "extra_body": {"ignore_eos": True}}
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "The class"}]}


@pytest.fixture
def serving() -> Iterator[Serving]:
    with serving_engine(packaged_engine()) as serving:
        yield serving
        wait_until(serving.is_idle)
        serving.engine.check_integrity()


@pytest.fixture
def client(serving: Serving) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"http://127.0.0.1:{serving.port}/v1", api_key="none", timeout=30, max_retries=0
    ) as client:
        yield client


def outcomes_of(serving: Serving, num_requests: int = 1) -> list[Outcome]:
    """How all requests to the engine ended; each once."""
    wait_until(lambda: len(serving.outcomes) == num_requests)
    wait_until(serving.is_idle)
    assert {len(outcomes) for outcomes in serving.outcomes.values()} == {1}
    return [outcome for (outcome,) in serving.outcomes.values()]


def assert_left(serving: Serving, num_requests: int = 1) -> None:
    """Every request was cancelled by the leave, and none was worked on after that."""
    for outcome in outcomes_of(serving, num_requests):
        assert outcome.kind == "cancelled"
        assert outcome.reason in LEAVES
    ended_in: dict[str, int] = {}
    for record in serving.engine.step_log:
        for request_id in (*record.aborted, *record.withheld):
            ended_in[request_id] = record.step
    assert ended_in.keys() == serving.outcomes.keys()
    for record in serving.engine.step_log:
        for key in record.scheduled:
            assert record.step <= ended_in[key.partition("#")[0]]


@pytest.mark.parametrize("num_answers", [1, 3])
def test_a_leave_in_mid_stream(serving: Serving, client: openai.OpenAI, num_answers: int) -> None:
    with client.chat.completions.create(**CHAT, **ENDLESS, n=num_answers, stream=True) as stream:
        seen = 0
        for chunk in stream:
            seen += bool(chunk.choices[0].delta.content)
            if seen == 4:
                break
    assert_left(serving)


def test_a_leave_in_mid_stream_of_several_prompts(serving: Serving, client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": "tiny", "prompt": ["The class", "A list", "An if"], "n": 2}
    with client.completions.create(**ask, **ENDLESS, stream=True) as stream:
        indices = set()
        for chunk in stream:
            indices.add(chunk.choices[0].index)
            if len(indices) == 6:
                break
    assert_left(serving, 3)


def test_the_head_with_the_id_comes_before_the_first_token(serving: Serving) -> None:
    with gated(serving.engine) as gate, httpx.Client(timeout=30) as http:
        url = f"http://127.0.0.1:{serving.port}/v1/chat/completions"
        body = {**CHAT, "max_tokens": 100_000, "ignore_eos": True, "stream": True}
        with http.stream("POST", url, json=body) as response:
            assert response.status_code == 200
            request_id = response.headers["x-request-id"]
            assert len(request_id) == 32
            gate.wait()
            assert serving.backend.stats().num_generated_tokens == 0
        wait_until(lambda: sum(serving.watcher.stats().num_signals.values()) == 1)
        gate.open()
        assert_left(serving)
    assert list(serving.outcomes) == [request_id]
    (outcome,) = outcomes_of(serving)
    assert outcome.num_generated_tokens == 0


@pytest.mark.parametrize("num_answers", [1, 2])
def test_an_async_client_that_is_cancelled_before_its_answer(
    serving: Serving, num_answers: int
) -> None:
    async def main() -> None:
        async with openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{serving.port}/v1", api_key="none", max_retries=0
        ) as client:
            call = asyncio.create_task(
                client.chat.completions.create(**CHAT, **ENDLESS, n=num_answers)
            )
            await asyncio.to_thread(
                wait_until, lambda: serving.backend.stats().num_generated_tokens >= 3
            )
            call.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await call

    asyncio.run(main())
    assert_left(serving)


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_a_client_with_a_time_out_leaves(
    serving: Serving, client: openai.OpenAI, path: str
) -> None:
    impatient = client.with_options(timeout=0.5)
    ask: dict[str, Callable[[], object]] = {
        "completions": lambda: impatient.completions.create(model="tiny", prompt="x", **ENDLESS),
        "chat/completions": lambda: impatient.chat.completions.create(**CHAT, **ENDLESS),
    }
    with gated(serving.engine, after_steps=2) as gate:
        caught: list[BaseException] = []

        def call() -> None:
            try:
                ask[path]()
            except openai.APITimeoutError as error:
                caught.append(error)

        thread = threading.Thread(target=call)
        thread.start()
        gate.wait()
        thread.join(20)
        wait_until(lambda: sum(serving.watcher.stats().num_signals.values()) == 1)
        gate.open()
        assert_left(serving)
    assert len(caught) == 1


def test_a_leave_while_it_waits_never_takes_a_slot() -> None:
    engine = packaged_engine(max_num_seqs=1)
    body = {**CHAT, "max_tokens": 100_000, "ignore_eos": True, "stream": True}
    with serving_engine(engine) as serving:
        with (
            gated(engine, after_steps=2) as gate,
            Client(serving.port) as holder,
            Client(serving.port) as waiting,
        ):
            holder.post("/v1/chat/completions", body)
            holder.read_until(b'"content":"')
            waiting.post("/v1/chat/completions", body)
            wait_until(lambda: serving.watcher.stats().num_armed == 2)
            # It is admitted between two steps; and the holder's context comes to an end, too.
            while serving.backend.stats().num_waiting == 0:
                gate.pass_steps(1)
                gate.wait()
            head = waiting.read_until(b"\r\n\r\n")
            waiting.sock.close()
            wait_until(lambda: sum(serving.watcher.stats().num_signals.values()) == 1)
            gate.open()
            wait_until(lambda: len(serving.outcomes) == 1)
            ((request_id, (outcome,)),) = serving.outcomes.items()
            assert request_id.encode() in head
            assert (outcome.kind, outcome.phase) == ("cancelled", "waiting")
            assert not any(request_id in record.scheduled for record in engine.step_log)
        wait_until(serving.is_idle)


def test_a_shutdown_ends_a_stream_with_an_error_and_no_done() -> None:
    body = {**CHAT, "max_tokens": 100_000, "ignore_eos": True, "stream": True}
    with serving_engine(packaged_engine(), grace=0.0) as serving, Client(serving.port) as client:
        client.post("/v1/chat/completions", body)
        client.read_until(b'"content":"')
        serving.http.server.should_exit = True
        rest = client.read_rest()
    assert b"[DONE]" not in rest
    assert rest.endswith(b"0\r\n\r\n")
    last = rest.split(b"data: ")[-1].split(b"\n\n")[0]
    assert json.loads(last)["error"]["type"] == "overloaded_error"


def test_the_time_that_a_client_gives_is_a_deadline(
    serving: Serving, client: openai.OpenAI
) -> None:
    body = {"ignore_eos": True, "timeout": 0.2}
    with pytest.raises(openai.APIStatusError) as caught:
        client.chat.completions.create(**CHAT, max_tokens=100_000, extra_body=body)
    assert caught.value.status_code == 504
    assert caught.value.response.headers["x-should-retry"] == "false"
    with pytest.raises(openai.APIError, match="time that the request was given is over"):
        list(
            client.chat.completions.create(**CHAT, max_tokens=100_000, extra_body=body, stream=True)
        )
    assert [outcome.reason for outcome in outcomes_of(serving, 2)] == ["deadline", "deadline"]
    assert serving.frontend.ledger.signals == {Reason.DEADLINE: 2}
