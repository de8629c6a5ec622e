"""Keys and values as a connector sees them: bytes, in blocks, of every layer.

The engine's cache (``engine/kv_cache.py``) is one contiguous array of this shape, so that a view
of it is enough; a connector needs to know neither its dtype nor torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from disconnect_watch.disagg.errors import LayoutError

__all__ = ["KVBlocks", "KVLayout", "KVMemory"]

#: Bytes of one element, by the name that torch has for its type.
ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}


@dataclass(frozen=True, slots=True)
class KVLayout:
    """What a block is. Two nodes can exchange blocks if theirs are equal.

    Attributes:
        dtype: of an element, a key of ``ITEM_BYTES``.
    """

    num_layers: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: str

    def __post_init__(self) -> None:
        sizes = (self.num_layers, self.block_size, self.num_kv_heads, self.head_dim)
        if self.dtype not in ITEM_BYTES or min(sizes) < 1:
            raise LayoutError(f"layout {self}: a size is not positive, or the dtype not known")

    @property
    def layer_bytes(self) -> int:
        """Size of a block's keys, or of its values, in one layer."""
        return self.block_size * self.num_kv_heads * self.head_dim * ITEM_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        """Size of a block over all layers."""
        return self.num_layers * 2 * self.layer_bytes


class KVMemory:
    """The cache of one node.

    Args:
        array: [num_layers, 2, num_blocks, layer_bytes], uint8, writable: keys at 0, values at 1;
            [block_size, num_kv_heads, head_dim] in each. It is borrowed.

    Raises:
        LayoutError: the array has another shape.

    Threads: any; who holds a block sees to it that nobody else writes it.
    """

    def __init__(self, layout: KVLayout, array: NDArray[np.uint8]) -> None:
        shape = (layout.num_layers, 2, array.shape[2] if array.ndim == 4 else 0, layout.layer_bytes)
        if array.dtype != np.uint8 or array.shape != shape:
            raise LayoutError(
                f"memory of {array.dtype} {list(array.shape)}: {layout} wants uint8 "
                f"[{layout.num_layers}, 2, num_blocks, {layout.layer_bytes}]"
            )
        self.layout = layout
        self.array = array

    @classmethod
    def over(cls, layout: KVLayout, buffer: Any) -> Self:
        """The memory that a buffer is, which holds as many whole blocks as its size says.

        Raises:
            LayoutError: it does not hold a whole number of them.
        """
        flat = np.frombuffer(buffer, np.uint8)
        if flat.size % layout.block_bytes:
            raise LayoutError(
                f"memory of {flat.size} bytes: no whole number of blocks of {layout.block_bytes}"
            )
        return cls(layout, flat.reshape(layout.num_layers, 2, -1, layout.layer_bytes))

    @classmethod
    def empty(cls, layout: KVLayout, num_blocks: int) -> Self:
        """Memory of its own, zeroed."""
        return cls.over(layout, bytearray(num_blocks * layout.block_bytes))

    @property
    def num_blocks(self) -> int:
        return int(self.array.shape[2])

    def block(self, block_id: int) -> NDArray[np.uint8]:
        """A view of one block, [num_layers, 2, layer_bytes]."""
        return self.array[:, :, block_id]

    def require(self, block_ids: Sequence[int]) -> None:
        """Raises:
        LayoutError: not all of them are blocks of this memory.
        """
        if wrong := [block for block in block_ids if not 0 <= block < self.num_blocks]:
            raise LayoutError(f"blocks {wrong[:8]}: the memory has 0 to {self.num_blocks - 1}")


@dataclass(frozen=True, slots=True)
class KVBlocks:
    """Blocks of a memory, in the order of the tokens that they hold.

    Raises:
        LayoutError: not all of them are blocks of that memory.
    """

    memory: KVMemory
    block_ids: Sequence[int]

    def __post_init__(self) -> None:
        self.memory.require(self.block_ids)
