"""vLLM as a prefill node, or a decode node, of ours: its blocks move by our protocol.

A ``KVConnectorBase_V1`` for both sides. As a prefill node: a request that asks for it in its
``kv_transfer_params`` keeps its blocks when it has its last token; the answer's
``kv_transfer_params`` have the ticket, by which a decode node pulls, releases or holds as from a
node of ours. In vLLM's words: ``request_finished`` delays the free, and ``get_finished`` names the
request once nobody needs its blocks any more. What was aborted before retains nothing.

    vllm serve ... --kv-transfer-config '{"kv_connector": "RetainingConnector",
        "kv_connector_module_path": "disconnect_watch.backends.hooks.vllm_kv",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"listen": "10.0.0.1:8100", "key_file": "/run/kv.key"}}'

    {"prompt": ..., "max_tokens": 1, "kv_transfer_params":
        {"do_remote_decode": true, "owner": "alice", "request_id": "the proxy's own"}}

As a decode node (``kv_consumer``, or ``kv_both``): a request whose ``kv_transfer_params`` are those
of that answer has its blocks pulled beside the steps, and is scheduled when they are there; its
lease is renewed meanwhile. If it is aborted, in the queue or under the transfer, the ticket is let
go in band. What can't be pulled fails or is computed here, by vLLM's ``kv_load_failure_policy``. A
prompt the beginning of which is cached here is computed from there on, and its ticket let go.

``extra_config`` may also have ``lease``, in seconds. Without ``do_remote_decode`` nothing is
retained. ``request_id`` is what the proxy lets go of it by before it knows the ticket; vLLM's own
id stands in for it.

Blocks are served as the bytes that they are, where scheduler and worker are one process (one
worker, CPU or ``uniproc``); else releases and leases work alike, and a pull is refused. They hold
what this version's attention backend put there, so that the decode node must be a like one.

What is used of vLLM beyond the connector's interface (0.32): that a finished request whose blocks
are kept has the engine go on with steps, a millisecond apart, which is how soon it hears of a
release.
"""

import logging
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
)
from vllm.v1.request import RequestStatus

from disconnect_watch.backends.hooks.vllm_kv_loads import Layers, Loads, ticket_of
from disconnect_watch.disagg import (
    Connector,
    LayoutError,
    Peer,
    PeerLostError,
    Reaper,
    RetainedFullError,
    RetainedStore,
    Ticket,
    TransferMeta,
)
from disconnect_watch.disagg.tcp import TcpPeer, TcpServer
from disconnect_watch.ports import bind

__all__ = ["RetainingConnector"]

_logger = logging.getLogger("disconnect_watch.vllm")

#: The memory of each engine of this process, by its id: the worker's side leaves it here for the
#: scheduler's, which is made after it.
_memories: dict[str, Layers] = {}


class _Blocks(tuple[int, ...]):
    """Ids of blocks, and whose they are by vLLM's name."""

    request_id: str


@dataclass
class _Orders(KVConnectorMetadata):  # type: ignore[misc]  # where vLLM is not
    """What the scheduler's side tells the worker's.

    Attributes:
        freed: whose blocks nobody needs any more.
        loads: by request, the ticket and the blocks that are for it.
        cancelled: whose loads nobody waits for any more.
    """

    freed: set[str] = field(default_factory=set)
    loads: dict[str, tuple[Ticket, list[int]]] = field(default_factory=dict)
    cancelled: set[str] = field(default_factory=set)


class _Retained:
    """The scheduler's side: a store, its timer, and the server that others reach it by."""

    def __init__(self, config: Any, memory: Layers | None, num_blocks: int) -> None:
        host, _, port = str(config("listen", "127.0.0.1:0")).rpartition(":")
        key = _key_of(config)
        lease_ns = int(float(config("lease", 5.0)) * 1e9)
        self._lock = threading.Lock()
        self._freed: set[str] = set()
        self.store = RetainedStore(num_blocks, lease_ns, on_free=self._on_free)
        if memory is None:
            _logger.warning("the worker is another process: blocks can be released, not pulled")
            memory = Layers([np.zeros((0, 2), np.uint8)])
        self._reaper = Reaper(self.store)
        self._server = TcpServer(self.store, memory, bind(host, int(port)), key=key)
        self._connector = Connector(
            self.store, memory, address=self._server.address, dial=_nobody_else
        )

    def retain(self, request: Any, block_ids: Sequence[int]) -> dict[str, Any] | None:
        """Keep a request's blocks; None if there is no room."""
        params = request.kv_transfer_params
        blocks = _Blocks(block_ids)
        blocks.request_id = request.request_id
        name = str(params.get("request_id") or request.request_id)
        meta = TransferMeta(name, request.num_computed_tokens)
        try:
            transfer = self.store.retain(str(params.get("owner", "")), blocks, meta)
        except RetainedFullError:
            return None
        return {"do_remote_prefill": True, "ticket": asdict(self._connector.ticket(transfer))}

    def take_freed(self) -> set[str]:
        with self._lock:
            freed, self._freed = self._freed, set()
        return freed

    def close(self) -> None:
        self._server.close()
        self._reaper.close()
        self.store.close()

    def _on_free(self, blocks: Sequence[int]) -> None:
        assert isinstance(blocks, _Blocks)
        with self._lock:
            self._freed.add(blocks.request_id)


class RetainingConnector(KVConnectorBase_V1):  # type: ignore[misc]  # as above
    """See the module. vLLM makes one for its scheduler and one for each worker."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._engine_id = str(self._kv_transfer_config.engine_id)
        self._config = self._kv_transfer_config.get_from_extra_config
        self._retained: _Retained | None = None
        self._layers: Layers | None = None
        self._loads = Loads(partial(TcpPeer, key=_key_of(self._config)))
        self._orders = _Orders()
        #: Requests whose ticket was used, or let go.
        self._told: set[str] = set()
        if role is KVConnectorRole.SCHEDULER:
            self._retained = _Retained(
                self._config,
                _memories.pop(self._engine_id, None),
                kv_cache_config.num_blocks,
            )

    @property
    def store(self) -> RetainedStore:
        """What is retained; on the scheduler's side only."""
        assert self._retained is not None
        return self._retained.store

    # The scheduler's side.

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """All of a prompt that another node has computed, unless some of it is cached here."""
        ticket = _ticket_of(request)
        # Once only: a preempted request computes anew.
        if ticket is None or request.request_id in self._told:
            return 0, False
        if num_computed_tokens:
            self._told.add(request.request_id)
            self._loads.release(ticket)
            return 0, False
        return request.num_prompt_tokens, True

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        ticket = _ticket_of(request)
        if num_external_tokens and ticket is not None:
            self._told.add(request.request_id)
            self._orders.loads[request.request_id] = (ticket, list(blocks.get_block_ids()[0]))

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Keep the blocks of a prefill that has come to its end, not of one that was aborted."""
        self._let_go(request)
        params = request.kv_transfer_params or {}
        is_whole = request.status is RequestStatus.FINISHED_LENGTH_CAPPED
        if not (params.get("do_remote_decode") and is_whole and block_ids):
            return False, None
        assert self._retained is not None
        answer = self._retained.retain(request, block_ids)
        return answer is not None, answer

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        assert self._retained is not None
        orders, self._orders = self._orders, _Orders()
        orders.freed = self._retained.take_freed()
        return orders

    def _let_go(self, request: Any) -> None:
        """Whoever ends has no use for its ticket any more, nor for its load."""
        ticket = _ticket_of(request)
        if ticket is None:
            return
        if request.request_id not in self._told:
            self._loads.release(ticket)
        elif self._orders.loads.pop(request.request_id, None) is not None:
            # Told and not yet passed on; the worker is to say that it has ended, all the same.
            self._orders.loads[request.request_id] = (ticket, [])
        self._orders.cancelled.add(request.request_id)
        self._told.discard(request.request_id)

    # The worker's side.

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        try:
            self._layers = Layers([_bytes_of(each) for each in kv_caches.values()])
            _memories[self._engine_id] = self._layers
        except LayoutError as error:
            _logger.warning("blocks can be released, not pulled: %s", error)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        orders = self._get_connector_metadata()
        assert isinstance(orders, _Orders)
        for request_id in orders.cancelled:
            self._loads.cancel(request_id)
        ended, failed = self._loads.take_ended()
        return KVConnectorTransferResults(
            finished_sending=orders.freed, finished_recving=ended, failed_recving=failed
        )

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin what this step orders; it goes on beside the steps behind."""
        orders = self._get_connector_metadata()
        assert isinstance(orders, _Orders)
        memory = self._layers or Layers([np.zeros((0, 2), np.uint8)])
        for request_id, (ticket, block_ids) in orders.loads.items():
            self._loads.start(request_id, ticket, memory, block_ids)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """A request waits for all of its layers before it is scheduled."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Blocks are read where they lie."""

    def wait_for_save(self) -> None:
        """Blocks are read where they lie."""

    def shutdown(self) -> None:
        self._loads.close()
        if self._retained is not None:
            self._retained.close()


def _bytes_of(cache: Any) -> NDArray[np.uint8]:
    """A layer's cache, blocks first, as bytes where it lies."""
    import torch

    if not cache.is_contiguous() or cache.device.type != "cpu":
        raise LayoutError(f"cache of {list(cache.shape)} on {cache.device}: it is not in one piece")
    flat: NDArray[np.uint8] = cache.view(torch.uint8).numpy().reshape(cache.shape[0], -1)
    return flat


def _key_of(config: Any) -> bytes:
    return Path(str(config("key_file", ""))).read_bytes().strip()


def _ticket_of(request: Any) -> Ticket | None:
    return ticket_of(request.kv_transfer_params or {})


def _nobody_else(address: str) -> Peer:
    raise PeerLostError(f"dial {address}: this node pulls from nobody")
