"""A response of the background that somebody ends: counted once, and told once in the log."""

import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from disconnect_watch.token import Reason
from tests.support.net import wait_until
from tests.support.serve import Client, Serving, packaged_engine, serving_engine

ASK: dict[str, Any] = {
    "model": "tiny",
    "input": "The class statement",
    "ignore_eos": True,
    "max_output_tokens": 100_000,
    "background": True,
}
#: Who ends it: the reason, what the request brings for that, and as what the response is kept.
WHO: dict[str, tuple[Reason, dict[str, str], dict[str, Any], str]] = {
    "cancel": (Reason.ABORTED, {}, {}, "cancelled"),
    "abort": (Reason.ABORTED, {}, {}, "cancelled"),
    "header": (Reason.DEADLINE, {"X_Request_Timeout": "0.2"}, {}, "failed"),
    "field": (Reason.DEADLINE, {}, {"timeout": 0.2}, "failed"),
    "shutdown": (Reason.SHUTDOWN, {}, {}, "failed"),
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
    wait_until(lambda: shared.frontend.responses.num_running == 0)
    assert shared.frontend.ledger.live() == []


def end(serving: Serving, who: str, response_id: str) -> None:
    """Ask for its end; a deadline comes by itself."""
    base = f"http://127.0.0.1:{serving.port}/v1"
    key = {"Authorization": f"Bearer {serving.gatekeeper.admin_token}"}
    with httpx.Client(headers=key, timeout=40) as http:
        if who == "cancel":
            assert http.post(f"{base}/responses/{response_id}/cancel").status_code == 200
        elif who == "abort":
            answer = http.post(f"{base}/requests/{response_id}/cancel").json()
            assert answer["status"] == "cancelled"
    if who == "shutdown":
        frontend = serving.frontend
        serving.http.loop.call_soon_threadsafe(frontend.cancel_all, Reason.SHUTDOWN)


@pytest.mark.parametrize("who", WHO)
@pytest.mark.parametrize("stays", [True, False], ids=["stays", "leaves"])
def test_each_end_of_the_background_is_counted_once(
    serving: Serving, caplog: pytest.LogCaptureFixture, who: str, stays: bool
) -> None:
    reason, headers, fields, status = WHO[who]
    before = Counter(serving.frontend.ledger.signals)
    with caplog.at_level(logging.INFO), Client(serving.port) as client:
        client.post("/v1/responses", ASK | fields | {"stream": True}, **headers)
        head = client.read_until(b"\r\n\r\n").decode()
        response_id = "resp_" + head.partition("x-request-id: ")[2].partition("\r\n")[0]
        if not stays:
            client.sock.close()
        end(serving, who, response_id)
        wait_until(lambda: len(serving.outcomes) == 1)
        wait_until(lambda: serving.frontend.responses.num_running == 0)
        wait_until(lambda: serving.frontend.ledger.live() == [])
    ((outcome,),) = serving.outcomes.values()
    assert (outcome.kind, outcome.reason) == ("cancelled", reason)
    assert Counter(serving.frontend.ledger.signals) - before == {reason: 1}
    told = [record for record in caplog.records if record.message == "response"]
    assert [(each.response_id, each.outcome, each.reason) for each in told] == [  # type: ignore[attr-defined]
        (response_id, "cancelled", reason)
    ]
    assert [each.response_status for each in told] == [status]  # type: ignore[attr-defined]
