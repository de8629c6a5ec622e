"""The prefill node's side of a connection, whatever the transport."""

import contextlib
import logging
import socket
import threading
from abc import ABC, abstractmethod
from typing import Any

from disconnect_watch.disagg.channel import Channel, Interrupt
from disconnect_watch.disagg.errors import (
    LayoutError,
    PeerLostError,
    TransferCancelledError,
    TransferError,
    TransferUsedError,
    UnknownTransferError,
)
from disconnect_watch.disagg.frames import Frame, FrameKind, receive, send
from disconnect_watch.disagg.kv import KVLayout, KVMemory
from disconnect_watch.disagg.pins import Pull
from disconnect_watch.disagg.records import ReleaseKind
from disconnect_watch.disagg.retained import RetainedStore

__all__ = ["REFUSALS", "TransferServer"]

_logger = logging.getLogger("disconnect_watch.disagg")

#: What a pull is refused for, by the name that it goes over the wire with.
REFUSALS: dict[str, type[TransferError]] = {
    "unknown": UnknownTransferError,
    "used": TransferUsedError,
    "layout": LayoutError,
}
#: Seconds for a stranger to say who it is.
HANDSHAKE_S = 10.0
#: Of other nodes; each is a thread that sleeps.
MAX_CONNECTIONS = 256


class TransferServer(ABC):
    """Serves one store and its memory to other nodes, a thread for each connection.

    Args:
        listening: a socket that listens; the server's from here on.

    Threads: any.
    """

    def __init__(self, store: RetainedStore, memory: KVMemory, listening: socket.socket) -> None:
        self._store = store
        self._memory = memory
        self._listening = listening
        self._lock = threading.Lock()
        self._is_closed = False
        self._channels: dict[Channel, threading.Thread] = {}
        self._thread = threading.Thread(
            target=self._accept, name="disconnect-watch-kv-accept", daemon=True
        )
        self._thread.start()

    @property
    @abstractmethod
    def address(self) -> str:
        """What ``dial`` of the same transport reaches it by."""

    @abstractmethod
    def _greet(self, channel: Channel) -> None:
        """See who it is, and say who we are."""

    @abstractmethod
    def _send_blocks(self, channel: Channel, pull: Pull, interrupt: Interrupt, credit: int) -> None:
        """Let the other side have the blocks, until it says that it has them.

        Raises:
            TransferCancelledError: the transfer was released; the other side was told if it could.
        """

    def close(self) -> None:
        """Close all connections, which ends the pulls under way, and listen no more. Idempotent."""
        with self._lock:
            self._is_closed = True
            channels = dict(self._channels)
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listening.close()
        for channel in channels:
            channel.shutdown()
        for thread in channels.values():
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listening.accept()
            except OSError as error:
                if self._is_closed:
                    return
                _logger.warning("accept: %s", error)  # out of fds, say: not for ever
                threading.Event().wait(0.05)
                continue
            channel = Channel(sock)
            with self._lock:
                is_welcome = not self._is_closed and len(self._channels) < MAX_CONNECTIONS
                if is_welcome:
                    thread = threading.Thread(
                        target=self._serve, args=(channel,), name="disconnect-watch-kv", daemon=True
                    )
                    self._channels[channel] = thread
                    thread.start()
            if not is_welcome:
                channel.close()

    def _serve(self, channel: Channel) -> None:
        try:
            channel.timeout = HANDSHAKE_S
            self._greet(channel)
            channel.timeout = None
            while True:
                self._answer(channel, receive(channel))
        except (PeerLostError, TransferCancelledError) as error:
            _logger.debug("connection of another node ended: %s", error)
        except (KeyError, TypeError, ValueError) as error:
            _logger.warning("connection of another node ended: no frame of ours: %s", repr(error))
        except Exception:
            _logger.exception("connection of another node")
        finally:
            channel.close()
            with self._lock:
                self._channels.pop(channel, None)

    def _answer(self, channel: Channel, frame: Frame) -> None:
        body = frame.body
        match frame.kind:
            case FrameKind.RELEASE:
                kind = ReleaseKind(body["kind"])
                done = self._store.release(str(body["name"]), str(body["owner"]), kind)
                send(
                    channel,
                    FrameKind.RELEASED,
                    outcome=done.outcome,
                    kind=done.kind,
                    num_blocks=done.num_blocks,
                    is_pinned=done.is_pinned,
                )
            case FrameKind.EXTEND:
                is_there = self._store.extend_lease(str(body["id"]), str(body["owner"]))
                send(channel, FrameKind.EXTENDED, is_there=is_there)
            case FrameKind.PULL:
                self._pull(channel, body)
            case _:
                raise PeerLostError(f"receive: {frame.kind.name} where a request was due")

    def _renew(self, pull: Pull) -> None:
        """The other side was heard of."""
        self._store.extend_lease(pull.transfer.id, pull.transfer.owner)

    def _pull(self, channel: Channel, body: dict[str, Any]) -> None:
        with Interrupt() as interrupt, channel.interrupted_by(interrupt):
            try:
                pull = self._store.begin_pull(
                    str(body["id"]), str(body["owner"]), on_release=interrupt.set
                )
            except (UnknownTransferError, TransferUsedError) as error:
                _refuse(channel, error)
                return
            with pull:
                misfit = self._misfit(pull, body)
                if misfit is None:
                    self._send_blocks(channel, pull, interrupt, int(body["credit"]))
                    is_good = pull.finish()
        # Here it has its effect: whoever hears of the end finds the blocks let go.
        if misfit is not None:
            _refuse(channel, misfit)
        else:
            send(channel, FrameKind.FINISHED, is_good=is_good)

    def _misfit(self, pull: Pull, body: dict[str, Any]) -> LayoutError | None:
        theirs = KVLayout(**body["layout"])
        if theirs == self._memory.layout and body["num_blocks"] == len(pull.blocks):
            return None
        return LayoutError(
            f"pull {len(pull.blocks)} blocks of {self._memory.layout} into "
            f"{body['num_blocks']} of {theirs}: not alike, or not as many"
        )


def _refuse(channel: Channel, error: TransferError) -> None:
    name = next(name for name, kind in REFUSALS.items() if isinstance(error, kind))
    send(channel, FrameKind.REFUSED, error=name, message=str(error))
