"""Batches for the kernels: rows, their tokens, and caches full of traps."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from disconnect_watch import CancelToken
from disconnect_watch.kernels import PagedKV, RowState


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows with a token each, which a test must hold for as long as the rows."""

    rows: RowState
    tokens: list[CancelToken]

    @classmethod
    def of(cls, seq_lens: Sequence[int]) -> "Batch":
        rows = RowState.create(len(seq_lens))
        tokens = [CancelToken() for _ in seq_lens]
        for row, (seq_len, token) in enumerate(zip(seq_lens, tokens, strict=True)):
            rows.put(row, seq_len=seq_len, slot_mapping=row, token=token)
        return cls(rows, tokens)


def paged(
    seq_lens: Sequence[int],
    *,
    num_kv_heads: int = 2,
    head_dim: int = 32,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
) -> PagedKV:
    """A cache with random keys and values for each row, in blocks of no order.

    Everything that no row may read is NaN, which any reader of it would carry on.
    """
    num_blocks = [-(-seq_len // block_size) for seq_len in seq_lens]
    order = torch.randperm(sum(num_blocks) + 1)
    tables = torch.full((len(seq_lens), max(1, *num_blocks)), int(order[-1]), dtype=torch.int32)
    shape = (len(order) * block_size, num_kv_heads, head_dim)
    keys, values = (torch.full(shape, torch.nan, dtype=dtype) for _ in range(2))
    first = 0
    for row, (seq_len, num) in enumerate(zip(seq_lens, num_blocks, strict=True)):
        tables[row, :num] = order[first : first + num]
        first += num
        slots = slots_of(tables[row], torch.arange(seq_len), block_size)
        keys[slots] = torch.randn(seq_len, num_kv_heads, head_dim).to(dtype)
        values[slots] = torch.randn(seq_len, num_kv_heads, head_dim).to(dtype)
    return PagedKV(keys, values, tables, block_size)


def slots_of(block_table: Tensor, positions: Tensor, block_size: int) -> Tensor:
    return block_table[positions // block_size].long() * block_size + positions % block_size
