"""What a decode node in vLLM loads: blocks of other nodes, on threads beside its steps."""

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from disconnect_watch.disagg import (
    Connector,
    KVBlocks,
    KVLayout,
    KVMemory,
    LayoutError,
    Peer,
    PeerLostError,
    RetainedStore,
    Ticket,
    TransferCancelledError,
    TransferError,
)
from disconnect_watch.token import CancelToken

__all__ = ["Layers", "Loads", "ticket_of"]

_logger = logging.getLogger("disconnect_watch.vllm")

#: Transfers, and releases, at the same time; who does not answer keeps one busy.
MAX_TRANSFERS = 8


def ticket_of(params: dict[str, Any]) -> Ticket | None:
    """The ticket in a request's ``kv_transfer_params``; None if it has none, or what is none.

    They are as the client sent them, and an exception would end vLLM's engine.
    """
    if not params.get("do_remote_prefill"):
        return None
    try:
        return msgspec.convert(params.get("ticket"), Ticket)
    except msgspec.ValidationError as error:
        _logger.warning("a ticket that is none, its prompt is computed here: %s", error)
        return None


class Layers(KVMemory):
    """Caches that are an array a layer.

    Args:
        layers: [num_blocks, 2 * layer_bytes], uint8, one a layer.

    Raises:
        LayoutError: they are not alike.
    """

    def __init__(self, layers: Sequence[NDArray[np.uint8]]) -> None:
        num_bytes = layers[0].shape[1]
        if num_bytes % 2 or any(layer.shape != layers[0].shape for layer in layers):
            raise LayoutError("caches of several shapes: they are not served")
        self._layers = layers
        # Of what is in a block nothing is known but its size.
        self.layout = KVLayout(len(layers), 1, 1, num_bytes // 2, "float8_e4m3fn")

    @property
    def num_blocks(self) -> int:
        return int(self._layers[0].shape[0])

    def block(self, block_id: int) -> NDArray[np.uint8]:
        """A copy of one block, [num_layers, 2, layer_bytes]."""
        copied = np.stack([layer[block_id] for layer in self._layers])
        return copied.reshape(len(self._layers), 2, -1)

    def write(self, block_id: int, content: NDArray[np.uint8]) -> None:
        """Put into a block what ``block`` gave of another."""
        for layer, piece in zip(self._layers, content, strict=True):
            layer[block_id] = piece.reshape(-1)


class Loads:
    """The transfers under way to one worker, and what became of those that ended.

    Threads: any.
    """

    def __init__(self, dial: Callable[[str], Peer]) -> None:
        nothing = Layers([np.zeros((0, 2), np.uint8)])
        self._connector = Connector(RetainedStore(0, 1), nothing, dial=dial)
        self._threads = ThreadPoolExecutor(
            MAX_TRANSFERS, thread_name_prefix="disconnect-watch-kv-load"
        )
        self._lock = threading.Lock()
        self._tokens: dict[str, CancelToken] = {}
        self._ended: set[str] = set()
        self._failed: set[str] = set()

    def start(
        self, request_id: str, ticket: Ticket, memory: Layers, block_ids: Sequence[int]
    ) -> None:
        """Load a ticket's blocks into these, which nobody else touches until it has ended."""
        token = CancelToken()
        with self._lock:
            self._tokens[request_id] = token
        self._connector.hold(ticket)
        self._threads.submit(self._load, request_id, ticket, memory, block_ids, token)

    def cancel(self, request_id: str) -> None:
        """Stop a load; it ends as failed. Nothing for one that has ended."""
        with self._lock:
            token = self._tokens.get(request_id)
        if token is not None:
            token.cancel()

    def release(self, ticket: Ticket) -> None:
        """Let a ticket's blocks go that nobody will load. Does not wait."""
        self._threads.submit(self._release, ticket)

    def take_ended(self) -> tuple[set[str], set[str]]:
        """Return the loads that ended since, and those of them that have failed."""
        with self._lock:
            ended, self._ended = self._ended, set()
            failed, self._failed = self._failed, set()
        return ended, failed

    def close(self) -> None:
        """End what is under way."""
        self._connector.close()
        self._threads.shutdown()

    def _load(
        self,
        request_id: str,
        ticket: Ticket,
        memory: Layers,
        block_ids: Sequence[int],
        token: CancelToken,
    ) -> None:
        is_failed = True
        try:
            if not block_ids:
                raise TransferCancelledError("nobody waits for it any more")
            staged = KVMemory.empty(memory.layout, len(block_ids))
            places = range(len(block_ids))
            self._connector.pull(ticket, KVBlocks(staged, places), cancel=token)
            for place in places:
                memory.write(block_ids[place], staged.block(place))
            is_failed = False
        except TransferError as error:
            _logger.info("load for %s: %s", request_id, error)
        except Exception:
            _logger.exception("load for %s", request_id)
        finally:
            # Before all else: its request and its blocks wait for that.
            with self._lock:
                del self._tokens[request_id]
                self._ended.add(request_id)
                if is_failed:
                    self._failed.add(request_id)
            if is_failed:
                # Also where no pull came about: nobody else would stop renewing its lease.
                self._release(ticket)

    def _release(self, ticket: Ticket) -> None:
        with suppress(PeerLostError):
            self._connector.release(ticket)
