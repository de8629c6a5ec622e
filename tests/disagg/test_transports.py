"""What holds of every way from one node to another."""

from collections.abc import Iterator

import numpy as np
import pytest

from disconnect_watch import CancelToken
from disconnect_watch.disagg import (
    KVBlocks,
    KVLayout,
    KVMemory,
    LayoutError,
    ReleaseKind,
    ReleaseOutcome,
    Ticket,
    TransferCancelledError,
    TransferError,
    TransferUsedError,
    UnknownTransferError,
)
from tests.disagg.nodes import LAYOUT, NUM_BLOCKS, SMALL, TRANSPORTS, Rig, rig
from tests.support.net import PATIENCE, wait_until


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def nodes(transport: str) -> Iterator[Rig]:
    with rig(transport) as nodes:
        yield nodes


@pytest.mark.parametrize("layout", [SMALL, LAYOUT], ids=["small", "large"])
def test_a_pull_copies_the_blocks_in_their_order_and_lets_go(
    transport: str, layout: KVLayout
) -> None:
    with rig(transport, layout) as nodes:
        source, into = (5, 2, 9, 7, 1, 0, 3, 4), (8, 0, 1, 2, 11, 10, 3, 4)
        ticket = nodes.ticket(nodes.retain(source))
        nodes.pull(ticket, into)
        for theirs, ours in zip(source, into, strict=True):
            assert np.array_equal(nodes.into.block(ours), nodes.source.block(theirs))
        untouched = [block for block in range(NUM_BLOCKS) if block not in into]
        assert not nodes.into.array[:, :, untouched].any()
        assert nodes.freed == [source]
        assert nodes.store.stats().num_released[ReleaseKind.IN_BAND] == 1
        released = nodes.connector.release(ticket)
        assert (released.outcome, released.kind) == (
            ReleaseOutcome.ALREADY_RELEASED,
            ReleaseKind.IN_BAND,
        )


def test_what_is_not_wanted_is_released_unpulled(nodes: Rig) -> None:
    ticket = nodes.ticket(nodes.retain())
    released = nodes.connector.release(ticket)
    assert (released.outcome, released.kind) == (ReleaseOutcome.RELEASED, ReleaseKind.IN_BAND)
    assert (released.num_blocks, released.is_pinned) == (4, False)
    assert nodes.freed == [(5, 2, 9, 7)]
    with pytest.raises(UnknownTransferError):
        nodes.pull(ticket)


def test_a_request_is_let_go_before_it_is_there(nodes: Rig) -> None:
    address = nodes.ticket(nodes.retain()).address
    nodes.store.release("r", "alice")
    assert nodes.connector.tombstone(address, "s", "alice").outcome is ReleaseOutcome.NOT_FOUND
    assert nodes.store.stats().num_tombstones == 1


def test_a_lease_is_renewed_while_it_is_there(nodes: Rig) -> None:
    ticket = nodes.ticket(nodes.retain())
    nodes.now[0] += ticket.lease_ns - 1
    assert nodes.connector.extend_lease(ticket)
    nodes.now[0] += ticket.lease_ns - 1
    assert nodes.store.reap() == 0
    nodes.lapse()
    assert not nodes.connector.extend_lease(ticket)


def test_a_ticket_is_good_for_one_pull(nodes: Rig) -> None:
    ticket = nodes.ticket(nodes.retain())
    pull = nodes.start_pull(ticket)
    nodes.into.hold_at = None
    with pytest.raises(TransferUsedError):
        nodes.pull(ticket, (4, 5, 6, 7))
    nodes.into.open()
    pull.result(PATIENCE)
    with pytest.raises(UnknownTransferError):
        nodes.pull(ticket)


def test_nobody_elses_ticket_is_good_for_anything(nodes: Rig) -> None:
    ticket = nodes.ticket(nodes.retain())
    foreign = Ticket(ticket.address, ticket.transfer_id, "mallory", ticket.lease_ns)
    with pytest.raises(UnknownTransferError):
        nodes.pull(foreign)
    assert nodes.connector.release(foreign).outcome is ReleaseOutcome.NOT_FOUND
    assert not nodes.connector.extend_lease(foreign)
    assert not nodes.freed


@pytest.mark.parametrize("num_blocks", [3, 5])
def test_another_number_of_blocks_is_refused_and_let_go(nodes: Rig, num_blocks: int) -> None:
    ticket = nodes.ticket(nodes.retain())
    with pytest.raises(LayoutError, match="not as many"):
        nodes.pull(ticket, range(num_blocks))
    assert nodes.freed == [(5, 2, 9, 7)]


def test_blocks_of_another_model_are_refused_and_let_go(nodes: Rig) -> None:
    ticket = nodes.ticket(nodes.retain())
    layout = KVLayout(2, 4, 1, 4, "float16")
    assert layout.block_bytes == SMALL.block_bytes
    with pytest.raises(LayoutError, match="not alike"):
        nodes.connector.pull(ticket, KVBlocks(KVMemory.empty(layout, 4), range(4)))
    assert nodes.freed == [(5, 2, 9, 7)]


def test_who_cancelled_before_pulls_nothing_and_lets_go(nodes: Rig) -> None:
    ticket = nodes.ticket(nodes.retain())
    token = CancelToken()
    token.cancel()
    with pytest.raises(TransferCancelledError):
        nodes.pull(ticket, cancel=token)
    assert nodes.freed == [(5, 2, 9, 7)]
    assert not nodes.into.array.any()


@pytest.mark.parametrize("layout", [SMALL, LAYOUT], ids=["small", "large"])
def test_a_cancel_midway_stops_the_copy_and_lets_go(transport: str, layout: KVLayout) -> None:
    with rig(transport, layout) as nodes:
        token = CancelToken()
        pull = nodes.start_pull(nodes.ticket(nodes.retain()), token)
        assert not nodes.freed
        token.cancel()
        nodes.into.open()
        with pytest.raises(TransferCancelledError):
            pull.result(PATIENCE)
        wait_until(lambda: nodes.freed == [(5, 2, 9, 7)])
        assert nodes.store.stats().num_released[ReleaseKind.LEASE] == 0
        # No more is written than the block that was under way.
        assert not nodes.into.array[:, :, 3].any()


@pytest.mark.parametrize("layout", [SMALL, LAYOUT], ids=["small", "large"])
def test_a_release_midway_stops_the_copy_and_frees_when_it_has_stopped(
    transport: str, layout: KVLayout
) -> None:
    with rig(transport, layout) as nodes:
        transfer = nodes.retain((5, 2, 9, 7, 1, 0, 3, 4))
        ticket = nodes.ticket(transfer)
        nodes.into.arm(2)
        pull = nodes.pool.submit(nodes.pull, ticket, range(8))
        nodes.into.wait()
        released = nodes.store.release(transfer.id, "alice")
        if transport in ("local", "shm"):
            # Who copies is not where the store is, and may be in the middle of a block.
            assert released.is_pinned
            if transport == "shm":
                [channel] = nodes.channels(of_server=False)
                wait_until(channel.has_news)
            assert not nodes.freed
        nodes.into.open()
        if layout is LAYOUT or transport in ("local", "shm"):
            with pytest.raises(TransferError):
                pull.result(PATIENCE)
        wait_until(lambda: nodes.freed == [(5, 2, 9, 7, 1, 0, 3, 4)])
        assert nodes.store.stats().num_released[ReleaseKind.ABORT] == 1


@pytest.mark.parametrize("transport", TRANSPORTS[1:], indirect=True)
def test_who_keeps_pulling_after_its_lease_has_nothing_of_it(transport: str) -> None:
    with rig(transport, LAYOUT) as nodes:
        pull = nodes.start_pull(nodes.ticket(nodes.retain((5, 2, 9, 7))))
        nodes.lapse()
        wait_until(lambda: nodes.freed == [(5, 2, 9, 7)])
        assert nodes.store.stats().num_released[ReleaseKind.LEASE] == 1
        assert not pull.done()
        nodes.into.open()
        with pytest.raises(TransferError):
            pull.result(PATIENCE)
