"""Whose a response is, and how it is cancelled by those who may: by id, by time, by force."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from disconnect_watch.keys import Caller, KeyRing, Role, digest_of
from disconnect_watch.server.openai.responses.sqlite_store import SqliteStore
from disconnect_watch.server.openai.responses.store import StoreLimits
from tests.support.gate import gated
from tests.support.net import PATIENCE, wait_until
from tests.support.serve import Client, Serving, packaged_engine, serving_engine

KEYS = KeyRing(
    [
        (Caller(name, role), digest_of(f"{name}-key"))
        for name, role in (("alice", Role.USER), ("bob", Role.USER), ("root", Role.ADMIN))
    ]
)
BODY: dict[str, Any] = {"model": "tiny", "input": "The class statement", "ignore_eos": True}
ENDLESS: dict[str, Any] = {**BODY, "max_output_tokens": 100_000}
SHORT: dict[str, Any] = {**BODY, "max_output_tokens": 3}


@pytest.fixture(scope="module")
def shared() -> Iterator[Serving]:
    with serving_engine(packaged_engine(), keys=KEYS) as serving:
        yield serving


@pytest.fixture
def serving(shared: Serving) -> Iterator[Serving]:
    shared.outcomes.clear()
    yield shared
    wait_until(shared.is_idle)
    wait_until(lambda: shared.frontend.responses.num_running == 0)
    assert shared.frontend.ledger.live() == []


@pytest.fixture
def http(serving: Serving) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://127.0.0.1:{serving.port}", timeout=40) as http:
        yield http


def call(
    http: httpx.Client, method: str, path: str, body: Any = None, *, key: str = "alice", **more: str
) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {key}-key"} | more
    answer = http.request(method, path, json=body, headers=headers)
    is_json = answer.headers["content-type"] == "application/json"
    return answer.status_code, answer.json() if is_json else answer.text


def begin(http: httpx.Client, body: dict[str, Any] = ENDLESS, *, name: str = "") -> str:
    more = {"X-Request-Id": name} if name else {}
    status, made = call(http, "POST", "/v1/responses", body | {"background": True}, **more)
    assert (status, made["status"]) == (200, "queued")
    return str(made["id"])


def status_of(http: httpx.Client, response_id: str, *, key: str = "alice") -> str:
    return str(call(http, "GET", f"/v1/responses/{response_id}", key=key)[1]["status"])


@pytest.mark.parametrize("does_run", [False, True])
def test_anothers_response_is_as_unknown_as_one_that_never_was(
    http: httpx.Client, does_run: bool
) -> None:
    response_id = begin(http, ENDLESS if does_run else SHORT)
    if not does_run:
        wait_until(lambda: status_of(http, response_id) == "incomplete")
    path = f"/v1/responses/{response_id}"
    for method, of_it in (
        ("GET", path),
        ("GET", f"{path}?stream=true"),
        ("GET", f"{path}/input_items"),
        ("POST", f"{path}/cancel"),
        ("DELETE", path),
        ("POST", f"/v1/requests/{response_id}/cancel"),
    ):
        never = of_it.replace(response_id, "resp_" + "0" * 32)
        status, answer = call(http, method, of_it, key="bob")
        _, other = call(http, method, never, key="bob")
        assert status == 404
        told = answer["error"]["message"].replace(response_id, "resp_" + "0" * 32)
        assert told == other["error"]["message"]
    body = SHORT | {"previous_response_id": response_id}
    status, answer = call(http, "POST", "/v1/responses", body, key="bob")
    assert (status, answer["error"]["code"]) == (400, "previous_response_not_found")
    assert "is known" in answer["error"]["message"]
    # It is as it was, for its owner and for the admin.
    expected = ("queued", "in_progress") if does_run else ("incomplete",)
    assert status_of(http, response_id) in expected
    assert status_of(http, response_id, key="root") in expected
    assert call(http, "DELETE", path, key="root")[0] == 200
    assert call(http, "GET", path)[0] == 404


def test_without_a_key_nobody_comes_near(http: httpx.Client) -> None:
    response_id = begin(http, SHORT)
    for method, path in (
        ("POST", "/v1/responses"),
        ("GET", f"/v1/responses/{response_id}"),
        ("DELETE", f"/v1/responses/{response_id}"),
        ("POST", f"/v1/responses/{response_id}/cancel"),
        ("GET", f"/v1/responses/{response_id}/input_items"),
    ):
        assert http.request(method, path).status_code == 401
    wait_until(lambda: status_of(http, response_id) == "incomplete")


@pytest.mark.parametrize("by", ["response", "request", "name", "list", "sglang", "vllm", "admin"])
def test_the_abort_api_reaches_what_no_client_waits_for(
    serving: Serving, http: httpx.Client, by: str
) -> None:
    response_id = begin(http, name="mine" if by == "name" else "")
    wait_until(lambda: status_of(http, response_id) == "in_progress")
    request_id = response_id.removeprefix("resp_")
    path, body, key = {
        "response": (f"/v1/requests/{response_id}/cancel", None, "alice"),
        "request": (f"/v1/requests/{request_id}/cancel", None, "alice"),
        "name": ("/v1/requests/mine/cancel", None, "alice"),
        "list": ("/v1/requests/cancel", {"request_ids": [response_id]}, "alice"),
        "sglang": ("/abort_request", {"rid": response_id}, "alice"),
        "vllm": ("/abort_requests", {"request_ids": [response_id]}, "alice"),
        "admin": ("/v1/admin/cancel_all", {"confirm": True}, "root"),
    }[by]
    status, answer = call(http, "POST", path, body, key=key)
    (result,) = answer.get("results", [answer])
    assert serving.engine.block_owners == set()
    assert (status, result["status"], result["phase"]) == (200, "cancelled", "decode")
    assert result["blocks_freed"] > 0
    wait_until(lambda: status_of(http, response_id) == "cancelled")
    wait_until(lambda: serving.frontend.ledger.live() == [])
    _, again = call(http, "POST", f"/v1/requests/{response_id}/cancel")
    assert again["status"] == "already_cancelled"
    ((outcome,),) = serving.outcomes.values()
    assert (outcome.kind, outcome.reason) == ("cancelled", "aborted")


def test_a_stream_that_is_cancelled_by_its_id_ends_with_an_error_and_is_kept(
    serving: Serving, http: httpx.Client
) -> None:
    with Client(serving.port) as client:
        client.post("/v1/responses", ENDLESS | {"stream": True}, Authorization="Bearer alice-key")
        head = client.read_until(b"\r\n\r\n").decode().lower()
        request_id = head.partition("x-request-id: ")[2].split("\r\n")[0]
        client.read_until(b"delta")
        response_id = f"resp_{request_id}"
        _, result = call(http, "POST", f"/v1/requests/{response_id}/cancel")
        assert result["status"] == "cancelled"
        last = client.read_until(b"0\r\n\r\n").split(b"data: ")[-1].split(b"\n\n")[0]
        assert json.loads(last)["error"]["code"] == "request_cancelled"
    _, kept = call(http, "GET", f"/v1/responses/{response_id}")
    assert kept["status"] == "cancelled"
    assert kept["output"][0]["status"] == "incomplete"


def test_a_whole_answer_that_is_cancelled_by_its_id_is_499_and_not_kept(
    serving: Serving, http: httpx.Client
) -> None:
    with Client(serving.port) as client:
        client.post("/v1/responses", ENDLESS, Authorization="Bearer alice-key", X_Request_Id="x")
        wait_until(lambda: serving.backend.stats().num_running == 1)
        assert call(http, "POST", "/v1/requests/x/cancel")[1]["status"] == "cancelled"
        status, headers, _ = client.read_response()
    assert (status, headers["x-should-retry"]) == (499, "false")
    assert call(http, "GET", f"/v1/responses/resp_{headers['x-request-id']}")[0] == 404


def test_a_cancel_that_comes_before_its_engine_has_it_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Symptom: what goes on without its client forgot that it had been cancelled."""
    with (
        serving_engine(packaged_engine(), keys=KEYS) as serving,
        httpx.Client(base_url=f"http://127.0.0.1:{serving.port}", timeout=40) as http,
        httpx.Client(base_url=http.base_url, timeout=40) as other,
    ):
        tokenize = serving.backend.tokenize

        def cancelling(text: str, **options: Any) -> list[int]:
            # In a thread: the loop answers meanwhile.
            status, result = call(other, "POST", "/v1/requests/early/cancel", {"wait": 0})
            assert (status, result["status"]) == (202, "pending")
            return tokenize(text, **options)

        monkeypatch.setattr(serving.backend, "tokenize", cancelling)
        body = ENDLESS | {"input": "word " * 2000}
        response_id = begin(http, body, name="early")
        wait_until(lambda: status_of(http, response_id) == "cancelled")
        ((outcome,),) = serving.outcomes.values()
        assert (outcome.kind, outcome.num_generated_tokens) == ("cancelled", 0)


def test_time_that_is_over_is_a_failure_that_says_so(http: httpx.Client) -> None:
    late = ENDLESS | {"timeout": 0.2}
    response_id = begin(http, late)
    wait_until(lambda: status_of(http, response_id) == "failed")
    _, kept = call(http, "GET", f"/v1/responses/{response_id}")
    assert (kept["error"]["code"], kept["error"]["type"]) == ("server_error", "timeout")
    assert kept["completed_at"] is None
    status, _ = call(http, "POST", "/v1/responses", late)
    assert status == 504
    _, streamed = call(http, "POST", "/v1/responses", late | {"stream": True})
    *_, last = streamed.strip().split("\n\n")
    assert last.startswith("event: response.failed\n")
    told = json.loads(last.partition("data: ")[2])["response"]
    assert told["error"]["type"] == "timeout"
    assert call(http, "GET", f"/v1/responses/{told['id']}")[1] == told


def test_what_the_queue_has_no_room_for_is_refused_and_not_kept() -> None:
    engine = packaged_engine(max_num_seqs=1, max_queue=1)
    store = SqliteStore()
    with serving_engine(engine, store=store) as serving:
        with httpx.Client(base_url=f"http://127.0.0.1:{serving.port}", timeout=40) as http:
            first = begin(http)
            wait_until(lambda: serving.backend.stats().num_running == 1)
            second = begin(http)
            refused = ENDLESS | {"background": True}
            for body in (refused, refused | {"stream": True}, ENDLESS):
                assert call(http, "POST", "/v1/responses", body)[0] == 503
            stats = asyncio.run_coroutine_threadsafe(store.stats(), serving.http.loop)
            assert stats.result(PATIENCE).num_responses == 2
            for response_id in (second, first):
                call(http, "POST", f"/v1/responses/{response_id}/cancel")
                assert status_of(http, response_id) == "cancelled"
        wait_until(serving.is_idle)
        assert len(serving.outcomes) == 2


def test_what_the_store_has_no_room_for_is_refused_in_two_ways() -> None:
    store = SqliteStore(limits=StoreLimits(max_count=1, max_bytes=3000))
    with serving_engine(packaged_engine(), store=store) as serving:
        url = f"http://127.0.0.1:{serving.port}"
        with httpx.Client(base_url=url, timeout=40) as http:
            large = SHORT | {"input": "x" * 3000}
            status, answer = call(http, "POST", "/v1/responses", large)
            assert (status, answer["error"]["param"]) == (400, "store")
            assert call(http, "POST", "/v1/responses", large | {"store": False})[0] == 200
            kept = begin(http, ENDLESS)
            status, answer = call(http, "POST", "/v1/responses", SHORT)
            assert (status, "no room" in answer["error"]["message"]) == (503, True)
            call(http, "POST", f"/v1/responses/{kept}/cancel")
            # What has ended makes room.
            status, made = call(http, "POST", "/v1/responses", SHORT)
            assert status == 200
            assert call(http, "GET", f"/v1/responses/{kept}")[0] == 404
            assert call(http, "GET", f"/v1/responses/{made['id']}")[0] == 200
        wait_until(serving.is_idle)


def test_cancels_are_limited_as_those_of_the_abort_api(
    serving: Serving, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    response_id = begin(http, SHORT)
    wait_until(lambda: status_of(http, response_id) == "incomplete")
    limit = serving.frontend.abort_limit
    monkeypatch.setattr(serving.frontend, "abort_limit", type(limit)(0.001, burst=2.0))
    path = f"/v1/responses/{response_id}"
    assert [call(http, "POST", f"{path}/cancel")[0] for _ in range(3)] == [200, 200, 429]
    # A deletion cancels, too.
    assert call(http, "DELETE", path)[0] == 429
    assert call(http, "GET", path)[0] == 200


def test_the_sdk_does_not_begin_again_what_was_cancelled(
    serving: Serving, http: httpx.Client
) -> None:
    with (
        openai.OpenAI(
            base_url=f"http://127.0.0.1:{serving.port}/v1", api_key="alice-key", max_retries=2
        ) as client,
        gated(serving.engine) as gate,
        Client(serving.port) as aborting,
    ):
        aborting.post("/v1/responses", ENDLESS, Authorization="Bearer alice-key", X_Request_Id="y")
        gate.wait()
        gate.open()
        assert call(http, "POST", "/v1/requests/y/cancel")[1]["status"] == "cancelled"
        assert aborting.read_response()[0] == 499
        with pytest.raises(openai.APIStatusError) as caught:
            client.responses.create(
                model="tiny", input="x", extra_body={"timeout": 0.05, "ignore_eos": True}
            )
        assert caught.value.status_code == 504
    assert len(serving.outcomes) == 2
