"""What a cancel by id comes to, and that no body cancels what it does not name."""

import asyncio
import json

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disconnect_watch.engine import Outcome
from disconnect_watch.keys import Caller, KeyRing, Role, digest_of
from disconnect_watch.server import Frontend, create_app
from disconnect_watch.server.access import RequestRecord
from disconnect_watch.server.cancel import cancel
from disconnect_watch.server.guard import Gatekeeper
from disconnect_watch.server.ledger import RequestLedger
from disconnect_watch.token import CancelToken, Reason
from tests.support.backends import FINISHED, ScriptedBackend
from tests.support.serve import metrics_of

CANCELLED = Outcome("cancelled", reason=Reason.FIN, phase="decode")


def record(outcome: Outcome | None = None, *, status: int = 0) -> RequestRecord:
    made = RequestRecord(CancelToken())
    made.owner, made.outcome, made.status = "alice", outcome, status
    return made


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("outcome", "status"), [(FINISHED, "already_finished"), (CANCELLED, "already_cancelled")]
)
async def test_what_is_over_is_not_waited_for_while_its_answer_is_sent(
    outcome: Outcome, status: str
) -> None:
    ledger, known = RequestLedger(), record(outcome)
    ledger.begin(known)
    result = await cancel(ledger, known, name="x", wait=0)
    assert (result.status, result.request_id) == (status, "x")
    assert not known.token.cancelled


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("answer", "status"), [(200, "already_finished"), (499, "cancelled"), (400, "cancelled")]
)
async def test_what_never_reached_an_engine_is_judged_by_its_answer(
    answer: int, status: str
) -> None:
    ledger, live = RequestLedger(), record()
    ledger.begin(live)
    asked = asyncio.create_task(cancel(ledger, live, name="x", wait=20))
    other = asyncio.create_task(cancel(ledger, live, name="x", wait=20))
    await asyncio.sleep(0)
    assert len(live.waiters) == 2
    assert live.token.reason is Reason.ABORTED
    live.status = answer
    ledger.end(live)
    assert (await asked).status == status
    # It is told to one of them only.
    assert (await other).status == ("already_finished" if answer == 200 else "already_cancelled")


@pytest.mark.asyncio
async def test_who_gives_up_waiting_leaves_the_flag_set() -> None:
    ledger, live = RequestLedger(), record()
    ledger.begin(live)
    assert (await cancel(ledger, live, name="x", wait=0)).status == "pending"
    assert live.token.cancelled
    ledger.end(live)
    assert live.waiters == []


#: Ids that others have, whole and changed; and what looks like all of them.
VICTIM = "0123456789abcdef" * 2
STRANGE = (
    VICTIM,
    VICTIM[:8],
    VICTIM.upper(),
    f" {VICTIM}",
    f"{VICTIM}\0",
    f"resp_{VICTIM}",
    "*",
    "%",
)
ROUTES = (
    "/v1/requests/cancel",
    "/v1/admin/cancel_all",
    "/abort_request",
    "/abort_requests",
    "/v1/requests/%2A/cancel",
    "/v1/requests//cancel",
    f"/v1/requests/{VICTIM}/cancel",
    f"/v1/requests/{VICTIM[:8]}/cancel",
)
NAMES = ("request_ids", "rid", "abort_all", "confirm", "wait", "all", "")
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=5)
    | st.sampled_from([*STRANGE, VICTIM * 1000]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)
BODIES = (
    st.binary(max_size=40)
    | VALUES.map(lambda value: json.dumps(value).encode())
    | st.dictionaries(st.sampled_from(NAMES), VALUES).map(lambda value: json.dumps(value).encode())
    # What makes sense and names another's request; what is nested without end; what is huge.
    | st.sampled_from(
        [
            json.dumps({"request_ids": [*STRANGE]}).encode(),
            json.dumps({"rid": VICTIM}).encode(),
            json.dumps({"rid": VICTIM, "abort_all": True}).encode(),
            b'{"request_ids":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
            json.dumps({"request_ids": ["x" * 128] * 257}).encode(),
            b'{"rid":"' + b"x" * (1 << 20) + b'"}',
        ]
    )
)


@settings(max_examples=120, deadline=None)
@given(route=st.sampled_from(ROUTES), body=BODIES, key=st.sampled_from(["bob", "gateway"]))
def test_no_body_cancels_what_it_does_not_name_and_own(route: str, body: bytes, key: str) -> None:
    async def main() -> None:
        frontend = Frontend(ScriptedBackend("a"))
        victim, own = record(), record()
        victim.request_id = VICTIM
        own.owner, own.client_id = key, "not named in any of these"
        frontend.ledger.begin(victim)
        frontend.ledger.begin(own)
        roles = {"bob": Role.USER, "gateway": Role.SERVICE}
        keys = KeyRing([(Caller(name, role), digest_of(name)) for name, role in roles.items()])
        app = create_app(frontend, metrics_of(frontend), gatekeeper=Gatekeeper(keys))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            headers = {"Authorization": f"Bearer {key}"}
            answer = await client.post(route, content=body, headers=headers)
        assert answer.status_code < 500
        assert not victim.token.cancelled
        assert not own.token.cancelled

    asyncio.run(main())
