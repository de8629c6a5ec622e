"""Blocks between processes of one host: the decode node reads the prefill node's memory.

The memory is a memfd, whose descriptor goes over a Unix socket; the blocks are copied once, by
the decode node, from the mapping into its own. Nothing else tells the prefill node when that is
over, so it keeps them pinned until the decode node says so, leaves, or is not heard of for a
lease. In the last case the copy may go on, from blocks that others write to by then; its end is
then answered with no, and what was copied is not used.

Who may connect: processes of the same user, by the kernel's word.
"""

import contextlib
import mmap
import os
import socket
import struct
from dataclasses import asdict
from types import TracebackType
from typing import Self

from disconnect_watch.disagg.channel import Channel, Interrupt
from disconnect_watch.disagg.errors import PeerLostError, TransferCancelledError
from disconnect_watch.disagg.frames import Frame, FrameKind, expect, send
from disconnect_watch.disagg.kv import KVBlocks, KVLayout, KVMemory
from disconnect_watch.disagg.peer import RemotePeer
from disconnect_watch.disagg.pins import Pull
from disconnect_watch.disagg.retained import RetainedStore
from disconnect_watch.disagg.server import HANDSHAKE_S, TransferServer
from disconnect_watch.ports import bind_unix

__all__ = ["SharedMemory", "ShmPeer", "ShmServer"]

SCHEME = "shm:"
VERSION = 1
#: May read all memory anyhow.
ROOT = 0
#: A copy of more than this says in between that it goes on.
SIGN_BYTES = 1 << 26

_CREDENTIALS = struct.Struct("3i")


class SharedMemory:
    """A node's cache where other processes can map it.

    Attributes:
        memory: over all of it, zeroed.
        buffer: the mapping, for who makes tensors of it.
    """

    def __init__(self, layout: KVLayout, num_blocks: int) -> None:
        self.num_bytes = num_blocks * layout.block_bytes
        self._fd = os.memfd_create("disconnect-watch-kv", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self._fd, self.num_bytes)
            self.buffer = mmap.mmap(self._fd, self.num_bytes)
        except BaseException:
            os.close(self._fd)
            raise
        self.memory = KVMemory.over(layout, self.buffer)

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        """Close the descriptor; the memory is there as long as something refers to it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class ShmServer(TransferServer):
    """Lets processes of this user read what a store retains.

    Args:
        shared: the store's memory, open for as long as the server is.
        path: of the socket, in a directory that nobody else writes to. What a process that was
            killed has left there is taken over.

    Raises:
        OSError: it can't be had.
    """

    def __init__(self, store: RetainedStore, shared: SharedMemory, path: str) -> None:
        self._bound = contextlib.ExitStack()
        listening = self._bound.enter_context(bind_unix(path))
        listening.listen(64)
        self._shared = shared
        self._path = path
        super().__init__(store, shared.memory, listening)

    @property
    def address(self) -> str:
        return f"{SCHEME}{self._path}"

    def close(self) -> None:
        """Close all connections and remove the socket. Idempotent."""
        super().close()
        self._bound.close()

    def _greet(self, channel: Channel) -> None:
        _require_same_user(channel.sock)
        socket.send_fds(channel.sock, [b"."], [self._shared.fileno()])
        send(
            channel,
            FrameKind.HELLO,
            version=VERSION,
            incarnation=self._store.incarnation,
            num_bytes=self._shared.num_bytes,
            layout=asdict(self._memory.layout),
        )

    def _send_blocks(self, channel: Channel, pull: Pull, interrupt: Interrupt, credit: int) -> None:
        send(channel, FrameKind.ACCEPTED, blocks=list(pull.blocks))
        while True:
            try:
                channel.wait()
            except TransferCancelledError:
                if pull.is_lapsed:
                    raise
                # It may be in the middle of a block; its own lease is all that it is given.
                interrupt.clear()
                send(channel, FrameKind.CANCELLED)
                continue
            with channel.interrupted_by(None):
                frame = expect(channel, FrameKind.DONE, FrameKind.CREDIT)
            if frame.kind is FrameKind.DONE:
                return
            self._renew(pull)


class ShmPeer(RemotePeer):
    """Another process of this host.

    Args:
        address: of its ``ShmServer``.
        timeout: see ``RemotePeer``.
    """

    def __init__(self, address: str, *, timeout: float = HANDSHAKE_S) -> None:
        super().__init__(timeout=timeout)
        self._path = address.removeprefix(SCHEME)
        # Of the life of that process that was last seen; the next has other memory.
        self._mapped: tuple[str, KVMemory] | None = None

    def _greet(self, channel: Channel) -> None:
        channel.connect([(socket.AF_UNIX, self._path)])
        _require_same_user(channel.sock)
        channel.wait()
        _, fds, _, _ = socket.recv_fds(channel.sock, 1, 1)
        if not fds:
            raise PeerLostError(f"connect to {self._path}: no memory came along")
        try:
            hello = expect(channel, FrameKind.HELLO).body
            if hello["version"] != VERSION:
                raise PeerLostError(f"connect to {self._path}: version {hello['version']}")
            if self._mapped is None or self._mapped[0] != hello["incarnation"]:
                mapping = mmap.mmap(fds[0], hello["num_bytes"], prot=mmap.PROT_READ)
                memory = KVMemory.over(KVLayout(**hello["layout"]), mapping)
                self._mapped = (hello["incarnation"], memory)
        finally:
            os.close(fds[0])

    def _receive_blocks(self, channel: Channel, accepted: Frame, into: KVBlocks) -> None:
        mapped = self._mapped
        assert mapped is not None
        source = KVBlocks(mapped[1], accepted.body["blocks"])
        unsaid = 0
        for theirs, ours in zip(source.block_ids, into.block_ids, strict=True):
            channel.check()
            if channel.has_news():
                # The only news is CANCELLED, or that it has gone.
                raise TransferCancelledError("pull: the transfer was released midway")
            into.memory.block(ours)[:] = source.memory.block(theirs)
            unsaid += into.memory.layout.block_bytes
            if unsaid >= SIGN_BYTES:
                send(channel, FrameKind.CREDIT)
                unsaid = 0


def _require_same_user(sock: socket.socket) -> None:
    """Raises:
    PeerLostError: the process at the other end is another user's.
    """
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(raw)
    if uid not in (os.geteuid(), ROOT):
        raise PeerLostError(f"connection of user {uid}: only processes of one user share memory")
