"""A node that pulls from itself: what holds of every transport."""

import numpy as np
import pytest

from disconnect_watch.disagg import (
    Connector,
    KVBlocks,
    KVLayout,
    KVMemory,
    LayoutError,
    LocalPeer,
    PeerLostError,
    RetainedStore,
)
from disconnect_watch.disagg.shm import ShmPeer
from disconnect_watch.disagg.tcp import TcpPeer
from tests.disagg.nodes import KEY

LAYOUT = KVLayout(num_layers=2, block_size=4, num_kv_heads=1, head_dim=2, dtype="float32")


@pytest.mark.parametrize("size", [LAYOUT.block_bytes - 1, LAYOUT.block_bytes + 1])
def test_memory_is_whole_blocks(size: int) -> None:
    with pytest.raises(LayoutError, match="whole number"):
        KVMemory.over(LAYOUT, bytearray(size))


def test_memory_is_the_engines_own_array() -> None:
    # As engine/kv_cache.py has it: [num_layers, 2, num_slots, num_kv_heads, head_dim].
    cache = np.arange(2 * 2 * 12 * 1 * 2, dtype=np.float32).reshape(2, 2, 12, 1, 2)
    memory = KVMemory.over(LAYOUT, cache)
    assert memory.num_blocks == 3
    assert memory.block(1)[1, 0].tobytes() == cache[1, 0, 4:8].tobytes()
    memory.block(1)[:] = 0
    assert not cache[:, :, 4:8].any()
    assert cache[0, 0, 8:].all()


def test_memory_of_another_shape_is_refused() -> None:
    with pytest.raises(LayoutError, match="wants uint8"):
        KVMemory(LAYOUT, np.zeros((2, 2, 3, LAYOUT.layer_bytes - 1), np.uint8))


def test_a_layout_of_no_size_or_type_is_refused() -> None:
    with pytest.raises(LayoutError, match="not positive"):
        KVLayout(0, 4, 1, 2, "float32")
    with pytest.raises(LayoutError, match="dtype"):
        KVLayout(1, 4, 1, 2, "int3")


@pytest.mark.parametrize("block", [-1, 3])
def test_blocks_that_are_none_of_the_memory_are_refused(block: int) -> None:
    with pytest.raises(LayoutError, match="0 to 2"):
        KVBlocks(KVMemory.empty(LAYOUT, 3), [0, block])


@pytest.mark.parametrize(
    "address",
    ["nowhere", "tcp://h:port", "tls://h:1", f"tcp://{'h' * 64}:1", f"shm:/{'h' * 200}"],
)
def test_what_is_no_address_is_a_node_that_is_lost(address: str) -> None:
    def dial(address: str) -> TcpPeer | ShmPeer:
        return ShmPeer(address) if address.startswith("shm:") else TcpPeer(address, key=KEY)

    with Connector(RetainedStore(4, 1000), KVMemory.empty(LAYOUT, 4), dial=dial) as connector:
        for _ in range(2):
            with pytest.raises(PeerLostError):
                connector.tombstone(address, "r", "alice")


def test_who_cannot_be_dialled_is_not_remembered() -> None:
    num_calls = 0

    def dial(address: str) -> LocalPeer:
        nonlocal num_calls
        num_calls += 1
        raise PeerLostError(f"dial {address}")

    store = RetainedStore(4, 1000)
    with Connector(store, KVMemory.empty(LAYOUT, 4), dial=dial) as connector:
        for _ in range(2):
            with pytest.raises(PeerLostError):
                connector.tombstone("tcp://nowhere", "r", "alice")
    assert num_calls == 2
