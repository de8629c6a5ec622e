"""A request id in every head, and one log line for every request."""

import asyncio
import logging
from typing import Any

import httpx
import pytest

from disconnect_watch.adapters import TOKEN_KEY
from disconnect_watch.engine import Outcome
from disconnect_watch.keys import Caller, KeyRing, Role, digest_of
from disconnect_watch.server import Frontend, create_app
from disconnect_watch.server.access import AccessLog, RequestRecord
from disconnect_watch.server.guard import Gatekeeper
from disconnect_watch.token import CancelToken, Reason
from tests.support.backends import ScriptedBackend
from tests.support.serve import metrics_of, post_json, request_app

GENERATE = "/v2/models/script/generate"


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "disconnect_watch.access")
    return caplog


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/v2/health/live"), ("GET", "/foo"), ("PUT", "/v2"), ("POST", GENERATE)],
)
async def test_every_head_names_its_request(method: str, path: str) -> None:
    ids = {
        (await request_app(ScriptedBackend(), method, path)).headers["x-request-id"]
        for _ in range(3)
    }
    assert len(ids) == 3
    assert all(len(bytes.fromhex(request_id)) == 16 for request_id in ids)


@pytest.mark.asyncio
async def test_a_clients_id_in_the_head_is_not_taken_over() -> None:
    response = await request_app(ScriptedBackend(), "GET", "/v2", headers={"X-Request-Id": "mine"})
    assert response.headers["x-request-id"] != "mine"


@pytest.mark.asyncio
async def test_the_line_tells_what_the_engine_did(log: pytest.LogCaptureFixture) -> None:
    outcome = Outcome(
        "finished", finish_reason="length", num_generated_tokens=3, block_ns=1_500_000_000
    )
    response = await post_json(ScriptedBackend("a", outcome=outcome), GENERATE, {"text_input": "x"})
    (line,) = log.records
    assert line.getMessage() == f"POST {GENERATE}"
    fields = vars(line)
    assert fields["request_id"] == response.headers["x-request-id"]
    assert fields["status"] == 200
    assert fields["outcome"] == "finished"
    assert fields["reason"] == "length"
    assert fields["tokens"] == 3
    assert fields["wasted"] == 0
    assert fields["ms"] > 0
    assert fields["block_seconds"] == 1.5
    assert "owner" not in fields
    hops = fields["hops_ms"]
    assert list(hops) == ["receive", "admit", "work", "answer"]  # the script has no token
    assert all(ms >= 0 for ms in hops.values())
    assert sum(hops.values()) == pytest.approx(fields["ms"], abs=0.01)


@pytest.mark.asyncio
async def test_the_line_names_the_keys_owner_and_not_the_key(log: pytest.LogCaptureFixture) -> None:
    keys = KeyRing([(Caller("alice", Role.USER), digest_of("alices-key"))])
    frontend = Frontend(ScriptedBackend("a"))
    app = create_app(frontend, metrics_of(frontend), gatekeeper=Gatekeeper(keys))
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://test"
    ) as client:
        for key in ("alices-key", "not-hers"):
            headers = {"Authorization": f"Bearer {key}"}
            await client.post(GENERATE, json={"text_input": "x"}, headers=headers)
    known, unknown = map(vars, log.records)
    assert (known["owner"], known["status"]) == ("alice", 200)
    assert ("owner" in unknown, unknown["status"]) == (False, 401)
    assert not any("key" in str(value) for line in (known, unknown) for value in line.values())


def test_no_line_is_made_that_nobody_reads(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: RequestRecord) -> dict[str, object]:
        raise AssertionError("nobody reads it")

    monkeypatch.setattr(RequestRecord, "fields", fail)
    with caplog.at_level(logging.WARNING, "disconnect_watch.access"):
        asyncio.run(request_app(ScriptedBackend(), "GET", "/v2/health/live"))


async def serve_leaver(backend: ScriptedBackend, path: str) -> list[dict[str, Any]]:
    """One request whose client has left, as our protocol would pass it; returns what was sent."""
    token = CancelToken()
    token.cancel(Reason.FIN)
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b'{"text_input":"x"}', "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    frontend = Frontend(backend)
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "path": path,
        "headers": [],
        "query_string": b"",
        "state": {TOKEN_KEY: token},
    }
    await create_app(frontend, metrics_of(frontend))(scope, receive, send)
    return sent


LEFT = Outcome(
    "cancelled",
    reason=Reason.FIN,
    phase="decode",
    num_generated_tokens=5,
    num_wasted_tokens=1,
)


@pytest.mark.asyncio
@pytest.mark.parametrize("route", ["generate", "generate_stream"])
async def test_who_left_before_the_head_is_sent_nothing_and_logged_as_499(
    log: pytest.LogCaptureFixture, route: str
) -> None:
    sent = await serve_leaver(ScriptedBackend(outcome=LEFT), f"/v2/models/script/{route}")
    assert sent == []
    (line,) = log.records
    fields = vars(line)
    assert (fields["status"], fields["outcome"], fields["reason"]) == (499, "cancelled", "fin")
    assert (fields["phase"], fields["tokens"], fields["wasted"]) == ("decode", 5, 1)


@pytest.mark.asyncio
async def test_an_answer_that_was_ready_too_late_is_logged_as_499(
    log: pytest.LogCaptureFixture,
) -> None:
    await serve_leaver(ScriptedBackend("a"), GENERATE)
    (line,) = log.records
    assert (vars(line)["status"], vars(line)["outcome"]) == (499, "finished")


@pytest.mark.asyncio
async def test_a_stream_cut_short_has_no_last_chunk() -> None:
    sent = await serve_leaver(
        ScriptedBackend("part", outcome=LEFT), "/v2/models/script/generate_stream"
    )
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    assert sent[-1]["more_body"] is True


@pytest.mark.asyncio
async def test_a_bug_is_500_without_its_text(log: pytest.LogCaptureFixture) -> None:
    backend = ScriptedBackend("a", error=RuntimeError("secret"))
    with pytest.raises(RuntimeError):  # for the server's log
        await post_json(backend, GENERATE, {"text_input": "x"})
    assert vars(log.records[-1])["status"] == 500


@pytest.mark.asyncio
@pytest.mark.parametrize(("reads", "closes"), [(True, False), (False, True)])
async def test_an_answer_instead_of_a_continue_closes_the_connection(
    reads: bool, closes: bool
) -> None:
    """The client may leave out the body then, and nobody knows where its next request begins."""
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if reads:
            await receive()
        await send({"type": "http.response.start", "status": 400, "headers": []})

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/",
        "headers": [(b"expect", b"100-continue")],
    }
    await AccessLog(app)(scope, receive, send)
    assert ((b"connection", b"close") in sent[0]["headers"]) is closes


@pytest.mark.asyncio
async def test_who_leaves_with_the_whole_answer_is_no_reason(
    log: pytest.LogCaptureFixture,
) -> None:
    # Symptom: a healthy probe logged with "reason": "fin", since its answer is all head.
    token = CancelToken()

    async def receive() -> Any:
        raise AssertionError("nobody reads the body")

    async def send(message: Any) -> None:
        token.cancel(Reason.FIN)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    state = {TOKEN_KEY: token}
    scope = {"type": "http", "method": "GET", "path": "/", "headers": [], "state": state}
    await AccessLog(app)(scope, receive, send)
    (line,) = log.records
    assert line.__dict__["status"] == 200
    assert "reason" not in line.__dict__


def test_the_time_that_is_left_counts_from_the_requests_beginning() -> None:
    record = RequestRecord(CancelToken())
    assert record.time_left(None) is None
    record._started_ns -= 5_000_000_000
    left = record.time_left(7.0)
    assert left is not None
    assert 0 < left <= 2
    assert record.time_left(3.0) == 0


def test_what_goes_on_without_its_client_has_no_more_time_than_that_had() -> None:
    record = RequestRecord(CancelToken(), timeout=7.0)
    record._started_ns -= 5_000_000_000
    detached = record.detached()
    left = detached.time_left(None)
    assert left is not None
    assert left <= 2
    record.token.cancel(Reason.FIN)
    assert not detached.token.cancelled
