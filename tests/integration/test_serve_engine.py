"""A client leaves, the engine stops: the whole frontend over a real engine and loopback.

Judged by the engine's step log and block ledger. What must happen at one moment is
held there by the engine's layer hook, so that no test depends on who is faster.
"""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from disconnect_watch.engine import Outcome
from disconnect_watch.token import Reason
from tests.support import tools
from tests.support.engine import make_engine
from tests.support.gate import gated
from tests.support.net import wait_until
from tests.support.serve import (
    Client,
    Serving,
    packaged_engine,
    request_bytes,
    serving_engine,
)

ROUTES = ["generate", "generate_stream"]
#: Longer than any test waits for: it ends by being cancelled, or not in this test.
ENDLESS = {"text_input": "x", "max_tokens": 100_000, "ignore_eos": True}


def path_of(route: str) -> str:
    return f"/v2/models/tiny/{route}"


@pytest.fixture
def serving() -> Iterator[Serving]:
    with serving_engine(packaged_engine()) as serving:
        yield serving
        wait_until(serving.is_idle)
        serving.engine.check_integrity()


def only_outcome(serving: Serving) -> Outcome:
    """The outcome of the one request that there was."""
    wait_until(lambda: serving.outcomes)
    wait_until(serving.is_idle)
    (outcomes,) = serving.outcomes.values()
    (outcome,) = outcomes
    assert sum(serving.backend.stats().outcomes.values()) == 1
    return outcome


def assert_stopped_after(serving: Serving, step: int, request_id: str) -> None:
    """No step after the one in which the flag was set computed anything for the request."""
    later = [record for record in serving.engine.step_log if record.step > step]
    assert not any(request_id in record.scheduled for record in later)
    assert request_id not in serving.engine.block_owners


def by_fin(client: Client) -> None:
    client.sock.close()


def by_half_close(client: Client) -> None:
    client.sock.shutdown(socket.SHUT_WR)


def by_reset(client: Client) -> None:
    client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    client.sock.close()


def behind_a_request(client: Client) -> None:
    client.post(path_of("generate"), ENDLESS)
    client.sock.close()


#: Way, and the reasons it may have. Closing with bytes of the answer unread is a reset;
#: and where the server's own read takes a reset's error first, the watcher sees an end.
LEAVES: dict[str, tuple[Callable[[Client], None], set[Reason]]] = {
    "fin": (by_fin, {Reason.FIN, Reason.RESET}),
    "half_close": (by_half_close, {Reason.FIN}),
    "reset": (by_reset, {Reason.FIN, Reason.RESET}),
    "behind_a_request": (behind_a_request, {Reason.FIN, Reason.RESET}),
}
leaves = pytest.mark.parametrize("leave", LEAVES)
routes = pytest.mark.parametrize("route", ROUTES)


@leaves
@routes
def test_a_leave_in_mid_decode_ends_it_within_the_step(
    serving: Serving, route: str, leave: str
) -> None:
    act, reasons = LEAVES[leave]
    with gated(serving.engine, after_steps=3) as gate, Client(serving.port) as client:
        client.post(path_of(route), ENDLESS)
        step = gate.wait()
        (request_id,) = serving.engine.block_owners
        act(client)
        wait_until(lambda: sum(serving.watcher.stats().num_signals.values()) == 1)
        gate.open()
        outcome = only_outcome(serving)
    assert (outcome.kind, outcome.phase) == ("cancelled", "decode")
    assert outcome.reason in reasons
    assert outcome.num_wasted_tokens <= 1
    assert outcome.num_blocks_freed > 0
    assert_stopped_after(serving, step, request_id)


@leaves
@routes
def test_a_leave_in_mid_prefill_stops_at_the_next_layer(
    serving: Serving, route: str, leave: str
) -> None:
    act, reasons = LEAVES[leave]
    with gated(serving.engine, layer=1) as gate, Client(serving.port) as client:
        client.post(path_of(route), {**ENDLESS, "text_input": "long " * 100})
        step = gate.wait()
        (request_id,) = serving.engine.block_owners
        act(client)
        wait_until(lambda: sum(serving.watcher.stats().num_signals.values()) == 1)
        gate.open()
        outcome = only_outcome(serving)
    assert (outcome.kind, outcome.phase) == ("cancelled", "prefill")
    assert outcome.reason in reasons
    assert outcome.num_generated_tokens == 0
    record = next(record for record in serving.engine.step_log if record.step == step)
    assert record.dropped == {request_id: 1}
    assert len(record.layer_tokens) == 1
    assert_stopped_after(serving, step, request_id)


@leaves
@routes
def test_a_leave_while_queued_never_takes_a_slot(route: str, leave: str) -> None:
    act, reasons = LEAVES[leave]
    engine = packaged_engine(max_num_seqs=1)
    with serving_engine(engine) as serving:
        with (
            gated(engine, after_steps=2) as gate,
            Client(serving.port) as holder,
            Client(serving.port) as client,
        ):
            holder.post(path_of("generate_stream"), ENDLESS)
            holder.read_until(b"text_output")
            client.post(path_of(route), ENDLESS)
            wait_until(lambda: serving.watcher.stats().num_armed == 2)
            # It is admitted between two steps; and the holder's context comes to an end, too.
            while serving.backend.stats().num_waiting == 0:
                gate.pass_steps(1)
                gate.wait()
            act(client)
            wait_until(lambda: sum(serving.watcher.stats().num_signals.values()) == 1)
            gate.open()
            wait_until(lambda: len(serving.outcomes) == 1)
            ((request_id, (outcome,)),) = serving.outcomes.items()
            assert (outcome.kind, outcome.phase) == ("cancelled", "waiting")
            assert outcome.reason in reasons
            assert outcome.num_blocks_freed == 0
            assert not any(request_id in record.scheduled for record in engine.step_log)
            holder.read_until(b"text_output")
        wait_until(serving.is_idle)


@leaves
def test_a_leave_before_the_first_token_is_sent_nothing(serving: Serving, leave: str) -> None:
    """The head of a stream waits for its first token; so whoever left before got no byte."""
    act, _ = LEAVES[leave]
    with gated(serving.engine) as gate, Client(serving.port) as client:
        client.post(path_of("generate_stream"), ENDLESS)
        gate.wait()
        client.sock.setblocking(False)
        with pytest.raises(BlockingIOError):
            client.sock.recv(1)
        client.sock.setblocking(True)
        act(client)
        wait_until(lambda: sum(serving.watcher.stats().num_signals.values()) == 1)
        gate.open()
        outcome = only_outcome(serving)
    assert outcome.kind == "cancelled"
    assert outcome.num_generated_tokens == 0


@leaves
def test_a_leave_in_mid_stream_ends_it(serving: Serving, leave: str) -> None:
    act, reasons = LEAVES[leave]
    with Client(serving.port) as client:
        client.post(path_of("generate_stream"), ENDLESS)
        for _ in range(3):
            client.read_until(b"\n\n")
        act(client)
        outcome = only_outcome(serving)
    assert (outcome.kind, outcome.phase) == ("cancelled", "decode")
    assert outcome.reason in reasons
    assert outcome.num_wasted_tokens <= 1


def test_requests_pipelined_behind_a_leave_never_reach_the_engine(serving: Serving) -> None:
    with Client(serving.port) as client:
        client.post(path_of("generate_stream"), ENDLESS)
        client.read_until(b"\n\n")
        for _ in range(10):
            client.post(path_of("generate"), ENDLESS)
        client.sock.close()
        only_outcome(serving)
    assert serving.backend.stats().num_requests == 1


@routes
def test_a_blocked_loop_delays_no_cancel(serving: Serving, route: str) -> None:
    with Client(serving.port) as client:
        client.post(path_of(route), ENDLESS)
        wait_until(lambda: serving.backend.stats().num_generated_tokens >= 3)
        release = serving.http.block_loop()
        try:
            client.sock.close()
            wait_until(lambda: serving.backend.stats().num_running == 0)
            assert serving.engine.block_ledger == {}
            ((outcome,),) = serving.outcomes.values()
            assert outcome.kind == "cancelled"
        finally:
            release()


def test_a_survivor_is_unharmed_by_those_who_leave(serving: Serving) -> None:
    body = {"text_input": "the", "max_tokens": 60, "ignore_eos": True}
    with Client(serving.port) as client:
        client.post(path_of("generate"), body)
        alone = client.read_response()
        client.post(path_of("generate_stream"), body)
        leavers = [Client(serving.port) for _ in range(5)]
        for leaver in leavers:
            leaver.post(path_of("generate_stream"), ENDLESS)
        for leaver in leavers:
            leaver.read_until(b"\n\n")
            leaver.sock.close()
        status, _, events = client.read_response()
    text = "".join(
        json.loads(event.removeprefix(b"data: "))["text_output"]
        for event in events.strip().split(b"\n\n")
    )
    assert alone[0] == status == 200
    assert text == json.loads(alone[2])["text_output"]
    wait_until(lambda: len(serving.outcomes) == 7)
    kinds = [outcome.kind for (outcome,) in serving.outcomes.values()]
    assert sorted(kinds) == ["cancelled"] * 5 + ["finished"] * 2


def test_a_thousand_requests_on_one_connection(serving: Serving) -> None:
    with Client(serving.port) as client:
        for number in range(1000):
            client.post(path_of("generate"), {"text_input": f"{number}", "max_tokens": 1})
            status, headers, body = client.read_response()
            assert status == 200, body
            assert len(headers["x-request-id"]) == 32
    assert len(serving.outcomes) == 1000
    assert {outcome.kind for (outcome,) in serving.outcomes.values()} == {"finished"}
    wait_until(lambda: serving.watcher.stats().num_connections == 0)
    assert serving.watcher.stats().num_fired == 0


@routes
def test_ten_pipelined_requests_are_each_answered_right(serving: Serving, route: str) -> None:
    bodies = [{"text_input": "a" * n, "max_tokens": n, "id": f"r{n}"} for n in range(1, 11)]
    with Client(serving.port) as client:
        client.sock.sendall(b"".join(request_bytes(path_of(route), body) for body in bodies))
        for body in bodies:
            status, _, answer = client.read_response()
            assert status == 200
            for event in answer.strip().split(b"\n\n"):
                assert json.loads(event.removeprefix(b"data: "))["id"] == body["id"]
    wait_until(lambda: len(serving.outcomes) == 10)
    assert {outcome.kind for (outcome,) in serving.outcomes.values()} == {"finished"}


@routes
def test_a_killed_client_process_is_a_leave(serving: Serving, route: str) -> None:
    client = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import socket, sys\n"
            f"sock = socket.create_connection(('127.0.0.1', {serving.port}))\n"
            "sock.sendall(sys.stdin.buffer.read())\n"
            "while sock.recv(65536): pass\n",
        ],
        stdin=subprocess.PIPE,
    )
    assert client.stdin is not None
    with client:
        client.stdin.write(request_bytes(path_of(route), ENDLESS))
        client.stdin.close()
        wait_until(lambda: serving.backend.stats().num_generated_tokens >= 3)
        client.kill()
        outcome = only_outcome(serving)
    assert outcome.kind == "cancelled"
    assert outcome.reason in LEAVES["fin"][1]


@pytest.mark.skipif(not tools.path_of("curl"), reason="curl is not here: make test-programs")
@routes
def test_curl_interrupted_is_a_leave(serving: Serving, route: str) -> None:
    url = f"http://127.0.0.1:{serving.port}{path_of(route)}"
    with subprocess.Popen(
        ["curl", "-sN", url, "-d", json.dumps(ENDLESS)], stdout=subprocess.DEVNULL
    ) as curl:
        wait_until(lambda: serving.backend.stats().num_generated_tokens >= 3)
        os.kill(curl.pid, signal.SIGINT)
        outcome = only_outcome(serving)
    assert outcome.kind == "cancelled"
    assert outcome.reason in LEAVES["fin"][1]


def test_a_half_closed_client_is_served_if_asked_for() -> None:
    with serving_engine(packaged_engine(), half_close="ignore") as serving:
        with Client(serving.port) as client:
            client.post(path_of("generate"), {"text_input": "x", "max_tokens": 20})
            client.sock.shutdown(socket.SHUT_WR)
            status, _, body = client.read_response()
        assert status == 200
        assert json.loads(body)["model_name"] == "tiny"
        wait_until(serving.is_idle)


def test_a_shutdown_lets_short_requests_finish_and_tells_the_others() -> None:
    engine = packaged_engine()
    with (
        serving_engine(engine, grace=0.5) as serving,
        Client(serving.port) as streaming,
        Client(serving.port) as waiting,
    ):
        streaming.post(path_of("generate_stream"), ENDLESS)
        streaming.read_until(b"\r\n\r\n")
        waiting.post(path_of("generate"), ENDLESS)
        wait_until(lambda: serving.backend.stats().num_running == 2)
        serving.http.server.should_exit = True
        status, _, body = waiting.read_response()
        assert status == 503
        assert "shutting down" in json.loads(body)["error"]
        rest = streaming.read_rest()
        assert b'data: {"error":' in rest
        assert rest.endswith(b"0\r\n\r\n")
        for outcomes in serving.outcomes.values():
            assert [outcome.reason for outcome in outcomes] == [Reason.SHUTDOWN]


def test_a_dead_engine_answers_500_and_is_not_ready(
    serving: Serving, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise MemoryError("the scheduler broke")

    with Client(serving.port) as client, Client(serving.port) as streaming:
        streaming.post(path_of("generate_stream"), ENDLESS)
        streaming.read_until(b"\n\n")
        monkeypatch.setattr(serving.engine._scheduler, "schedule", broken)
        client.post(path_of("generate"), ENDLESS)
        status, _, body = client.read_response()
        assert status == 500
        assert "error" in json.loads(body)
        assert b'data: {"error":' in streaming.read_until(b"0\r\n\r\n")
        client.post(path_of("generate"), ENDLESS)
        assert client.read_response()[0] == 500
        client.sock.sendall(b"GET /v2/health/ready HTTP/1.1\r\nHost: t\r\n\r\n")
        assert client.read_response()[0] == 400
        client.sock.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: t\r\n\r\n")
        assert client.read_response()[0] == 200
    assert "the scheduler broke" in caplog.text


def test_a_full_queue_is_503(serving: Serving) -> None:
    engine = packaged_engine(max_num_seqs=1, max_queue=1)
    with serving_engine(engine) as serving:
        clients = [Client(serving.port) for _ in range(3)]
        clients[0].post(path_of("generate_stream"), ENDLESS)
        wait_until(lambda: serving.backend.stats().num_running == 1)
        clients[1].post(path_of("generate_stream"), ENDLESS)
        wait_until(lambda: serving.backend.stats().num_waiting == 1)
        clients[2].post(path_of("generate_stream"), {**ENDLESS, "id": "q3"})
        status, _, body = clients[2].read_response()
        for client in clients:
            client.sock.close()
        assert status == 503
        assert json.loads(body)["error"].startswith("[request id: q3] Exceeds maximum queue size")
        wait_until(serving.is_idle)


def test_a_prompt_longer_than_the_context_is_400() -> None:
    with serving_engine(make_engine(max_model_len=64)) as serving, Client(serving.port) as client:
        client.post(path_of("generate"), {"text_input": "x" * 100})
        status, _, body = client.read_response()
        assert status == 400
        assert "100 tokens" in json.loads(body)["error"]
        assert "63" in json.loads(body)["error"]
