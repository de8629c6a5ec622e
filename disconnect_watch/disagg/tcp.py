"""Blocks between hosts, over TCP or TLS.

Each side proves that it knows the nodes' common key before anything else is said, and none of
it says the key. Whoever can change packets on the way can still take over from there: use TLS
where that is not the same people.

The prefill node sends pieces of blocks, so many ahead as the decode node has given credit for. A
decode node that does not read is given no more, and its lease runs out; the transfer is then cut
where it is.
"""

import hashlib
import hmac
import secrets
import socket
import ssl
from urllib.parse import urlsplit

import numpy as np

from disconnect_watch.disagg.channel import Channel, Interrupt
from disconnect_watch.disagg.errors import PeerLostError, TransferCancelledError
from disconnect_watch.disagg.frames import (
    CHUNK_BYTES,
    Frame,
    FrameKind,
    expect,
    send,
    send_data,
)
from disconnect_watch.disagg.kv import KVBlocks, KVMemory
from disconnect_watch.disagg.peer import CREDIT, RemotePeer
from disconnect_watch.disagg.pins import Pull
from disconnect_watch.disagg.retained import RetainedStore
from disconnect_watch.disagg.server import HANDSHAKE_S, TransferServer

__all__ = ["TcpPeer", "TcpServer"]

VERSION = 1
MIN_KEY_BYTES = 16
#: Seconds of silence after which the kernel asks an idle connection's other side, and between
#: the three times that it does.
KEEPALIVE_S = (10, 5, 3)
#: Seconds in which a decode node that reads nothing must take the word that it is cut off.
GOODBYE_S = 1.0


class TcpServer(TransferServer):
    """Sends what a store retains to nodes that know the key.

    Args:
        listening: a bound TCP socket; the server's from here on.
        key: that all nodes have in common, 16 bytes or more.
        tls: of a server, with its certificate; None for none.
        host: how others reach it, where that is not the address that it is bound to.
    """

    def __init__(
        self,
        store: RetainedStore,
        memory: KVMemory,
        listening: socket.socket,
        *,
        key: bytes,
        tls: ssl.SSLContext | None = None,
        host: str | None = None,
    ) -> None:
        self._key = _checked(key)
        self._tls = tls
        bound, port = listening.getsockname()[:2]
        self._address = f"{'tls' if tls else 'tcp'}://{_in_url(host or bound)}:{port}"
        listening.listen(64)
        super().__init__(store, memory, listening)

    @property
    def address(self) -> str:
        return self._address

    def _greet(self, channel: Channel) -> None:
        _tune(channel.sock)
        if self._tls is not None:
            channel.start_tls(self._tls, None)
        ours = secrets.token_hex(32)
        send(channel, FrameKind.HELLO, version=VERSION, nonce=ours)
        hello = expect(channel, FrameKind.HELLO).body
        theirs = str(hello["nonce"])
        if not hmac.compare_digest(str(hello["mac"]), _mac(self._key, "decode", ours, theirs)):
            raise PeerLostError("greet: the other node does not know the key")
        send(channel, FrameKind.HELLO, mac=_mac(self._key, "prefill", ours, theirs))

    def _send_blocks(self, channel: Channel, pull: Pull, interrupt: Interrupt, credit: int) -> None:
        send(channel, FrameKind.ACCEPTED)
        for index, block in enumerate(pull.blocks):
            data = memoryview(self._memory.block(block).tobytes())
            for offset in range(0, len(data), CHUNK_BYTES):
                while credit < 1:
                    credit += self._take_credit(channel, pull)
                send_data(channel, index, offset, data[offset : offset + CHUNK_BYTES])
                credit -= 1
        while self._take_credit(channel, pull):
            pass

    def _take_credit(self, channel: Channel, pull: Pull) -> int:
        """Wait for the other side to let us send more; 0 if it has all."""
        try:
            frame = expect(channel, FrameKind.CREDIT, FrameKind.DONE)
        except TransferCancelledError:
            # Between two frames, so that it can be told; but not for its sake stay pinned.
            pull.abort()
            channel.timeout = GOODBYE_S
            with channel.interrupted_by(None):
                send(channel, FrameKind.CANCELLED)
            raise
        if frame.kind is FrameKind.DONE:
            return 0
        self._renew(pull)
        return max(1, int(frame.body["num_frames"]))


class TcpPeer(RemotePeer):
    """A node on another host.

    Args:
        address: of its ``TcpServer``, ``tcp://host:port`` or ``tls://host:port``.
        key: see ``TcpServer``.
        tls: of a client, which knows who signed the server's certificate; for ``tls:`` only.
        timeout: see ``RemotePeer``.

    Raises:
        ValueError: the address is none.
    """

    def __init__(
        self,
        address: str,
        *,
        key: bytes,
        tls: ssl.SSLContext | None = None,
        timeout: float = HANDSHAKE_S,
    ) -> None:
        super().__init__(timeout=timeout)
        self._key = _checked(key)
        url = urlsplit(address)
        if url.scheme not in ("tcp", "tls") or not url.hostname or not url.port:
            raise ValueError(f"address {address!r}: give tcp://host:port or tls://host:port")
        if (url.scheme == "tls") is not (tls is not None):
            raise ValueError(f"address {address!r}: TLS is {'' if tls else 'not '}set up here")
        self._host = url.hostname
        self._port = url.port
        self._tls = tls

    def _greet(self, channel: Channel) -> None:
        try:
            found = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:  # the latter of what can be no name of a host
            raise PeerLostError(f"look up {self._host}: {error}") from error
        channel.connect((family, address) for family, _, _, _, address in found)
        _tune(channel.sock)
        if self._tls is not None:
            channel.start_tls(self._tls, self._host)
        hello = expect(channel, FrameKind.HELLO).body
        if hello.get("version") != VERSION:
            raise PeerLostError(f"greet {self._host}: version {hello.get('version')}")
        theirs, ours = str(hello["nonce"]), secrets.token_hex(32)
        send(channel, FrameKind.HELLO, nonce=ours, mac=_mac(self._key, "decode", theirs, ours))
        mac = str(expect(channel, FrameKind.HELLO).body["mac"])
        if not hmac.compare_digest(mac, _mac(self._key, "prefill", theirs, ours)):
            raise PeerLostError(f"greet {self._host}: that node does not know the key")

    def _receive_blocks(self, channel: Channel, accepted: Frame, into: KVBlocks) -> None:
        num_bytes = into.memory.layout.block_bytes
        num_received = 0
        for index, block in enumerate(into.block_ids):
            piece = np.empty(num_bytes, np.uint8)
            for offset in range(0, num_bytes, CHUNK_BYTES):
                frame = expect(channel, FrameKind.DATA, FrameKind.CANCELLED)
                if frame.kind is FrameKind.CANCELLED:
                    raise TransferCancelledError("pull: the transfer was released midway")
                end = min(offset + CHUNK_BYTES, num_bytes)
                if frame.place != (index, offset) or len(frame.data) != end - offset:
                    raise PeerLostError(f"pull: piece {frame.place} where {index, offset} was due")
                piece[offset:end] = frame.data
                num_received += 1
                if num_received % (CREDIT // 2) == 0:
                    send(channel, FrameKind.CREDIT, num_frames=CREDIT // 2)
            channel.check()
            into.memory.block(block)[:] = piece.reshape(into.memory.block(block).shape)


def _checked(key: bytes) -> bytes:
    if len(key) < MIN_KEY_BYTES:
        raise ValueError(f"key of {len(key)} bytes: give {MIN_KEY_BYTES} or more random ones")
    return key


def _mac(key: bytes, role: str, *nonces: str) -> str:
    return hmac.new(key, ":".join((role, *nonces)).encode(), hashlib.sha256).hexdigest()


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _tune(sock: socket.socket) -> None:
    """Send small frames at once, and find out about a host that vanished while we wait for it."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in zip(
        (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT), KEEPALIVE_S, strict=True
    ):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
