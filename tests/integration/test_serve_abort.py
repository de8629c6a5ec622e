"""Requests that are cancelled by their id: by whom, with what effect, and what is said of it."""

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from disconnect_watch.engine import Outcome
from disconnect_watch.keys import Caller, KeyRing, Role, digest_of
from disconnect_watch.server.rate import RateLimit
from disconnect_watch.token import Reason
from tests.support.gate import gated
from tests.support.net import wait_until
from tests.support.serve import Client, Serving, packaged_engine, request_bytes, serving_engine

KEYS = KeyRing(
    [
        (Caller(name, role), digest_of(f"{name}-key"))
        for name, role in (
            ("alice", Role.USER),
            ("bob", Role.USER),
            ("proxy", Role.SERVICE),
            ("root", Role.ADMIN),
        )
    ]
)
ENDLESS = {"max_tokens": 100_000, "ignore_eos": True}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "The class"}], **ENDLESS}
ASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "generate": ("/v2/models/tiny/generate", {"text_input": "x", **ENDLESS}),
    "generate_stream": ("/v2/models/tiny/generate_stream", {"text_input": "x", **ENDLESS}),
    "completions": ("/v1/completions", {"model": "tiny", "prompt": "x", **ENDLESS}),
    "prompts": ("/v1/completions", {"model": "tiny", "prompt": ["x", "y"], "n": 2, **ENDLESS}),
    "chat": ("/v1/chat/completions", CHAT),
    "chat_stream": ("/v1/chat/completions", {**CHAT, "stream": True, "n": 2}),
}
asks = pytest.mark.parametrize("ask", ASKS)


@pytest.fixture(scope="module")
def shared() -> Iterator[Serving]:
    with serving_engine(packaged_engine(), keys=KEYS) as serving:
        yield serving


@pytest.fixture
def serving(shared: Serving) -> Iterator[Serving]:
    shared.outcomes.clear()
    yield shared
    wait_until(shared.is_idle)
    shared.engine.check_integrity()


def send(client: Client, path: str, body: Any, key: str = "alice", **headers: str) -> None:
    client.post(path, body, Authorization=f"Bearer {key}-key", **headers)


def call(
    serving: Serving, path: str, body: Any = b"", *, key: str = "alice", method: str = "POST"
) -> tuple[int, dict[str, str], Any]:
    """One request of its own, and the answer to it."""
    with Client(serving.port) as client:
        raw = request_bytes(path, body, Authorization=f"Bearer {key}-key")
        client.sock.sendall(method.encode() + raw.removeprefix(b"POST"))
        status, headers, answer = client.read_response()
    return status, headers, json.loads(answer)


def cancel(serving: Serving, name: str, body: Any = b"", *, key: str = "alice") -> tuple[int, Any]:
    status, _, answer = call(serving, f"/v1/requests/{name}/cancel", body, key=key)
    return status, answer


def wait_generated(serving: Serving, num_tokens: int = 3) -> None:
    before = serving.backend.stats().num_generated_tokens
    wait_until(lambda: serving.backend.stats().num_generated_tokens >= before + num_tokens)


def outcomes_of(serving: Serving, num_requests: int = 1) -> list[Outcome]:
    wait_until(lambda: len(serving.outcomes) == num_requests)
    assert {len(outcomes) for outcomes in serving.outcomes.values()} == {1}
    return [outcome for (outcome,) in serving.outcomes.values()]


@asks
def test_a_cancel_is_answered_when_its_blocks_are_free(serving: Serving, ask: str) -> None:
    path, body = ASKS[ask]
    with Client(serving.port) as client:
        send(client, path, body, X_Request_Id="mine")
        wait_generated(serving)
        status, result = cancel(serving, "mine")
        # Nothing was waited for here: it has come true before the answer was written.
        assert serving.engine.block_owners == set()
        assert serving.backend.stats().num_running == 0
        assert status == 200
        assert result["status"] == "cancelled"
        assert result["phase"] == "decode"
        assert result["blocks_freed"] > 0
        assert result["latency_ms"] > 0
        if ask.endswith("stream"):
            rest = client.read_until(b"0\r\n\r\n")
            assert b"[DONE]" not in rest
            last = json.loads(rest.split(b"data: ")[-1].split(b"\n\n")[0])
            assert "cancelled" in str(last["error"])
        else:
            status, headers, answer = client.read_response()
            assert (status, headers["x-should-retry"]) == (499, "false")
            assert "cancelled" in str(json.loads(answer)["error"])
    for outcome in outcomes_of(serving, 2 if ask == "prompts" else 1):
        assert (outcome.kind, outcome.reason) == ("cancelled", Reason.ABORTED)


def test_prompts_that_are_on_their_way_are_all_cancelled(serving: Serving) -> None:
    ledger = serving.frontend.ledger
    with (
        gated(serving.engine) as gate,
        Client(serving.port) as client,
        Client(serving.port) as other,
        Client(serving.port) as holder,
    ):
        send(holder, *ASKS["completions"])
        gate.wait()
        send(client, *ASKS["prompts"], X_Request_Id="parts")
        # They are queued between two steps, and the engine is held in one.
        wait_until(lambda: any(record.client_id == "parts" for record in ledger.live()))
        (record,) = (record for record in ledger.live() if record.client_id == "parts")
        wait_until(lambda: serving.backend._thread._commands)
        send(other, "/v1/requests/parts/cancel", {"wait": 60})
        wait_until(lambda: record.token.cancelled)
        gate.open()
        status, _, answer = other.read_response()
        assert (status, json.loads(answer)["status"]) == (200, "cancelled")
        assert client.read_response()[0] == 499
    outcomes = outcomes_of(serving, 3)
    assert sum(outcome.phase == "waiting" for outcome in outcomes) == 2


def test_the_id_in_the_head_is_enough(serving: Serving) -> None:
    with Client(serving.port) as client:
        send(client, *ASKS["chat_stream"])
        head = client.read_until(b"\r\n\r\n").decode().lower()
        request_id = head.partition("x-request-id: ")[2].split("\r\n")[0]
        status, _, result = call(serving, f"/v1/requests/{request_id}", method="DELETE")
        assert (status, result["status"]) == (200, "cancelled")
        assert result["request_id"] == request_id
    assert list(serving.outcomes) == [request_id]


def test_a_request_that_waits_is_cancelled_without_ever_running() -> None:
    engine = packaged_engine(max_num_seqs=1)
    with serving_engine(engine, keys=KEYS) as serving:
        with Client(serving.port) as holder, Client(serving.port) as waiting:
            send(holder, *ASKS["generate_stream"])
            holder.read_until(b"\n\n")
            send(waiting, *ASKS["generate"], X_Request_Id="waits")
            wait_until(lambda: serving.backend.stats().num_waiting == 1)
            status, result = cancel(serving, "waits")
            assert (status, result["status"], result["phase"]) == (200, "cancelled", "waiting")
            assert result["blocks_freed"] == 0
            assert waiting.read_response()[0] == 499
            ((request_id, _),) = serving.outcomes.items()
            assert not any(request_id in record.scheduled for record in engine.step_log)
        wait_until(serving.is_idle)


def test_an_effect_that_takes_longer_is_pending_and_then_there(serving: Serving) -> None:
    with Client(serving.port) as client:
        with gated(serving.engine) as gate:
            send(client, *ASKS["generate"], X_Request_Id="held")
            gate.wait()
            status, result = cancel(serving, "held", {"wait": 0})
            assert (status, result["status"]) == (202, "pending")
            gate.open()
        assert client.read_response()[0] == 499
    (outcome,) = outcomes_of(serving)
    assert (outcome.kind, outcome.num_generated_tokens) == ("cancelled", 0)
    assert cancel(serving, "held")[1]["status"] == "already_cancelled"


def test_what_is_cancelled_while_it_is_sent_never_reaches_the_engine(serving: Serving) -> None:
    raw = request_bytes(
        *ASKS["generate"], Authorization="Bearer alice-key", X_Request_Id="half-sent"
    )
    num_requests = serving.backend.stats().num_requests
    with Client(serving.port) as client:
        client.sock.sendall(raw[:-10])
        wait_until(lambda: len(serving.frontend.ledger.live()) == 1)
        assert cancel(serving, "half-sent", {"wait": 0})[1]["status"] == "pending"
        client.sock.sendall(raw[-10:])
        assert client.read_response()[0] == 499
    assert serving.backend.stats().num_requests <= num_requests + 1
    assert not any(
        request_id in record.scheduled
        for record in serving.engine.step_log
        for request_id in serving.outcomes
    )


def test_what_has_finished_is_not_said_to_be_cancelled(serving: Serving) -> None:
    with Client(serving.port) as client:
        send(client, "/v1/completions", {"model": "tiny", "prompt": "x", "max_tokens": 1})
        status, headers, _ = client.read_response()
        assert status == 200
    # Its handler has yet to return where the answer was quicker.
    wait_until(lambda: serving.frontend.ledger.live() == [])
    for _ in range(2):
        status, result = cancel(serving, headers["x-request-id"])
        assert (status, result["status"], result["phase"]) == (200, "already_finished", None)
    assert outcomes_of(serving)[0].kind == "finished"


def test_a_client_that_does_not_read_delays_no_answer() -> None:
    """Its handler waits in ``send``, and has read neither the rest nor the outcome."""
    body = {**CHAT, "stream": True, "logprobs": True, "top_logprobs": 20, "max_tokens": 200}
    with (
        serving_engine(packaged_engine(), keys=KEYS, send_buffer=4096) as serving,
        socket.socket() as sock,
    ):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", serving.port))
        headers = {"Authorization": "Bearer alice-key", "X_Request_Id": "slow"}
        sock.sendall(request_bytes("/v1/chat/completions", body, **headers))
        wait_until(lambda: serving.outcomes, 30)
        (record,) = serving.frontend.ledger.live()
        assert record.works
        status, result = cancel(serving, "slow")
        assert (status, result["status"]) == (200, "already_finished")


def test_a_cancel_twice_is_told_to_one_and_harmless(serving: Serving) -> None:
    with Client(serving.port) as client:
        send(client, *ASKS["chat"], X_Request_Id="once")
        wait_generated(serving)
        body = {"request_ids": ["once", "once", "never"]}
        _, _, answer = call(serving, "/v1/requests/cancel", body)
        assert [each["status"] for each in answer["results"]] == [
            "cancelled",
            "cancelled",  # one cancel, told in both places where it was asked for
            "not_found",
        ]
        assert cancel(serving, "once")[1]["status"] == "already_cancelled"
        client.read_response()
    outcomes_of(serving)


def test_a_cancel_behind_a_leave_is_not_the_cause(serving: Serving) -> None:
    with Client(serving.port) as client:
        with gated(serving.engine, after_steps=3) as gate:
            send(client, *ASKS["chat"], X_Request_Id="left")
            gate.wait()
            client.sock.close()
            wait_until(lambda: sum(serving.watcher.stats().num_signals.values()) > 0)
            wait_until(lambda: serving.frontend.stats().num_unacked == 1)
            assert cancel(serving, "left", {"wait": 0})[0] == 202
            gate.open()
        assert outcomes_of(serving)[0].reason in (Reason.FIN, Reason.RESET)
    wait_until(lambda: serving.frontend.ledger.live() == [])
    assert cancel(serving, "left")[1]["status"] == "already_cancelled"


def test_anothers_request_is_as_unknown_as_none(serving: Serving) -> None:
    with Client(serving.port) as client:
        send(client, *ASKS["chat_stream"], X_Request_Id="alices")
        head = client.read_until(b"\r\n\r\n").decode().lower()
        request_id = head.partition("x-request-id: ")[2].split("\r\n")[0]
        wait_generated(serving)
        for key in ("bob", "proxy"):
            for name in ("alices", request_id, request_id[:8], "", "%2e", "*", request_id.upper()):
                status, _, answer = call(serving, f"/v1/requests/{name}/cancel", key=key)
                assert status == 404, name
                unknown = call(serving, "/v1/requests/0123456789/cancel", key=key)[2]
                assert name == "" or answer["error"]["code"] == unknown["error"]["code"]
        # A prefix is none of the owner's ids either.
        assert cancel(serving, request_id[:8])[0] == 404
        assert serving.outcomes == {}
        assert cancel(serving, request_id, key="root")[1]["status"] == "cancelled"


def test_names_are_each_owners_own(serving: Serving) -> None:
    with Client(serving.port) as alice, Client(serving.port) as bob:
        for client, key in ((alice, "alice"), (bob, "bob")):
            send(client, *ASKS["chat_stream"], key=key, X_Request_Id="same")
            client.read_until(b'"content"')
        assert cancel(serving, "same", key="bob")[1]["status"] == "cancelled"
        wait_generated(serving)
        assert outcomes_of(serving)[0].reason is Reason.ABORTED
        assert cancel(serving, "same")[1]["status"] == "cancelled"


def test_a_name_of_two_live_requests_cancels_neither(serving: Serving) -> None:
    with Client(serving.port) as one, Client(serving.port) as other:
        for client in (one, other):
            send(client, *ASKS["chat_stream"], X_Request_Id="twice")
            client.read_until(b'"content"')
        status, answer = cancel(serving, "twice")
        assert (status, answer["error"]["code"]) == (409, "request_ambiguous")
        wait_generated(serving)
        assert serving.outcomes == {}


def test_a_batch_with_a_name_of_two_cancels_none_of_it(serving: Serving) -> None:
    with Client(serving.port) as one, Client(serving.port) as other, Client(serving.port) as third:
        for client, name in ((one, "twice"), (other, "twice"), (third, "once")):
            send(client, *ASKS["chat_stream"], X_Request_Id=name)
            client.read_until(b'"content"')
        with Client(serving.port) as fourth, Client(serving.port) as fifth:
            for client in (fourth, fifth):
                send(client, *ASKS["chat_stream"], X_Request_Id="again")
                client.read_until(b'"content"')
            for path in ("/v1/requests/cancel", "/abort_requests"):
                body = {"request_ids": ["once", "twice", "again", "twice"]}
                status, _, answer = call(serving, path, body)
                assert status == 409
                assert "the name 'twice', 'again': nothing" in str(answer["error"])
            assert serving.outcomes == {}
        wait_until(lambda: len(serving.outcomes) == 2)
        serving.outcomes.clear()
        wait_generated(serving)
        assert serving.outcomes == {}


def test_all_are_cancelled_by_an_admin_who_confirms(serving: Serving) -> None:
    path = "/v1/admin/cancel_all"
    with Client(serving.port) as one, Client(serving.port) as other:
        send(one, *ASKS["chat"])
        send(other, *ASKS["generate"], key="bob")
        wait_until(lambda: serving.backend.stats().num_running == 2)
        refused: list[tuple[str, Any, int]] = [
            ("alice", {"confirm": True}, 403),
            ("proxy", {"confirm": True}, 403),
            ("nobody", {"confirm": True}, 401),
            ("root", {"confirm": False}, 400),
            ("root", {"confirm": "true"}, 400),
            ("root", {"confirm": 1}, 400),
            ("root", {}, 400),
            ("root", b"", 400),
            ("root", {"confirm": True, "but": "not these"}, 400),
        ]
        for key, body, status in refused:
            assert call(serving, path, body, key=key)[0] == status, (key, body)
        wait_generated(serving)
        assert serving.outcomes == {}
        status, _, answer = call(serving, path, {"confirm": True}, key="root")
        assert status == 200
        assert [each["status"] for each in answer["results"]] == ["cancelled"] * 2
        assert serving.engine.block_owners == set()
        assert {one.read_response()[0], other.read_response()[0]} == {499}


@pytest.mark.parametrize(
    ("path", "bodies"),
    [
        ("/abort_request", [b"", {}, {"rid": ""}, {"rid": None}, {"rid": ["x"]}, {"abort_all": 1}]),
        ("/abort_requests", [b"", {}, {"request_ids": []}, {"request_ids": "x"}]),
        (
            "/v1/requests/cancel",
            [
                b"",
                b"null",
                {},
                {"request_ids": []},
                {"request_ids": None},
                {"request_ids": [""]},
                {"request_ids": [["x"]]},
                {"request_ids": ["x"] * 257},
                {"request_ids": ["x" * 129]},
                {"request_ids": ["x"], "all": True},
                {"request_ids": ["x"], "wait": -1},
                {"request_ids": ["x"], "wait": 1e9},
            ],
        ),
    ],
)
def test_a_body_that_names_nothing_cancels_nothing(
    serving: Serving, path: str, bodies: list[Any]
) -> None:
    with Client(serving.port) as client:
        send(client, *ASKS["chat_stream"])
        client.read_until(b'"content"')
        for body in bodies:
            assert call(serving, path, body)[0] == 400, body
        assert serving.outcomes == {}


def test_the_forms_of_others_go_by_the_same_rules(serving: Serving) -> None:
    with Client(serving.port) as client:
        send(client, *ASKS["chat"], X_Request_Id="x")
        wait_generated(serving)
        for key in ("bob", "proxy"):
            status, _, answer = call(serving, "/abort_request", {"rid": "x"}, key=key)
            assert (status, answer["results"][0]["status"]) == (200, "not_found")
            status, _, answer = call(serving, "/abort_requests", {"request_ids": ["x"]}, key=key)
            assert (status, answer["results"][0]["status"]) == (200, "not_found")
            assert (
                call(serving, "/abort_request", {"rid": "x", "abort_all": True}, key=key)[0] == 403
            )
        assert call(serving, "/abort_request", {"rid": "x"}, key="nobody")[0] == 401
        assert serving.outcomes == {}
        status, _, answer = call(serving, "/abort_request", {"rid": "x"})
        assert (status, answer["results"][0]["status"]) == (200, "cancelled")
        status, _, answer = call(serving, "/abort_requests", {"request_ids": ["x"]})
        assert (status, answer["results"][0]["status"]) == (200, "already_cancelled")
        assert client.read_response()[0] == 499
        send(client, *ASKS["chat"])
        wait_generated(serving)
        status, _, answer = call(serving, "/abort_request", {"abort_all": True}, key="root")
        assert (status, answer["results"][0]["status"]) == (200, "cancelled")


def test_who_cancels_too_often_has_to_wait_and_others_do_not(serving: Serving) -> None:
    limit = serving.frontend.abort_limit
    serving.frontend.abort_limit = RateLimit(0.01, burst=3)
    try:
        assert [cancel(serving, "never")[0] for _ in range(4)] == [404, 404, 404, 429]
        status, headers, answer = call(
            serving, "/abort_requests", {"request_ids": ["never", "ever"]}
        )
        assert (status, headers["retry-after"]) == (429, "200")
        assert "at most 0.01 a second" in answer["error"]
        assert cancel(serving, "never", key="bob")[0] == 404
    finally:
        serving.frontend.abort_limit = limit


def test_without_keys_only_the_admin_cancels() -> None:
    with serving_engine(packaged_engine()) as serving, Client(serving.port) as client:
        send(client, *ASKS["chat"], X_Request_Id="x")
        wait_generated(serving)
        for path, body in (
            ("/v1/requests/x/cancel", b""),
            ("/v1/requests/cancel", {"request_ids": ["x"]}),
            ("/v1/admin/cancel_all", {"confirm": True}),
            ("/abort_request", {"rid": "x"}),
            ("/abort_request", {"abort_all": True}),
            ("/abort_requests", {"request_ids": ["x"]}),
        ):
            with Client(serving.port) as other:
                other.post(path, body)
                status, headers, answer = other.read_response()
            assert (status, headers["www-authenticate"]) == (401, "Bearer")
            assert "admin's token is needed" in str(json.loads(answer)["error"])
        assert serving.outcomes == {}
        with Client(serving.port) as admin:
            token = serving.gatekeeper.admin_token
            body = {"confirm": True}
            admin.post("/v1/admin/cancel_all", body, Authorization=f"Bearer {token}")
            status, _, answer = admin.read_response()
        assert (status, json.loads(answer)["results"][0]["status"]) == (200, "cancelled")
        assert client.read_response()[0] == 499
        wait_until(serving.is_idle)


def test_openais_sdk_does_not_begin_again_what_was_cancelled(serving: Serving) -> None:
    with openai.OpenAI(
        base_url=f"http://127.0.0.1:{serving.port}/v1", api_key="alice-key", max_retries=3
    ) as client:
        body = {"ignore_eos": True}
        ask: dict[str, Any] = {"messages": CHAT["messages"], "model": "tiny", "extra_body": body}
        with ThreadPoolExecutor(1) as pool:
            headers = {"X-Request-Id": "sdk"}
            create: Any = client.chat.completions.create
            answer = pool.submit(create, **ask, extra_headers=headers)
            wait_generated(serving)
            assert cancel(serving, "sdk")[1]["status"] == "cancelled"
            with pytest.raises(openai.APIStatusError) as caught:
                answer.result(20)
        assert caught.value.status_code == 499
        assert caught.value.code == "request_cancelled"
        stream = client.chat.completions.create(
            **ask, stream=True, extra_headers={"X-Request-Id": "sdk-stream"}
        )
        next(iter(stream))
        assert cancel(serving, "sdk-stream")[1]["status"] == "cancelled"
        with pytest.raises(openai.APIError, match="the request was cancelled: aborted"):
            list(stream)
        # 499 it would not repeat by itself; 504 it would, but for the header.
        with pytest.raises(openai.APIStatusError) as caught:
            client.chat.completions.create(**ask, extra_headers={"X-Request-Timeout": "0"})
        assert caught.value.status_code == 504
        assert caught.value.response.headers["x-should-retry"] == "false"
    outcomes_of(serving, 3)


@asks
def test_a_request_has_the_time_that_its_header_says(serving: Serving, ask: str) -> None:
    path, body = ASKS[ask]
    with Client(serving.port) as client:
        send(client, path, body, X_Request_Timeout="0.05")
        if ask == "chat_stream":
            rest = client.read_until(b"0\r\n\r\n")
            assert b'"code":"deadline_exceeded"' in rest
        elif ask != "generate_stream":
            status, headers, _ = client.read_response()
            assert (status, headers["x-should-retry"]) == (504, "false")
        else:  # told in the head's place or in the stream, by when the first token was there
            client.read_until(b"was given is over")
    for outcome in outcomes_of(serving, 2 if ask == "prompts" else 1):
        assert outcome.reason is Reason.DEADLINE


@pytest.mark.parametrize("value", ["x", "-1", "nan", "inf", "1e9", ""])
def test_a_time_that_is_none_is_named(serving: Serving, value: str) -> None:
    with Client(serving.port) as client:
        send(client, *ASKS["chat"], X_Request_Timeout=value)
        status, _, answer = client.read_response()
    assert status == 400
    assert f'X-Request-Timeout is "{value}"' in json.loads(answer)["error"]["message"]


def test_the_servers_own_limit_is_for_who_brings_none() -> None:
    with (
        serving_engine(packaged_engine(), request_timeout=0.05) as serving,
        Client(serving.port) as client,
    ):
        client.post(*ASKS["generate"])
        assert client.read_response()[0] == 504
        client.post(*ASKS["generate"], X_Request_Timeout="50")
        assert client.read_response()[0] == 504  # the shorter one counts
        wait_until(serving.is_idle)


def test_a_name_that_could_break_a_line_is_refused(serving: Serving) -> None:
    for name in ("a b", "x" * 129, "\xe9"):
        with Client(serving.port) as client:
            raw = request_bytes(*ASKS["chat"], Authorization="Bearer alice-key")
            at = raw.index(b"\r\n") + 2
            header = b"X-Request-Id: " + name.encode("latin-1") + b"\r\n"
            client.sock.sendall(raw[:at] + header + raw[at:])
            assert client.read_response()[0] == 400
    assert serving.outcomes == {}
