"""The memory of keys and values, in blocks; who owns which block is the pool's affair."""

import torch
from torch import Tensor

from disconnect_watch.engine.model_config import ModelConfig

__all__ = ["KVCache"]


class KVCache:
    """Keys and values of every layer, addressed by slot: ``block_id * block_size + offset``.

    Behind the blocks of the pool lies one more, the null block. It is never written, so it stays
    zero, and stands in wherever a padded row has no token: a padded read must not fall on what
    another request left behind, since even at weight 0 a NaN there would be a NaN in the sum.

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
    ) -> None:
        self.block_size = block_size
        self.null_block = num_blocks
        memory = torch.zeros(
            config.num_layers,
            2,
            (num_blocks + 1) * block_size,
            config.num_kv_heads,
            config.head_dim,
            dtype=dtype,
            device=device,
        )
        self.blocks = memory.view(
            config.num_layers, 2, num_blocks + 1, block_size, config.num_kv_heads, config.head_dim
        )
        self.keys: tuple[Tensor, ...] = tuple(layer[0] for layer in memory)
        self.values: tuple[Tensor, ...] = tuple(layer[1] for layer in memory)

    @staticmethod
    def block_bytes(config: ModelConfig, *, block_size: int, dtype: torch.dtype) -> int:
        """Return the size of one block over all layers."""
        per_token = 2 * config.num_kv_heads * config.head_dim * dtype.itemsize
        return config.num_layers * block_size * per_token
