"""Retained blocks: whoever lets go of them, whenever, they are freed once and not too early."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from disconnect_watch.disagg import (
    Direction,
    Reaper,
    ReleaseKind,
    ReleaseOutcome,
    RetainedFullError,
    RetainedStore,
    Transfer,
    TransferMeta,
    TransferUsedError,
    UnknownTransferError,
)
from disconnect_watch.disagg import remembered as remembered_module
from disconnect_watch.errors import ClosedError
from tests.support.net import wait_until

LEASE_NS = 1000
BLOCKS = (3, 1, 4)


@dataclass
class Node:
    """A store whose clock the test turns, and what it has freed."""

    now: int = 0
    freed: list[Sequence[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.store = RetainedStore(10, LEASE_NS, lambda: self.now, self.freed.append)

    def retain(self, request_id: str = "r", owner: str = "alice") -> Transfer:
        return self.store.retain(owner, BLOCKS, TransferMeta(request_id, 48))


@pytest.fixture
def node() -> Node:
    return Node()


@pytest.mark.parametrize("kind", ReleaseKind)
def test_a_release_frees_once_and_says_so_twice(node: Node, kind: ReleaseKind) -> None:
    transfer = node.retain()
    first = node.store.release(transfer.id, "alice", kind)
    assert (first.outcome, first.kind, first.num_blocks) == (ReleaseOutcome.RELEASED, kind, 3)
    again = node.store.release(transfer.id, "alice", ReleaseKind.ABORT)
    assert (again.outcome, again.kind) == (ReleaseOutcome.ALREADY_RELEASED, kind)
    assert node.freed == [BLOCKS]
    assert node.freed[0] is BLOCKS
    assert node.store.stats().num_released[kind] == 1
    assert node.store.stats().num_tombstones == 0


def test_the_id_of_the_request_releases_all_that_was_retained_for_it(node: Node) -> None:
    node.retain()
    node.retain()
    node.retain("another")
    assert node.store.release("r", "alice").num_blocks == 6
    assert node.store.release("r", "alice").outcome is ReleaseOutcome.ALREADY_RELEASED
    assert [view.request_id for view in node.store.view()] == ["another"]
    assert node.store.stats().num_tombstones == 0


def test_a_release_that_comes_first_frees_what_comes_later(node: Node) -> None:
    assert node.store.tombstone("r", "alice").outcome is ReleaseOutcome.NOT_FOUND
    transfer = node.retain()
    assert transfer.is_tombstoned
    assert node.freed == [BLOCKS]
    with pytest.raises(UnknownTransferError):
        node.store.begin_pull(transfer.id, "alice")
    # It was for that one.
    assert not node.retain().is_tombstoned


def test_a_full_store_frees_what_was_let_go_before(node: Node) -> None:
    for _ in range(3):
        node.retain("others")
    node.store.tombstone("r", "alice")
    assert node.retain().is_tombstoned


def test_a_tombstone_does_not_wait_for_ever(node: Node) -> None:
    node.store.tombstone("r", "alice")
    node.now += remembered_module.TOMBSTONE_NS
    assert not node.retain().is_tombstoned
    node.store.tombstone("s", "alice")
    node.now += remembered_module.TOMBSTONE_NS
    node.store.reap()
    assert node.store.stats().num_tombstones == 0


def test_what_is_remembered_is_bounded(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remembered_module, "MAX_NAMES", 4)
    for number in range(10):
        node.store.tombstone(f"r{number}", "alice")
    assert node.store.stats().num_tombstones == 4
    assert not node.retain("r5").is_tombstoned
    assert node.retain("r6").is_tombstoned


def test_nobody_else_can_pull_renew_or_release(node: Node) -> None:
    transfer = node.retain()
    with pytest.raises(UnknownTransferError, match="not yours"):
        node.store.begin_pull(transfer.id, "mallory")
    assert not node.store.extend_lease(transfer.id, "mallory")
    for name in (transfer.id, "r"):
        assert node.store.release(name, "mallory").outcome is ReleaseOutcome.NOT_FOUND
    assert not node.freed
    assert not node.retain().is_tombstoned
    assert node.store.stats().num_tombstones == 1


def test_an_id_is_good_for_one_pull(node: Node) -> None:
    transfer = node.retain()
    pull = node.store.begin_pull(transfer.id, "alice")
    with pytest.raises(TransferUsedError):
        node.store.begin_pull(transfer.id, "alice")
    assert pull.finish()
    with pytest.raises(UnknownTransferError):
        node.store.begin_pull(transfer.id, "alice")
    assert node.freed == [BLOCKS]
    assert node.store.stats().num_released[ReleaseKind.IN_BAND] == 1


def test_a_pull_that_is_not_finished_lets_go(node: Node) -> None:
    transfer = node.retain()
    with node.store.begin_pull(transfer.id, "alice") as pull:
        assert not node.freed
    assert node.freed == [BLOCKS]
    assert not pull.finish()
    assert node.store.release(transfer.id, "alice").kind is ReleaseKind.IN_BAND


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_blocks_are_free_after_the_last_pin_of_either_direction(
    node: Node, order: tuple[int, int]
) -> None:
    transfer = node.retain()
    told: list[str] = []
    pins = [
        node.store.begin_pull(transfer.id, "alice", on_release=lambda: told.append("send")),
        node.store.pin(transfer.id, "alice", Direction.RECEIVE),
    ]
    assert node.store.view()[0].num_pins == (1, 1)
    released = node.store.release(transfer.id, "alice")
    assert released.is_pinned
    assert told == ["send"]
    assert node.store.stats().num_pinned_blocks == 3
    for index in order:
        assert not node.freed
        assert not pins[index].drop()
        pins[index].drop()
    assert node.freed == [BLOCKS]


def test_a_pull_that_is_over_frees_nothing_that_is_still_received(node: Node) -> None:
    transfer = node.retain()
    receive = node.store.pin(transfer.id, "alice", Direction.RECEIVE)
    assert node.store.begin_pull(transfer.id, "alice").finish()
    assert not node.freed
    receive.drop()
    assert node.freed == [BLOCKS]


def test_a_pin_that_is_dropped_leaves_what_is_retained(node: Node) -> None:
    transfer = node.retain()
    assert node.store.pin(transfer.id, "alice", Direction.RECEIVE).drop()
    assert not node.freed
    assert node.store.begin_pull(transfer.id, "alice").finish()


def test_a_lease_runs_out_unless_somebody_is_heard_of(node: Node) -> None:
    transfer = node.retain()
    node.now = LEASE_NS - 1
    assert node.store.reap() == 0
    assert node.store.extend_lease(transfer.id, "alice")
    node.now = 2 * LEASE_NS - 2
    assert node.store.reap() == 0
    assert node.store.next_deadline() == 2 * LEASE_NS - 1
    node.now += 1
    assert node.store.reap() == 1
    assert node.freed == [BLOCKS]
    assert not node.store.extend_lease(transfer.id, "alice")
    assert node.store.next_deadline() is None


def test_a_lease_that_runs_out_under_a_copy_frees_at_its_end(node: Node) -> None:
    transfer = node.retain()
    told: list[int] = []
    pull = node.store.begin_pull(
        transfer.id, "alice", on_release=lambda: told.append(pull.is_lapsed)
    )
    node.store.release(transfer.id, "alice")
    assert not node.store.extend_lease(transfer.id, "alice")
    node.now = LEASE_NS
    assert node.store.reap() == 0
    assert told == [False, True]
    # Whoever does not stop is reminded.
    node.now = 2 * LEASE_NS
    node.store.reap()
    assert told == [False, True, True]
    assert not node.freed
    assert not pull.finish()
    assert node.freed == [BLOCKS]


def test_a_node_that_was_started_anew_serves_nothing_of_before() -> None:
    old = Node().retain()
    node = Node()
    node.retain()
    with pytest.raises(UnknownTransferError, match="this life"):
        node.store.begin_pull(old.id, "alice")
    assert node.store.release(old.id, "alice").outcome is ReleaseOutcome.NOT_FOUND
    assert not node.freed


def test_what_does_not_fit_stays_with_who_offered_it(node: Node) -> None:
    transfers = [node.retain() for _ in range(3)]
    with pytest.raises(RetainedFullError, match="9 of 10"):
        node.retain()
    node.store.release(transfers[0].id, "alice")
    node.retain()
    assert node.store.stats().num_blocks == 9


def test_a_store_that_is_closed_holds_nothing_but_what_is_copied(node: Node) -> None:
    node.retain()
    pull = node.store.begin_pull(node.retain().id, "alice")
    node.store.close()
    node.store.close()
    assert node.freed == [BLOCKS]
    with pytest.raises(ClosedError):
        node.retain()
    pull.abort()
    assert node.freed == [BLOCKS, BLOCKS]


def test_block_time_is_told_and_what_of_it_was_for_nobody(node: Node) -> None:
    lapsed = node.retain()
    node.now = 400
    node.store.extend_lease(lapsed.id, "alice")
    node.now = 1400
    node.store.reap()
    # Held for 1400, of which nobody was heard of in the last 1000.
    assert (node.store.stats().block_ns, node.store.stats().stranded_block_ns) == (4200, 3000)
    pinned = node.retain()
    pull = node.store.begin_pull(pinned.id, "alice")
    node.now = 1500
    node.store.release(pinned.id, "alice")
    node.now = 1510
    assert (node.store.stats().block_ns, node.store.stats().stranded_block_ns) == (4530, 3030)
    pull.abort()
    assert (node.store.stats().block_ns, node.store.stats().stranded_block_ns) == (4530, 3030)


def test_leases_are_told_by_age(node: Node) -> None:
    node.retain()
    node.now = 10**9
    node.retain()
    by_age = dict(node.store.stats().leases_by_age)
    assert (by_age[0.5], by_age[1.0], by_age[float("inf")]) == (1, 2, 2)


def test_who_fails_to_take_blocks_back_keeps_no_others_from_theirs() -> None:
    freed: list[Sequence[int]] = []

    def take_back(blocks: Sequence[int]) -> None:
        freed.append(blocks)
        if len(freed) == 1:
            raise ZeroDivisionError

    store = RetainedStore(10, LEASE_NS, lambda: 0, take_back)
    for _ in range(2):
        store.retain("alice", BLOCKS, TransferMeta("r"))
    with pytest.raises(ZeroDivisionError):
        store.reap(LEASE_NS)
    assert freed == [BLOCKS, BLOCKS]


def test_a_lease_runs_out_with_nothing_else_happening(caplog: pytest.LogCaptureFixture) -> None:
    freed: list[Sequence[int]] = []

    def take_back(blocks: Sequence[int]) -> None:
        freed.append(blocks)
        raise ZeroDivisionError("the first to be given back")

    store = RetainedStore(10, 10**6, on_free=take_back)
    with Reaper(store) as reaper:
        store.retain("alice", BLOCKS, TransferMeta("r"))
        wait_until(lambda: len(freed) == 1)
        # What failed has not ended the timer.
        store.retain("alice", BLOCKS, TransferMeta("s"))
        wait_until(lambda: len(freed) == 2)
        reaper.close()
    assert "the first to be given back" in caplog.text


@pytest.mark.parametrize(("capacity", "lease_ns"), [(-1, 1), (1, 0)])
def test_a_store_of_no_sense_is_refused(capacity: int, lease_ns: int) -> None:
    with pytest.raises(ValueError, match="store for"):
        RetainedStore(capacity, lease_ns)
