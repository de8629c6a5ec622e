"""The decode node's side of the connections to one prefill node, whatever the transport."""

import dataclasses
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from disconnect_watch.disagg.channel import Channel, Interrupt
from disconnect_watch.disagg.errors import PeerLostError, TransferCancelledError, TransferError
from disconnect_watch.disagg.frames import Frame, FrameKind, expect, send
from disconnect_watch.disagg.kv import KVBlocks
from disconnect_watch.disagg.records import Released, ReleaseKind, ReleaseOutcome
from disconnect_watch.disagg.server import REFUSALS
from disconnect_watch.token import CancelToken

__all__ = ["RemotePeer"]

#: Connections that are kept for the next call; a pull has one to itself.
MAX_IDLE = 8
#: DATA frames that may be under way.
CREDIT = 8


class RemotePeer(ABC):
    """A ``Peer`` over connections, each of which has one call at a time.

    Args:
        timeout: seconds without a byte after which the node is taken for lost.

    Threads: any; calls do not wait for each other.
    """

    def __init__(self, *, timeout: float) -> None:
        self._timeout = timeout
        self._lock = threading.Lock()
        self._is_closed = False
        self._idle: list[Channel] = []
        self._busy: set[Channel] = set()

    @abstractmethod
    def _greet(self, channel: Channel) -> None:
        """Connect it, say who we are and see who they are."""

    @abstractmethod
    def _receive_blocks(self, channel: Channel, accepted: Frame, into: KVBlocks) -> None:
        """Copy all that the other side lets us have."""

    def pull(
        self, transfer_id: str, owner: str, into: KVBlocks, cancel: CancelToken | None
    ) -> None:
        """See ``Connector.pull``."""
        with Interrupt(cancel) as interrupt:
            if cancel is not None:
                cancel.add_callback(interrupt.set)
            try:
                if interrupt.is_set:
                    raise TransferCancelledError("pull: the request was cancelled before")
                answer = self._pull(transfer_id, owner, into, interrupt)
            except TransferCancelledError:
                # The other side may not have heard of this pull at all.
                with suppress(PeerLostError):
                    self.release(transfer_id, owner, ReleaseKind.IN_BAND)
                raise
            finally:
                if cancel is not None:
                    cancel.remove_callback(interrupt.set)
        if answer.kind is FrameKind.REFUSED:
            refusal = REFUSALS.get(answer.body.get("error", ""), TransferError)
            raise refusal(answer.body.get("message", "pull: refused"))
        if not answer.body.get("is_good"):
            raise TransferCancelledError("pull: the transfer was released before its end")

    def _pull(self, transfer_id: str, owner: str, into: KVBlocks, interrupt: Interrupt) -> Frame:
        with self._borrowed(interrupt) as channel:
            send(
                channel,
                FrameKind.PULL,
                id=transfer_id,
                owner=owner,
                layout=dataclasses.asdict(into.memory.layout),
                num_blocks=len(into.block_ids),
                credit=CREDIT,
            )
            answer = expect(channel, FrameKind.ACCEPTED, FrameKind.REFUSED)
            if answer.kind is FrameKind.REFUSED:
                return answer
            self._receive_blocks(channel, answer, into)
            send(channel, FrameKind.DONE)
            finished = expect(channel, FrameKind.FINISHED, FrameKind.CANCELLED)
            if finished.kind is FrameKind.CANCELLED:
                # It was said before what we said came there.
                raise TransferCancelledError("pull: the transfer was released at its end")
            return finished

    def release(self, name: str, owner: str, kind: ReleaseKind) -> Released:
        """See ``RetainedStore.release``."""
        body = self._call(FrameKind.RELEASE, FrameKind.RELEASED, name=name, owner=owner, kind=kind)
        known = body["kind"]
        return Released(
            ReleaseOutcome(body["outcome"]),
            None if known is None else ReleaseKind(known),
            body["num_blocks"],
            is_pinned=body["is_pinned"],
        )

    def extend_lease(self, transfer_id: str, owner: str) -> bool:
        """See ``RetainedStore.extend_lease``."""
        body = self._call(FrameKind.EXTEND, FrameKind.EXTENDED, id=transfer_id, owner=owner)
        return bool(body["is_there"])

    def close(self) -> None:
        """Close what is idle, and end what is under way. Idempotent."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
            busy = list(self._busy)
        for channel in idle:
            channel.close()
        for channel in busy:
            channel.shutdown()

    def _call(self, kind: FrameKind, reply: FrameKind, /, **body: Any) -> dict[str, Any]:
        """Ask something that may be asked twice: a kept connection may have ended meanwhile."""
        while True:
            is_kept = bool(self._idle)
            try:
                with self._borrowed(None) as channel:
                    send(channel, kind, **body)
                    return expect(channel, reply).body
            except PeerLostError:
                if not is_kept:
                    raise

    @contextmanager
    def _borrowed(self, interrupt: Interrupt | None) -> Iterator[Channel]:
        """A connection for one call, kept for the next if the call came to its end."""
        channel = self._take()
        is_new = channel is None
        if channel is None:
            channel = Channel()
        with self._lock:
            if self._is_closed:
                channel.close()
                raise PeerLostError("the connector was closed")
            self._busy.add(channel)
        is_whole = False
        try:
            with channel.interrupted_by(interrupt):
                if is_new:
                    channel.timeout = self._timeout
                    self._greet(channel)
                yield channel
            is_whole = True
        except (KeyError, TypeError) as error:
            raise PeerLostError(f"receive: no frame of ours: {error!r}") from error
        finally:
            with self._lock:
                self._busy.discard(channel)
                is_kept = is_whole and not self._is_closed and len(self._idle) < MAX_IDLE
                if is_kept:
                    self._idle.append(channel)
            if not is_kept:
                channel.close()

    def _take(self) -> Channel | None:
        """Return a kept connection; what has something to say unasked has ended."""
        while True:
            with self._lock:
                if not self._idle:
                    return None
                channel = self._idle.pop()
            if not channel.has_news():
                return channel
            channel.close()
