"""Tickets that wait are renewed for as long as somebody holds them."""

import threading
from collections.abc import Iterator
from functools import partial

import pytest

from disconnect_watch.disagg import Connector, KVMemory, PeerLostError, RetainedStore, Ticket
from disconnect_watch.disagg.heartbeat import Heartbeat
from disconnect_watch.errors import ClosedError
from tests.disagg.nodes import SMALL, dialler, rig
from tests.support.net import PATIENCE, wait_until

LEASE_NS = 30_000


class Node:
    """What renewals reach: counted, and answered as the test says."""

    def __init__(self) -> None:
        self.num_calls: dict[Ticket, int] = {}
        self.is_there: bool | None = True

    def extend(self, ticket: Ticket) -> bool:
        # Before it is counted, which is when the test may change it.
        is_there = self.is_there
        self.num_calls[ticket] = self.num_calls.get(ticket, 0) + 1
        if is_there is None:
            raise PeerLostError("silence")
        return is_there

    def was_called(self, ticket: Ticket) -> bool:
        return self.num_calls.get(ticket, 0) > 1


@pytest.fixture
def node() -> Node:
    return Node()


@pytest.fixture
def heartbeat(node: Node) -> Iterator[Heartbeat]:
    heartbeat = Heartbeat(node.extend)
    yield heartbeat
    heartbeat.close()


def ticket(name: str, lease_ns: int = LEASE_NS) -> Ticket:
    return Ticket("tcp://nowhere:1", name, "alice", lease_ns)


def test_what_is_held_is_renewed_again_and_again(node: Node, heartbeat: Heartbeat) -> None:
    held = [ticket("a"), ticket("b")]
    for each in held:
        heartbeat.hold(each, lambda _: None)
    wait_until(lambda: all(node.num_calls.get(each, 0) > 3 for each in held))


def test_nobody_is_asked_and_no_thread_left_when_nothing_is_held(
    node: Node, heartbeat: Heartbeat
) -> None:
    for name in ("a", "b"):
        held = ticket(name)
        heartbeat.hold(held, lambda _: None)
        wait_until(partial(node.was_called, held))
        heartbeat.let_go(held)
        heartbeat.let_go(held)
        wait_until(
            lambda: all(t.name != "disconnect-watch-heartbeat" for t in threading.enumerate())
        )


@pytest.mark.parametrize("is_there", [False, None], ids=["released", "silent"])
def test_who_waits_for_what_is_gone_is_told_once(
    node: Node, heartbeat: Heartbeat, is_there: bool | None
) -> None:
    node.is_there = is_there
    gone: list[Ticket] = []
    heartbeat.hold(ticket("a"), gone.append)
    wait_until(lambda: gone)
    heartbeat.hold(ticket("b"), gone.append)
    wait_until(lambda: len(gone) == 2)
    assert gone == [ticket("a"), ticket("b")]


def test_silence_for_less_than_a_lease_is_no_end(node: Node, heartbeat: Heartbeat) -> None:
    node.is_there = None
    gone: list[Ticket] = []
    heartbeat.hold(ticket("a", 3600 * 10**9), gone.append)
    wait_until(lambda: node.num_calls)
    # Its first renewal was lost an hour before its lease is over; that of this one is told.
    node.is_there = False
    heartbeat.hold(ticket("b"), gone.append)
    wait_until(lambda: gone)
    assert gone == [ticket("b")]


def test_one_who_fails_to_hear_of_it_keeps_no_others_from_being_renewed(
    node: Node, heartbeat: Heartbeat, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: Ticket) -> None:
        node.is_there = True
        raise ZeroDivisionError("told")

    node.is_there = False
    heartbeat.hold(ticket("a"), fail)
    wait_until(lambda: node.is_there)
    heartbeat.hold(ticket("b"), lambda _: None)
    wait_until(lambda: node.num_calls.get(ticket("b"), 0) > 3)
    assert "told" in caplog.text


def test_a_renewal_that_fails_here_is_not_the_last(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    num_failed = 0

    def extend(ticket: Ticket) -> bool:
        nonlocal num_failed
        if not num_failed:
            num_failed = 1
            raise OSError("no file descriptor is left")
        return node.extend(ticket)

    heartbeat = Heartbeat(extend)
    try:
        heartbeat.hold(ticket("a", 10**9), lambda _: None)
        heartbeat.hold(ticket("b"), lambda _: None)
        wait_until(lambda: node.num_calls.get(ticket("b"), 0) > 3)
    finally:
        heartbeat.close()
    assert "no file descriptor is left" in caplog.text


def test_a_connector_renews_what_it_holds_until_it_has_pulled_it() -> None:
    with rig("tcp") as nodes:
        transfer = nodes.retain()
        nodes.now[0] = 5
        held = nodes.ticket(transfer)
        nodes.connector.hold(held)
        wait_until(lambda: nodes.store.view()[0].lease_left_ns == transfer.lease_ns)
        nodes.pull(held)
        wait_until(
            lambda: all(t.name != "disconnect-watch-heartbeat" for t in threading.enumerate())
        )


def test_a_connector_tells_of_a_ticket_that_was_released_at_its_node() -> None:
    with rig("tcp") as nodes:
        transfer = nodes.retain()
        nodes.store.release(transfer.id, "alice")
        gone = threading.Event()
        nodes.connector.hold(nodes.ticket(transfer), lambda _: gone.set())
        assert gone.wait(PATIENCE)


def test_a_connector_that_is_closed_holds_nothing() -> None:
    connector = Connector(RetainedStore(1, 1), KVMemory.empty(SMALL, 1), dial=dialler("tcp"))
    connector.close()
    with pytest.raises(ClosedError):
        connector.hold(ticket("a"))
