"""Real nodes over a network that fails when hypothesis wants it to.

One node retains, the other pulls, over real sockets; the clock is the machine's, links are cut
from either side, and a copy is held in its middle for as long as the machine likes. A block that is
freed is written over at once, so that a copy of it that is taken for good is seen.
"""

from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from disconnect_watch import CancelToken
from disconnect_watch.disagg import (
    KVBlocks,
    ReleaseKind,
    ReleaseOutcome,
    Ticket,
    TransferError,
    TransferMeta,
)
from tests.disagg.nodes import NUM_BLOCKS, Rig, rig
from tests.support.net import PATIENCE, wait_until

if TYPE_CHECKING:
    from concurrent.futures import Future

pytestmark = pytest.mark.slow

OWNERS = ("alice", "bob")
#: Of what was freed.
CANARY = 0xEE


@dataclass
class Pulling:
    """The copy that is held in its middle, and what it must copy."""

    future: "Future[None]"
    token: CancelToken
    blocks: tuple[int, ...]
    content: bytes
    is_doomed: bool = False


class DisaggMachine(RuleBasedStateMachine):
    """Blocks are retained, pulled and let go; links fail, leases run out, clients leave."""

    tickets = Bundle("tickets")

    @initialize(transport=st.sampled_from(["local", "shm", "tcp"]))
    def start(self, transport: str) -> None:
        self.stack = ExitStack()
        self.nodes: Rig = self.stack.enter_context(rig(transport))
        self.transport = transport
        self.free = list(range(NUM_BLOCKS))
        self.retained: dict[str, tuple[int, ...]] = {}
        self.number = 0
        self.pulling: Pulling | None = None
        self.tombstones: set[tuple[str, str]] = set()

    def take_freed(self) -> None:
        """Blocks that came back are anybody's, at once."""
        freed = self.nodes.freed
        while freed:
            blocks = freed.pop(0)
            assert not set(blocks) & set(self.free), "blocks came back twice"
            self.nodes.source.array[:, :, list(blocks)] = CANARY
            self.free += blocks

    @rule(target=tickets, size=st.integers(3, 6), owner=st.sampled_from(OWNERS))
    def retain(self, size: int, owner: str) -> tuple[Ticket, str]:
        self.number += 1
        return self.retain_as(f"r{self.number}", size, owner)

    def retain_as(self, request_id: str, size: int, owner: str) -> tuple[Ticket, str]:
        if len(self.free) < size:
            size = 0
        blocks = tuple(self.free[:size])
        del self.free[:size]
        for block in blocks:
            self.nodes.source.block(block)[:] = self.number % CANARY
        transfer = self.nodes.store.retain(owner, blocks, TransferMeta(request_id))
        assert transfer.is_tombstoned is ((owner, request_id) in self.tombstones)
        self.tombstones.discard((owner, request_id))
        self.retained[transfer.id] = blocks
        return self.nodes.ticket(transfer), request_id

    @rule(target=tickets, size=st.integers(3, 6), owner=st.sampled_from(OWNERS))
    def let_go_and_retain(self, size: int, owner: str) -> tuple[Ticket, str]:
        """The release of a request is there first."""
        self.number += 1
        request_id = f"r{self.number}"
        released = self.nodes.connector.tombstone(self.address(), request_id, owner)
        assert released.outcome is ReleaseOutcome.NOT_FOUND
        self.tombstones.add((owner, request_id))
        return self.retain_as(request_id, size, owner)

    def address(self) -> str:
        return "local:" if self.nodes.server is None else self.nodes.server.address

    @rule(
        given=tickets,
        is_local=st.booleans(),
        by_request=st.booleans(),
        is_foreign=st.booleans(),
        kind=st.sampled_from(ReleaseKind),
    )
    def release(
        self,
        given: tuple[Ticket, str],
        is_local: bool,
        by_request: bool,
        is_foreign: bool,
        kind: ReleaseKind,
    ) -> None:
        ticket, request_id = given
        owner = ticket.owner if not is_foreign else "mallory"
        held = {view.id: view for view in self.nodes.store.view()}.get(ticket.transfer_id)
        if is_local or by_request:
            name = request_id if by_request else ticket.transfer_id
            released = self.nodes.store.release(name, owner, kind)
        else:
            named = Ticket(ticket.address, ticket.transfer_id, owner, ticket.lease_ns)
            released = self.nodes.connector.release(named, kind)
        if is_foreign:
            assert released.outcome is ReleaseOutcome.NOT_FOUND
        elif held is not None and held.released is None:
            assert released.outcome is ReleaseOutcome.RELEASED
            assert released.num_blocks == held.num_blocks
            if held.is_used and self.pulling is not None:
                self.pulling.is_doomed = True
        else:
            assert released.outcome is ReleaseOutcome.ALREADY_RELEASED

    @rule(given=tickets)
    def renew(self, given: tuple[Ticket, str]) -> None:
        ticket, _ = given
        held = {view.id: view for view in self.nodes.store.view()}.get(ticket.transfer_id)
        is_there = self.nodes.connector.extend_lease(ticket)
        assert is_there is (held is not None and held.released is None)

    @rule(part=st.sampled_from([0.4, 0.7, 1.0]))
    def wait(self, part: float) -> None:
        self.nodes.now[0] += int(part * self.nodes.store.lease_ns)
        self.nodes.store.reap()
        if self.pulling is not None and not self.is_whole():
            self.pulling.is_doomed = True

    def is_whole(self) -> bool:
        """Whether nobody has released what is pulled."""
        return any(view.is_used and view.released is None for view in self.nodes.store.view())

    @precondition(lambda self: self.pulling is None)
    @rule(given=tickets)
    def begin_pull(self, given: tuple[Ticket, str]) -> None:
        ticket, _ = given
        nodes = self.nodes
        held = {view.id: view for view in nodes.store.view()}.get(ticket.transfer_id)
        blocks = self.retained[ticket.transfer_id]
        into = KVBlocks(nodes.into, range(len(blocks)))
        if not blocks:
            return
        if held is None or held.released is not None:
            with pytest.raises(TransferError):
                nodes.connector.pull(ticket, into)
            return
        assert not held.is_used
        content = nodes.source.array[:, :, list(blocks)].tobytes()
        token = CancelToken()
        nodes.into.arm(1)
        future = nodes.pool.submit(nodes.connector.pull, ticket, into, cancel=token)
        nodes.into.wait()
        self.pulling = Pulling(future, token, blocks, content)

    @precondition(lambda self: self.pulling is not None)
    @rule(cancel=st.booleans())
    def end_pull(self, cancel: bool) -> None:
        pulling = self.pulling
        assert pulling is not None
        if cancel:
            pulling.token.cancel()
        self.nodes.into.hold_at = None
        self.nodes.into.open()
        try:
            pulling.future.result(PATIENCE)
        except TransferError:
            assert cancel or pulling.is_doomed
        else:
            # Over TCP all of it may have been sent before.
            assert not cancel
            got = self.nodes.into.array[:, :, : len(pulling.blocks)].tobytes()
            assert got == pulling.content
        wait_until(lambda: not any(view.is_used for view in self.nodes.store.view()))
        self.pulling = None

    @precondition(lambda self: self.pulling is not None and self.nodes.server is not None)
    @rule(from_server=st.booleans())
    def cut(self, from_server: bool) -> None:
        """Every connection ends, on whichever side."""
        assert self.pulling is not None
        for channel in self.nodes.channels(of_server=from_server):
            channel.shutdown()
        self.pulling.is_doomed = True
        # The node that retains sees it, and has nothing to keep the blocks for.
        wait_until(lambda: not any(view.is_used for view in self.nodes.store.view()))

    @invariant()
    def adds_up(self) -> None:
        if not hasattr(self, "nodes"):
            return
        pulling = self.pulling
        if pulling is not None and self.transport != "tcp" and not self.nodes.freed:
            # Whoever reads our memory is known, so what it reads is held.
            is_held = any(view.is_used for view in self.nodes.store.view())
            assert is_held or pulling.is_doomed
        self.take_freed()
        stats = self.nodes.store.stats()
        assert stats.num_blocks <= NUM_BLOCKS - len(self.free)

    def teardown(self) -> None:
        if not hasattr(self, "nodes"):
            return
        if self.pulling is not None:
            self.end_pull(cancel=True)
        self.nodes.now[0] += 2 * self.nodes.store.lease_ns
        self.nodes.store.reap()
        self.take_freed()
        assert sorted(self.free) == list(range(NUM_BLOCKS))
        assert self.nodes.store.stats().num_blocks == 0
        self.stack.close()


TestDisaggMachine = DisaggMachine.TestCase
TestDisaggMachine.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
