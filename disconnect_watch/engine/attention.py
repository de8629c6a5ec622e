"""Attention: every token sees those before it in its own sequence.

Dense for training, where nothing is cached; paged for serving, where the keys and values of
earlier tokens lie in blocks. The paged one is written in plain torch operations and is the
reference for any kernel that replaces it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from disconnect_watch.engine.attend import AttentionRule, attend, mask_of
from disconnect_watch.engine.kv_cache import KVCache

__all__ = ["MAX_UNWATCHED", "CausalAttention", "DecodeGroup", "PagedAttention", "PrefillRow"]

#: Tokens of a prompt that attend without a look at whether anybody still waits for them: with a
#: long context, attention is most of a layer's work.
MAX_UNWATCHED = 64


class CausalAttention:
    """Sequences of one length behind each other, nothing cached: for training and for checks."""

    def __init__(self, *, num_sequences: int) -> None:
        self._num_sequences = num_sequences

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, rule: AttentionRule
    ) -> Tensor:
        """See ``model.Attention``; ``num_tokens`` is a multiple of the number of sequences."""
        length = query.shape[0] // self._num_sequences
        mask = None
        if 0 < rule.window < length:
            _, mask = _window(0, length, rule.window, query.dtype)
        output = attend(
            self._split(query),
            self._split(key),
            self._split(value),
            mask=mask,
            is_causal=mask is None,
            rule=rule,
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
    """

    first: int
    last: int
    slots: Tensor | None


class PagedAttention:
    """Writes the batch's keys and values to their slots, then attends through the slots.

    Args:
        cache: of all layers.
        slot_mapping: [num_tokens], int64: where each token of the batch is written.
        decodes, prefills: which together cover the batch, in its order.
        is_left: whether nobody wants any of it any more.
    """

    def __init__(
        self,
        cache: KVCache,
        *,
        slot_mapping: Tensor,
        decodes: list[DecodeGroup],
        prefills: list[PrefillRow],
        is_left: Callable[[], bool],
    ) -> None:
        self._cache = cache
        self._is_left = is_left
        self._slot_mapping = slot_mapping
        self._decodes = decodes
        self._prefills = prefills
        # What layers with a sliding window see of each group, by its first token and the window:
        # from which key on, and the mask. Layers have it in common.
        self._views: dict[tuple[int, int], tuple[int, Tensor]] = {}

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, rule: AttentionRule
    ) -> Tensor:
        """See ``model.Attention``; tokens that were left get zeros."""
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        keys.index_copy_(0, self._slot_mapping, key)
        values.index_copy_(0, self._slot_mapping, value)
        outputs = [self._decode(group, query, keys, values, rule) for group in self._decodes]
        if not self._prefills:
            return outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        attended = query.new_zeros(query.shape[0], query.shape[1] * query.shape[2])
        for group, output in zip(self._decodes, outputs, strict=True):
            attended[group.first : group.last] = output
        for first, last, output in self.prefill(layer, query, key, value, rule=rule):
            attended[first:last] = output
        return attended

    def prefill(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, rule: AttentionRule
    ) -> Iterator[tuple[int, int, Tensor]]:
        """Attend from the rows with several tokens, whose keys and values were written before.

        In pieces, and it ends before the next one if nobody wants the batch any more. Where a
        piece begins depends on nothing but the row, and so do its bits.

        Yields:
            First token and last, half-open, and their [tokens, num_heads * head_dim].
        """
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        for row in self._prefills:
            num_tokens = row.last - row.first
            context = num_tokens if row.slots is None else len(row.slots)
            # No token of the row sees a key before this one.
            first = max(context - num_tokens + 1 - rule.window, 0) if rule.window else 0
            if row.slots is None:
                own = slice(row.first + first, row.last)
                row_keys, row_values = key[own], value[own]
            else:
                slots = row.slots[first:]
                row_keys, row_values = keys.index_select(0, slots), values.index_select(0, slots)
            for start in range(row.first, row.last, MAX_UNWATCHED):
                if start > row.first and self._is_left():
                    return
                stop = min(start + MAX_UNWATCHED, row.last)
                num_seen = len(row_keys) - (row.last - stop)
                window = rule.window if rule.window < num_seen else 0
                # Among the row's keys: those that any token of the piece sees.
                seen = slice(0, num_seen)
                if window:
                    seen = slice(max(num_seen - (stop - start) + 1 - window, 0), num_seen)
                mask = None
                if window or num_seen > stop - start:
                    mask = _mask_of_piece(stop - start, num_seen - seen.start, window, query.dtype)
                output = _attend(
                    query[start:stop], row_keys[seen], row_values[seen], mask=mask, rule=rule
                )
                yield start, stop, output

    def _decode(
        self, group: DecodeGroup, query: Tensor, keys: Tensor, values: Tensor, rule: AttentionRule
    ) -> Tensor:
        """Treat the query heads that share a key head as so many queries to it."""
        num_rows, num_kv_heads = group.last - group.first, keys.shape[1]
        slots, mask = group.slots, group.mask
        context = slots.numel() // num_rows
        if 0 < rule.window < context:
            first, mask = self._window_of_group(group, context, rule.window)
            slots = slots.view(num_rows, context)[:, first:].flatten()
        output = attend(
            query[group.first : group.last].reshape(num_rows, num_kv_heads, -1, query.shape[2]),
            _gather(keys, slots, num_rows),
            _gather(values, slots, num_rows),
            mask=mask,
            is_causal=False,
            rule=rule,
        )
        return output.reshape(num_rows, -1)

    def _window_of_group(self, group: DecodeGroup, context: int, window: int) -> tuple[int, Tensor]:
        """Return the first key that any row of a group sees, and their mask from there on."""
        view = self._views.get((group.first, window))
        if view is None:
            num_rows = group.last - group.first
            if group.mask is None:
                stops = torch.full((num_rows, 1), context)
            else:
                stops = (group.mask.view(num_rows, context) == 0).sum(1, keepdim=True)
            first = max(int(stops.min()) - window, 0)
            keys = torch.arange(first, context)
            mask = mask_of((keys >= stops) | (keys < stops - window), self._cache.keys[0].dtype)
            view = first, mask[:, None, None, :]
            self._views[group.first, window] = view
        return view


def _gather(memory: Tensor, slots: Tensor, num_rows: int) -> Tensor:
    """Copy the slots' keys or values out, [num_rows, num_kv_heads, context, head_dim]."""
    return memory.index_select(0, slots).view(num_rows, -1, *memory.shape[1:]).transpose(1, 2)


def _window(start: int, stop: int, window: int, dtype: torch.dtype) -> tuple[int, Tensor]:
    """Return the first key that the tokens of [start, stop) see, and their mask from there on."""
    first = max(start + 1 - window, 0)
    tokens, keys = torch.arange(start, stop)[:, None], torch.arange(first, stop)
    return first, mask_of((keys > tokens) | (keys <= tokens - window), dtype)


def _mask_of_piece(num_tokens: int, num_keys: int, window: int, dtype: torch.dtype) -> Tensor:
    """Return the mask of tokens, ``MAX_UNWATCHED`` at most, that are the last of so many keys.

    Counted from the end all pieces see alike, so they are parts of one mask, which is kept.
    """
    width = 1 << (max(num_keys, MAX_UNWATCHED) - 1).bit_length()
    return _last_piece(width, window, dtype)[-num_tokens:, -num_keys:]


@lru_cache(maxsize=32)
def _last_piece(width: int, window: int, dtype: torch.dtype) -> Tensor:
    tokens, keys = torch.arange(width - MAX_UNWATCHED, width)[:, None], torch.arange(width)
    is_hidden = keys > tokens
    if window:
        is_hidden |= keys <= tokens - window
    return mask_of(is_hidden, dtype)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None, rule: AttentionRule
) -> Tensor:
    """One sequence, [tokens, heads, head_dim] each; causal from the start if there is no mask."""
    output = attend(
        query.transpose(0, 1)[None],
        key.transpose(0, 1)[None],
        value.transpose(0, 1)[None],
        mask=mask,
        is_causal=mask is None,
        rule=rule,
    )
    return output[0].transpose(0, 1).reshape(query.shape[0], -1)
