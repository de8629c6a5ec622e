"""The memory of keys and values, in blocks; who owns which block is the pool's affair."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from disconnect_watch.engine.model_config import ModelConfig

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["Allocate", "KVCache"]

#: Given the shape of ``KVCache.blocks`` and the name of its dtype, returns a writable buffer of so
#: many elements, zeroed: memory that other processes can map, say.
Allocate = Callable[[tuple[int, ...], str], Any]


class KVCache:
    """Keys and values of every layer, addressed by slot: ``block_id * block_size + offset``.

    Behind the blocks of the pool lies one more, the null block. It is never written, so it stays
    zero, and stands in wherever a padded row has no token: a padded read must not fall on what
    another request left behind, since even at weight 0 a NaN there would be a NaN in the sum.

    Args:
        allocate: where the memory comes from, on a CPU; None takes the process's own.

    Raises:
        ValueError: a GPU's memory cannot be allocated so.

    Attributes:
        keys, values: one tensor a layer, [(num_blocks + 1) * block_size, num_kv_heads, head_dim].
        blocks: the same memory by block, for transfers: [num_layers, 2, num_blocks + 1, block_size,
            num_kv_heads, head_dim], keys before values.
        null_block: id of the null block.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        allocate: Allocate | None = None,
    ) -> None:
        self.block_size = block_size
        self.null_block = num_blocks
        heads = (config.num_kv_heads, config.head_dim)
        shape = (config.num_layers, 2, num_blocks + 1, block_size, *heads)
        if allocate is None:
            self.blocks = torch.zeros(shape, dtype=dtype, device=device)
        elif torch.device(device).type != "cpu":
            raise ValueError(f"the cache lies on {device}, which other processes cannot map")
        else:
            buffer = allocate(shape, str(dtype).removeprefix("torch."))
            self.blocks = torch.frombuffer(buffer, dtype=dtype).view(shape)
        memory = self.blocks.flatten(2, 3)
        self.keys: tuple[Tensor, ...] = tuple(layer[0] for layer in memory)
        self.values: tuple[Tensor, ...] = tuple(layer[1] for layer in memory)

    def as_bytes(self) -> "NDArray[np.uint8]":
        """Return the memory itself, [num_layers, 2, num_blocks + 1, bytes of a block's keys].

        Raises:
            ValueError: it is not on a CPU.
        """
        if self.blocks.device.type != "cpu":
            raise ValueError(f"the cache lies on {self.blocks.device}, copy it to a CPU first")
        num_layers, pair, num_blocks = self.blocks.shape[:3]
        flat = self.blocks.view(num_layers, pair, num_blocks, -1).view(torch.uint8)
        array: NDArray[np.uint8] = flat.numpy()
        return array

    @staticmethod
    def block_bytes(config: ModelConfig, *, block_size: int, dtype: torch.dtype) -> int:
        """Return the size of one block over all layers."""
        per_token = 2 * config.num_kv_heads * config.head_dim * dtype.itemsize
        return config.num_layers * block_size * per_token
