"""The kernels in plain torch operations: the reference for every other implementation.

Row by row and tile by tile where that is the plainest way to say what is meant; not for speed.
"""

import torch
from torch import Tensor

from disconnect_watch.kernels.base import (
    DECODE_SPLIT,
    KEY_TILE,
    MIN_TEMPERATURE,
    QUERY_TILE,
    AttentionParams,
    PagedKV,
    Sampling,
)
from disconnect_watch.kernels.random import uniform
from disconnect_watch.kernels.rows import Control, DecodeState, RowState
from disconnect_watch.kernels.view import FlagView

__all__ = ["TorchKernels", "filter_scores"]


class TorchKernels:
    """See ``Kernels``; calls wait for a device."""

    def latch(self, flags: FlagView, rows: RowState) -> None:
        """See ``Kernels.latch``."""
        flag_fired = (rows.live != 0)[:, None] & _fired(flags, rows)
        fired = flag_fired.any(1)
        step = rows.control[Control.STEP] + 1
        step = torch.where(step == 0, 1, step)  # the ack of 0 would read as none
        flags.acks[rows.slots[flag_fired].long()] = step
        rows.live.masked_fill_(fired, 0)
        rows.seq_lens.masked_fill_(fired, 0)
        rows.slot_mapping.masked_fill_(fired, -1)
        num_live = rows.live.sum(dtype=torch.int32)
        steps_left = rows.control[Control.STEPS_LEFT]
        go = ((num_live > 0) & (steps_left > 0)).int()
        rows.control.copy_(torch.stack((step, steps_left - go, num_live, go)))

    def write_kv(self, key: Tensor, value: Tensor, kv: PagedKV, slot_mapping: Tensor) -> None:
        """See ``Kernels.write_kv``."""
        is_written = slot_mapping >= 0
        kv.keys[slot_mapping[is_written]] = key[is_written]
        kv.values[slot_mapping[is_written]] = value[is_written]

    def decode_attention(
        self,
        query: Tensor,
        kv: PagedKV,
        rows: RowState,
        flags: FlagView,
        *,
        params: AttentionParams,
        progress: Tensor | None = None,
    ) -> Tensor:
        """See ``Kernels.decode_attention``."""
        output = torch.zeros_like(query)
        for row, stop in enumerate(rows.seq_lens.tolist()):
            num_tiles = 0
            if stop and not _is_left(flags, rows, row, params):
                own = slice(row, row + 1)
                output[own], num_tiles = _attend(query[own], kv, row, stop, params)
            if progress is not None:
                last = -(-stop // KEY_TILE)
                for split in range(progress.shape[2]):
                    begin = max(split * DECODE_SPLIT // KEY_TILE, last - num_tiles)
                    end = min((split + 1) * DECODE_SPLIT // KEY_TILE, last)
                    progress[row, :, split] = max(0, end - begin)
        return output

    def prefill_attention(
        self,
        query: Tensor,
        kv: PagedKV,
        rows: RowState,
        flags: FlagView,
        *,
        query_starts: Tensor,
        max_query_len: int,
        params: AttentionParams,
        progress: Tensor | None = None,
    ) -> Tensor:
        """See ``Kernels.prefill_attention``."""
        output = torch.zeros_like(query)
        starts, seq_lens = query_starts.tolist(), rows.seq_lens.tolist()
        for row, seq_len in enumerate(seq_lens):
            first, last = starts[row : row + 2]
            for tile, start in enumerate(range(0, max_query_len, QUERY_TILE)):
                own = slice(first + start, min(first + start + QUERY_TILE, last))
                num_tiles = 0
                if seq_len and own.start < last and not _is_left(flags, rows, row, params):
                    stop = seq_len - (last - own.stop)
                    output[own], num_tiles = _attend(query[own], kv, row, stop, params)
                if progress is not None:
                    progress[row, :, tile] = num_tiles
        return output

    def sample(self, logits: Tensor, positions: Tensor, sampling: Sampling) -> Tensor:
        """See ``Kernels.sample``."""
        logits = logits.float()
        # NaN is the maximum of whatever has one, so this sees every row that is spoilt.
        best, likeliest = logits.max(-1)
        is_greedy = sampling.temperatures <= MIN_TEMPERATURE
        scores, order = filter_scores(logits, sampling)
        cumulative = scores.softmax(-1, dtype=torch.float64).cumsum(-1)
        numbers = uniform(sampling.seeds, positions)[:, None]
        drawn = torch.searchsorted(cumulative, numbers * cumulative[:, -1:], right=True)
        # Rounding may put the product on the total.
        drawn.clamp_(max=logits.shape[-1] - 1)
        if order is not None:
            drawn = order.gather(-1, drawn)
        chosen = torch.where(is_greedy, likeliest, drawn[:, 0])
        return torch.where(best.isfinite(), chosen, -1)

    def advance(self, tokens: Tensor, state: DecodeState) -> None:
        """See ``Kernels.advance``."""
        rows = state.rows
        is_live = rows.live != 0
        has_token = is_live & (tokens >= 0)
        num_tokens = rows.seq_lens + 1
        is_stop = (tokens[:, None] == state.stop_token_ids).any(1)
        goes_on = has_token & ~is_stop & (num_tokens < state.limits)

        is_kept = (has_token & (state.num_drawn < state.drawn.shape[1])).nonzero()[:, 0]
        state.drawn[is_kept, state.num_drawn[is_kept].long()] = tokens[is_kept].int()
        state.num_drawn[is_kept] += 1

        position = rows.seq_lens.long()
        index = torch.where(goes_on, position // state.block_size, 0)
        block = state.block_tables.gather(1, index[:, None])[:, 0].long()
        slot = block * state.block_size + position % state.block_size
        state.token_ids.copy_(torch.where(goes_on, tokens, state.token_ids))
        state.positions.copy_(torch.where(goes_on, position, state.positions))
        rows.slot_mapping.copy_(torch.where(goes_on, slot, -1))
        rows.seq_lens.copy_(torch.where(goes_on, num_tokens, 0))
        rows.live.copy_(goes_on.int())


def filter_scores(logits: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor | None]:
    """Divide by the temperatures and rule out what ``top_k`` and ``top_p`` leave no chance.

    Only operations that a graph can capture, so every implementation may use it: ``torch.where``
    with a number, for one, would copy that from the host.

    Args:
        logits: [num_rows, vocab_size], float32.
        sampling: of these rows.

    Returns:
        Scores, [num_rows, vocab_size], -inf for what is ruled out; and the token of each, since
        a row that is filtered is sorted for it, or None if no row is.
    """
    is_greedy = sampling.temperatures <= MIN_TEMPERATURE
    scores = logits / sampling.temperatures.masked_fill(is_greedy, 1)[:, None]
    if sampling.top_k is None and sampling.top_p is None:
        return scores, None
    kept, order = scores.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(scores.shape[-1], device=scores.device).expand_as(order)
    is_filtered = torch.zeros_like(is_greedy)
    if sampling.top_k is not None:
        is_filtered |= sampling.top_k > 0
        top_k = sampling.top_k.masked_fill(sampling.top_k <= 0, scores.shape[-1])[:, None]
        kept = kept.masked_fill(rank >= top_k, -torch.inf)
    if sampling.top_p is not None:
        is_filtered |= sampling.top_p < 1
        probabilities = kept.softmax(-1)
        mass_before = probabilities.cumsum(-1) - probabilities
        kept = kept.masked_fill(mass_before >= sampling.top_p[:, None], -torch.inf)
    # In sorted order the same number falls on another token: a neighbour's filter must not
    # bring that upon a row that has none.
    is_filtered = is_filtered[:, None]
    return torch.where(is_filtered, kept, scores), torch.where(is_filtered, order, rank)


def _fired(flags: FlagView, rows: RowState) -> Tensor:
    """Which flags have fired, like ``rows.slots``; one of another generation is somebody else's."""
    words = flags.words[rows.slots.clamp(min=0).long()]
    return (rows.slots >= 0) & (words >> 8 == rows.generations) & (words & 0xFF != 0)


def _is_left(flags: FlagView, rows: RowState, row: int, params: AttentionParams) -> bool:
    return bool(params.poll_every) and bool(_fired(flags, rows)[row].any())


def _attend(
    query: Tensor, kv: PagedKV, row: int, stop: int, params: AttentionParams
) -> tuple[Tensor, int]:
    """Attend from the tokens before ``stop`` of one row; returns also how many tiles of keys.

    Args:
        query: [num_tokens, num_heads, head_dim], of the last tokens before ``stop``.
    """
    num_tokens, num_heads = query.shape[:2]
    first = max(0, stop - num_tokens - params.window + 1) if params.window else 0
    first -= first % KEY_TILE
    where = torch.arange(first, stop, device=query.device)
    blocks = kv.block_tables[row, where // kv.block_size].long()
    slots = blocks * kv.block_size + where % kv.block_size
    group = num_heads // kv.keys.shape[1]
    keys = kv.keys[slots].float().repeat_interleave(group, 1)
    values = kv.values[slots].float().repeat_interleave(group, 1)

    scores = torch.einsum("qhd,khd->hqk", query.float(), keys) * params.scale
    if params.softcap:
        scores = params.softcap * torch.tanh(scores / params.softcap)
    distance = torch.arange(stop - num_tokens, stop, device=query.device)[:, None] - where
    is_hidden = distance < 0
    if params.window:
        is_hidden |= distance >= params.window
    weights = scores.masked_fill(is_hidden, -torch.inf).softmax(-1)
    output = torch.einsum("hqk,khd->qhd", weights, values)
    return output.to(query.dtype), -(-(stop - first) // KEY_TILE)
