"""Which requests are known, to whom, and for how long."""

import asyncio

import pytest

from disconnect_watch.keys import ADMIN, Caller, KeyRing, Role, digest_of
from disconnect_watch.server import ledger as ledger_module
from disconnect_watch.server.access import RequestRecord
from disconnect_watch.server.ledger import AmbiguousNameError, RequestLedger
from disconnect_watch.token import CancelToken, Reason
from tests.support.net import PATIENCE, until

ALICE, BOB = Caller("alice", Role.USER), Caller("bob", Role.SERVICE)


def record(name: str = "", owner: str = "alice") -> RequestRecord:
    made = RequestRecord(CancelToken())
    made.owner, made.client_id = owner, name
    return made


def test_a_request_is_found_by_its_owner_and_the_admin() -> None:
    ledger = RequestLedger()
    one = record("mine")
    ledger.begin(one)
    for _ in range(2):
        assert ledger.find(ALICE, one.request_id) is one
        assert ledger.find(ALICE, "mine") is one
        assert ledger.find(ADMIN, one.request_id) is one
        assert ledger.find(ADMIN, "mine") is None
        for stranger in (one.request_id, one.request_id[:31], "mine", ""):
            assert ledger.find(BOB, stranger) is None
        assert ledger.find(ALICE, one.request_id[:31]) is None
        if ledger.is_live(one):
            ledger.end(one)
    assert ledger.live() == []


def test_no_key_has_a_part_in_what_the_admin_asked_for() -> None:
    line = f"{ADMIN.name} user {digest_of('a key')}"
    with pytest.raises(ValueError, match="name"):
        KeyRing.parse(line, source="keys")
    ledger = RequestLedger()
    one = record(owner=ADMIN.name)
    ledger.begin(one)
    assert ledger.find(Caller("admin", Role.USER), one.request_id) is None
    assert ledger.find(Caller("admin", Role.ADMIN), one.request_id) is one


def test_of_one_name_the_live_one_is_meant_and_else_the_latest() -> None:
    ledger = RequestLedger()
    first, second, third = record("x"), record("x"), record("x")
    ledger.begin(first)
    ledger.end(first)
    assert ledger.find(ALICE, "x") is first
    ledger.begin(second)
    assert ledger.find(ALICE, "x") is second
    ledger.begin(third)
    with pytest.raises(AmbiguousNameError, match="2 live requests have this name"):
        ledger.find(ALICE, "x")
    ledger.end(second)
    assert ledger.find(ALICE, "x") is third
    ledger.end(third)
    assert ledger.find(ALICE, "x") is third


def test_what_a_client_calls_like_anothers_id_is_not_that_request() -> None:
    ledger = RequestLedger()
    victim = record()
    ledger.begin(victim)
    fake = record(victim.request_id, owner="bob")
    ledger.begin(fake)
    assert ledger.find(BOB, victim.request_id) is fake
    assert ledger.find(ALICE, victim.request_id) is victim


def test_the_ledger_forgets_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "MAX_ENDED", 3)
    ledger = RequestLedger()
    records = [record("x" if index % 2 else "") for index in range(10)]
    for each in records:
        ledger.begin(each)
        ledger.end(each)
    found = [ledger.find(ALICE, each.request_id) is not None for each in records]
    assert found == [False] * 7 + [True] * 3
    assert ledger.find(ALICE, "x") is records[9]
    assert sum(len(ids) for ids in ledger._named.values()) == 2
    for each in (record() for _ in range(3)):
        ledger.begin(each)
        ledger.end(each)
    assert ledger._named == {}


def test_what_was_handed_over_goes_on_after_its_clients_part() -> None:
    ledger = RequestLedger()
    first = record("mine")
    ledger.begin(first)
    second = RequestRecord(CancelToken(), request_id=first.request_id, owner="alice")
    second.client_id = "mine"
    ledger.hand_over(first, second)
    ledger.end(first)
    assert not ledger.is_live(first)
    assert ledger.is_live(second)
    for name in (first.request_id, f"resp_{first.request_id}", "mine"):
        assert ledger.find(ALICE, name) is second
        assert ledger.find(BOB, name) is None
    ledger.end(second)
    assert ledger.live() == []
    assert ledger.find(ALICE, "mine") is second


def test_who_waits_for_its_end_waits_for_that_of_what_it_was_handed_to() -> None:
    async def main() -> None:
        ledger = RequestLedger()
        first = record()
        ledger.begin(first)
        waiting = asyncio.create_task(ledger.wait_ended(first))
        await until(lambda: first.waiters)
        second = RequestRecord(CancelToken(), request_id=first.request_id, owner="alice")
        ledger.hand_over(first, second)
        ledger.end(first)
        await asyncio.sleep(0)
        assert not waiting.done()
        ledger.end(second)
        await asyncio.wait_for(waiting, PATIENCE)

    asyncio.run(main())


def test_a_request_is_counted_once_for_each_end_that_it_was_asked_for() -> None:
    ledger = RequestLedger()
    one, other = record(), record()
    for reason in (Reason.ABORTED, Reason.DEADLINE, Reason.ABORTED):
        ledger.signal(one, reason)
    ledger.signal(other, Reason.ABORTED)
    assert ledger.signals == {Reason.ABORTED: 2, Reason.DEADLINE: 1}
    assert not one.token.cancelled


@pytest.mark.asyncio
async def test_a_time_that_is_over_is_a_signal_and_a_cancel() -> None:
    ledger = RequestLedger()
    late, early = record(), record()
    ledger.begin(late)
    ledger.begin(early)
    with ledger.deadline(early, 60.0), ledger.deadline(late, 0.0):
        await until(lambda: late.token.cancelled)
    assert (late.token.reason, early.token.reason) == (Reason.DEADLINE, None)
    assert ledger.signals == {Reason.DEADLINE: 1}


@pytest.mark.asyncio
async def test_the_time_of_what_was_handed_over_is_not_told_by_its_clients_part() -> None:
    ledger = RequestLedger()
    first = record()
    ledger.begin(first)
    second = RequestRecord(CancelToken(), request_id=first.request_id, owner="alice")
    other = record()
    ledger.begin(other)
    # The same time for both, so that the first is over when the other is.
    with ledger.deadline(first, 0.0), ledger.deadline(other, 0.0):
        ledger.hand_over(first, second)
        await until(lambda: other.token.cancelled)
        await asyncio.sleep(0)
    assert ledger.signals == {Reason.DEADLINE: 1}
    assert not first.token.cancelled
