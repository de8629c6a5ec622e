"""What goes wrong between two hosts: strangers, changed bytes, nodes that go away."""

import socket
import threading

import numpy as np
import pytest

from disconnect_watch.disagg import (
    Connector,
    KVBlocks,
    KVMemory,
    PeerLostError,
    Pull,
    ReleaseOutcome,
    RetainedStore,
    Ticket,
    TransferCancelledError,
    TransferError,
    TransferMeta,
    UnknownTransferError,
)
from disconnect_watch.disagg.channel import Channel, Interrupt
from disconnect_watch.disagg.frames import FrameKind, expect, receive, send
from disconnect_watch.disagg.server import MAX_CONNECTIONS
from disconnect_watch.disagg.shm import SharedMemory, ShmPeer
from disconnect_watch.disagg.tcp import TcpPeer, TcpServer
from disconnect_watch.ports import bind
from tests.disagg.nodes import KEY, LAYOUT, LEASE_NS, NUM_BLOCKS, SMALL, dialler, rig, serving
from tests.support.net import PATIENCE, wait_until


@pytest.mark.parametrize("side", ["server", "peer"])
def test_who_does_not_know_the_key_gets_nothing(side: str) -> None:
    with rig("tcp") as nodes:
        assert nodes.server is not None
        ticket = nodes.ticket(nodes.retain())
        keys = {"server": (b"another key of such a length", KEY), "peer": (KEY, KEY[::-1])}
        server = TcpServer(nodes.store, nodes.source, bind("127.0.0.1", 0), key=keys[side][0])
        peer = TcpPeer(server.address, key=keys[side][1], timeout=PATIENCE)
        try:
            with pytest.raises(PeerLostError):
                peer.extend_lease(ticket.transfer_id, "alice")
        finally:
            peer.close()
            server.close()
        assert not nodes.freed


def test_who_proves_nothing_is_not_listened_to() -> None:
    with rig("tcp") as nodes:
        transfer = nodes.retain()
        assert nodes.server is not None
        channel = Channel()
        channel.timeout = PATIENCE
        port = int(nodes.server.address.rpartition(":")[2])
        channel.connect([(socket.AF_INET, ("127.0.0.1", port))])
        expect(channel, FrameKind.HELLO)
        send(channel, FrameKind.HELLO, nonce="0" * 64, mac="0" * 64)
        with pytest.raises(PeerLostError):
            send(channel, FrameKind.RELEASE, name=transfer.id, owner="alice", kind="abort")
            receive(channel)
        channel.close()
        assert not nodes.freed


def test_a_server_that_does_not_know_the_key_is_told_nothing() -> None:
    """One that answers as a server would, but for the proof."""
    with bind("127.0.0.1", 0) as listening:
        listening.listen()
        seen: list[bytes] = []

        def pretend() -> None:
            channel = Channel(listening.accept()[0])
            channel.timeout = PATIENCE
            send(channel, FrameKind.HELLO, version=1, nonce="0" * 64)
            theirs = expect(channel, FrameKind.HELLO).body
            # What it was given is no proof of its own.
            send(channel, FrameKind.HELLO, mac=theirs["mac"])
            while True:
                try:
                    seen.append(bytes(channel.recv(1)))
                except PeerLostError:
                    channel.close()
                    return

        thread = threading.Thread(target=pretend)
        thread.start()
        peer = TcpPeer(f"tcp://127.0.0.1:{listening.getsockname()[1]}", key=KEY, timeout=PATIENCE)
        with pytest.raises(PeerLostError, match="does not know the key"):
            peer.release("r", "alice", ReleaseOutcome.RELEASED)  # type: ignore[arg-type]
        peer.close()
        thread.join(PATIENCE)
        assert not seen


def test_a_request_of_no_sense_ends_its_connection_alone(caplog: pytest.LogCaptureFixture) -> None:
    with rig("tcp") as nodes:
        peer = dialler("tcp")(nodes.ticket(nodes.retain()).address)
        assert isinstance(peer, TcpPeer)
        with pytest.raises(PeerLostError):
            peer._call(FrameKind.RELEASE, FrameKind.RELEASED, name="r")
        with pytest.raises(PeerLostError):
            peer._call(FrameKind.DONE, FrameKind.RELEASED)
        assert peer.extend_lease("none", "alice") is False
        peer.close()
    assert "no frame of ours" in caplog.text


@pytest.mark.parametrize("transport", ["shm", "tcp", "tls"])
def test_a_node_that_goes_away_midway_is_lost(transport: str) -> None:
    with rig(transport, LAYOUT) as nodes:
        assert nodes.server is not None
        pull = nodes.start_pull(nodes.ticket(nodes.retain()))
        nodes.server.close()
        nodes.into.open()
        with pytest.raises(TransferError):
            pull.result(PATIENCE)
        # The pull was the only way to have them.
        assert nodes.freed == [(5, 2, 9, 7)]


class ReleasedAtItsEnd(TcpServer):
    """A node whose client leaves between the last byte and the word that it was the last."""

    def _send_blocks(self, channel: Channel, pull: Pull, interrupt: Interrupt, credit: int) -> None:
        super()._send_blocks(channel, pull, interrupt, credit)
        self._store.release(pull.transfer.id, pull.transfer.owner)


def test_what_was_released_at_its_end_is_no_good() -> None:
    with rig("tcp") as nodes:
        ticket = nodes.ticket(nodes.retain())
        server = ReleasedAtItsEnd(nodes.store, nodes.source, bind("127.0.0.1", 0), key=KEY)
        late = Ticket(server.address, ticket.transfer_id, ticket.owner, ticket.lease_ns)
        with pytest.raises(TransferCancelledError, match="before its end"):
            nodes.pull(late)
        assert nodes.freed == [(5, 2, 9, 7)]
        server.close()


@pytest.mark.parametrize("transport", ["shm", "tcp", "tls"])
def test_a_connector_that_is_closed_ends_its_pulls_and_lets_go(transport: str) -> None:
    with rig(transport, LAYOUT) as nodes:
        ticket = nodes.ticket(nodes.retain())
        pull = nodes.start_pull(ticket)
        nodes.connector.close()
        nodes.into.open()
        with pytest.raises(TransferError):
            pull.result(PATIENCE)
        wait_until(lambda: nodes.freed)
        assert nodes.store.stats().num_tombstones == 0
        with pytest.raises(PeerLostError, match="closed"):
            nodes.connector.extend_lease(ticket)


@pytest.mark.parametrize("transport", ["shm", "tcp", "tls"])
def test_a_node_that_is_started_anew_is_reached_and_serves_nothing_of_before(
    transport: str,
) -> None:
    with (
        SharedMemory(SMALL, NUM_BLOCKS) as before,
        SharedMemory(SMALL, NUM_BLOCKS) as after,
    ):
        after.memory.array[:] = 7
        dial = dialler(transport)
        own = RetainedStore(0, LEASE_NS)
        stores = [RetainedStore(NUM_BLOCKS, LEASE_NS) for _ in range(2)]
        with bind("127.0.0.1", 0) as held:
            port = held.getsockname()[1]
            with serving(transport, stores[0], before, port=port) as server:
                assert server is not None
                addresses = [server.address]
                peer = dial(server.address)
                old = stores[0].retain("alice", [1], TransferMeta("r"))
                assert peer.extend_lease(old.id, "alice")
            with serving(transport, stores[1], after, port=port, at=addresses[0]) as server:
                assert server is not None
                assert server.address == addresses[0]
                into = KVMemory.empty(SMALL, 2)
                # The kept connection has ended, which is no reason to fail.
                assert not peer.extend_lease(old.id, "alice")
                with pytest.raises(UnknownTransferError, match="this life"):
                    peer.pull(old.id, "alice", KVBlocks(into, [1]), None)
                new = stores[1].retain("alice", [1], TransferMeta("r"))
                peer.pull(new.id, "alice", KVBlocks(into, [1]), None)
                assert np.array_equal(into.block(1), after.memory.block(1))
                peer.close()
        own.close()


def test_memory_that_is_another_users_is_not_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    with rig("shm") as nodes:
        ticket = nodes.ticket(nodes.retain())
        monkeypatch.setattr("os.geteuid", lambda: 12345)
        monkeypatch.setattr("disconnect_watch.disagg.shm.ROOT", 54321)
        with pytest.raises(PeerLostError, match=r"of one user|closed"):
            nodes.connector.extend_lease(ticket)


def test_no_more_connections_are_kept_than_there_is_room_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert MAX_CONNECTIONS > 1
    monkeypatch.setattr("disconnect_watch.disagg.server.MAX_CONNECTIONS", 1)
    with rig("tcp") as nodes:
        assert nodes.server is not None
        ticket = nodes.ticket(nodes.retain())
        assert nodes.connector.extend_lease(ticket)
        other = dialler("tcp")(nodes.server.address)
        with pytest.raises(PeerLostError):
            other.extend_lease(ticket.transfer_id, "alice")
        other.close()
        assert nodes.connector.extend_lease(ticket)


@pytest.mark.parametrize("address", ["http://127.0.0.1:1", "tcp://127.0.0.1", "127.0.0.1:1"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="give tcp://"):
        TcpPeer(address, key=KEY)


def test_tls_is_what_both_sides_say(tmp_path: object) -> None:
    with pytest.raises(ValueError, match="TLS is not set up"):
        TcpPeer("tls://127.0.0.1:1", key=KEY)


def test_a_key_that_can_be_guessed_is_refused() -> None:
    with pytest.raises(ValueError, match="key of 6 bytes"):
        TcpPeer("tcp://127.0.0.1:1", key=b"secret")


def test_nobody_at_an_address_is_a_peer_that_is_lost() -> None:
    with bind("127.0.0.1", 0) as held:
        port = held.getsockname()[1]
        for peer in (
            TcpPeer(f"tcp://localhost:{port}", key=KEY, timeout=PATIENCE),
            ShmPeer("shm:/nowhere/at/all"),
        ):
            with pytest.raises(PeerLostError, match="connect to"):
                peer.extend_lease("none", "alice")
            peer.close()


def test_a_ticket_of_a_node_that_was_never_there_leaves_nothing_behind() -> None:
    memory = KVMemory.empty(SMALL, 1)
    with Connector(RetainedStore(1, LEASE_NS), memory, dial=dialler("local")) as connector:
        ticket = Ticket("local:elsewhere", "none", "alice", LEASE_NS)
        for _ in range(2):
            with pytest.raises(PeerLostError):
                connector.pull(ticket, KVBlocks(memory, [0]))
