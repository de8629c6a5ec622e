"""What is a frame, and what ends the wait for one."""

import select
import socket
import zlib
from collections.abc import Iterator

import pytest

from disconnect_watch.disagg import PeerLostError, TransferCancelledError
from disconnect_watch.disagg.channel import Channel, Interrupt
from disconnect_watch.disagg.frames import FrameKind, expect, receive, send, send_data
from tests.support.net import PATIENCE


@pytest.fixture
def ends() -> Iterator[tuple[Channel, socket.socket]]:
    """A channel, and the plain socket at its other end."""
    one, other = socket.socketpair()
    channel = Channel(one)
    channel.timeout = PATIENCE
    with other:
        yield channel, other
        channel.close()


def bytes_of(kind: FrameKind) -> bytes:
    one, other = socket.socketpair()
    with other:
        channel = Channel(one)
        if kind is FrameKind.DATA:
            send_data(channel, 3, 64, memoryview(b"keys and values"))
        else:
            send(channel, kind, name="r", owner="alice")
        channel.close()
        return other.recv(4096)


@pytest.mark.parametrize("kind", [FrameKind.RELEASE, FrameKind.DATA])
def test_no_byte_of_a_frame_can_be_changed(kind: FrameKind) -> None:
    whole = bytes_of(kind)
    for place in range(len(whole)):
        one, other = socket.socketpair()
        channel = Channel(one)
        changed = bytearray(whole)
        changed[place] ^= 1
        with other:
            other.sendall(changed)
            other.shutdown(socket.SHUT_WR)
            with pytest.raises(PeerLostError):
                receive(channel)
        channel.close()


@pytest.mark.parametrize("payload", [b"[]", b"{", b"\xff"], ids=["no-object", "cut", "no-text"])
def test_a_body_that_is_no_object_is_no_frame(
    ends: tuple[Channel, socket.socket], payload: bytes
) -> None:
    channel, other = ends
    head = bytes([FrameKind.HELLO, 0, 0, 0]) + len(payload).to_bytes(4, "big")
    checksum = zlib.crc32(payload, zlib.crc32(head))
    other.sendall(head + checksum.to_bytes(4, "big") + payload)
    with pytest.raises(PeerLostError, match="no JSON"):
        receive(channel)


@pytest.mark.parametrize("head", [b"GET / HTTP/1", b"\x01\0\0\0\x7f\xff\xff\xff\0\0\0\0"])
def test_a_stranger_is_not_listened_to_for_long(
    ends: tuple[Channel, socket.socket], head: bytes
) -> None:
    channel, other = ends
    other.sendall(head)
    with pytest.raises(PeerLostError, match="not our protocol"):
        receive(channel)


def test_another_frame_than_is_due_ends_it(ends: tuple[Channel, socket.socket]) -> None:
    channel, other = ends
    other.sendall(bytes_of(FrameKind.RELEASE))
    with pytest.raises(PeerLostError, match="RELEASE where HELLO was due"):
        expect(channel, FrameKind.HELLO)


def test_silence_is_not_listened_to_for_ever(ends: tuple[Channel, socket.socket]) -> None:
    channel, _ = ends
    channel.timeout = 0.001
    with pytest.raises(PeerLostError, match="silent"):
        receive(channel)


def test_an_interrupt_is_set_whenever_and_as_often_as_anybody_likes(
    ends: tuple[Channel, socket.socket],
) -> None:
    channel, other = ends
    with Interrupt() as interrupt, channel.interrupted_by(interrupt):
        for _ in range(5000):  # more than its socket holds
            interrupt.set()
        with pytest.raises(TransferCancelledError):
            channel.wait()
        # Whoever took notice waits for the next, not for what is left of the last.
        interrupt.clear()
        assert not select.select([interrupt], [], [], 0)[0]
        other.sendall(b".")
        channel.wait()
        interrupt.set()
        with pytest.raises(TransferCancelledError):
            channel.check()
    interrupt.set()
