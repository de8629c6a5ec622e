"""Attention: every token sees those before it in its own sequence.

Dense for training, where nothing is cached; paged for serving, where the keys and values of
earlier tokens lie in blocks. The paged one is written in plain torch operations and is the
reference for any kernel that replaces it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from disconnect_watch.engine.kv_cache import KVCache

__all__ = ["CausalAttention", "DecodeGroup", "PagedAttention", "PrefillRow"]


class CausalAttention:
    """Sequences of one length behind each other, nothing cached: for training and for checks."""

    def __init__(self, *, num_sequences: int) -> None:
        self._num_sequences = num_sequences

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See ``model.Attention``; ``num_tokens`` is a multiple of the number of sequences."""
        output = F.scaled_dot_product_attention(
            self._split(query),
            self._split(key),
            self._split(value),
            is_causal=True,
            enable_gqa=True,
        )
        return output.transpose(1, 2).reshape(query.shape[0], -1)

    def _split(self, heads: Tensor) -> Tensor:
        """[num_tokens, heads, head_dim] to [num_sequences, heads, length, head_dim]."""
        return heads.view(self._num_sequences, -1, *heads.shape[1:]).transpose(1, 2)


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Rows with one token each, padded to the longest context among them.

    Attributes:
        first, last: their tokens in the packed batch, half-open.
        slots: [rows * context], int64, of the null block where a row is shorter.
        mask: [rows, 1, 1, context], 0 or -inf; None if all rows have the same context.
    """

    first: int
    last: int
    slots: Tensor
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """One row with several tokens, the last of which sees the whole context.

    Attributes:
        first, last: its tokens in the packed batch, half-open.
        slots: [context], int64; None if nothing was cached before, so that the batch has it all.
        mask: [tokens, context], 0 or -inf; None likewise.
    """

    first: int
    last: int
    slots: Tensor | None
    mask: Tensor | None


class PagedAttention:
    """Writes the batch's keys and values to their slots, then attends through the slots.

    Args:
        cache: of all layers.
        slot_mapping: [num_tokens], int64: where each token of the batch is written.
        decodes, prefills: which together cover the batch, in its order.
    """

    def __init__(
        self,
        cache: KVCache,
        *,
        slot_mapping: Tensor,
        decodes: list[DecodeGroup],
        prefills: list[PrefillRow],
    ) -> None:
        self._cache = cache
        self._slot_mapping = slot_mapping
        self._decodes = decodes
        self._prefills = prefills

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See ``model.Attention``."""
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        keys.index_copy_(0, self._slot_mapping, key)
        values.index_copy_(0, self._slot_mapping, value)
        outputs = [self._decode(group, query, keys, values) for group in self._decodes]
        for row in self._prefills:
            if row.slots is None:
                own = slice(row.first, row.last)
                outputs.append(_attend(query[own], key[own], value[own], mask=None))
            else:
                context = keys.index_select(0, row.slots), values.index_select(0, row.slots)
                outputs.append(_attend(query[row.first : row.last], *context, mask=row.mask))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _decode(self, group: DecodeGroup, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Treat the query heads that share a key head as so many queries to it."""
        num_rows, num_kv_heads = group.last - group.first, keys.shape[1]
        output = F.scaled_dot_product_attention(
            query[group.first : group.last].reshape(num_rows, num_kv_heads, -1, query.shape[2]),
            _gather(keys, group.slots, num_rows),
            _gather(values, group.slots, num_rows),
            attn_mask=group.mask,
        )
        return output.reshape(num_rows, -1)


def _gather(memory: Tensor, slots: Tensor, num_rows: int) -> Tensor:
    """Copy the slots' keys or values out, [num_rows, num_kv_heads, context, head_dim]."""
    return memory.index_select(0, slots).view(num_rows, -1, *memory.shape[1:]).transpose(1, 2)


def _attend(query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None) -> Tensor:
    """One sequence, [tokens, heads, head_dim] each; causal from the start if there is no mask."""
    output = F.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        key.transpose(0, 1)[None],
        value.transpose(0, 1)[None],
        attn_mask=mask,
        is_causal=mask is None,
        enable_gqa=True,
    )
    return output[0].transpose(0, 1).reshape(query.shape[0], -1)
