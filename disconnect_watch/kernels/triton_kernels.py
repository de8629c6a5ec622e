"""Launches the kernels of ``jit``; all shapes are the caller's, nothing is read from the device."""

from typing import Any

import torch
import triton
from torch import Tensor

from disconnect_watch.kernels import jit
from disconnect_watch.kernels.base import (
    DECODE_SPLIT,
    KEY_TILE,
    MIN_TEMPERATURE,
    QUERY_TILE,
    AttentionParams,
    PagedKV,
    Sampling,
)
from disconnect_watch.kernels.rows import DecodeState, RowState
from disconnect_watch.kernels.torch_kernels import filter_scores
from disconnect_watch.kernels.view import FlagView

__all__ = [
    "DECODE_OPTIONS",
    "LATCH_OPTIONS",
    "PREFILL_OPTIONS",
    "SMALL_OPTIONS",
    "TritonKernels",
]

#: Fused multiply-add is what a GPU has; Triton wants to be told since its default is to change.
LATCH_OPTIONS = {"num_warps": 1, "enable_fp_fusion": True}
SMALL_OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}
DECODE_OPTIONS = {"num_warps": 4, "num_stages": 3, "enable_fp_fusion": True}
PREFILL_OPTIONS = {"num_warps": 8, "num_stages": 3, "enable_fp_fusion": True}
#: Of the matrix units' operands.
MIN_TILE = 16
VOCAB_TILE = 1024


class TritonKernels:
    """See ``Kernels``; no call waits for the device, and each may be captured in a graph."""

    def latch(self, flags: FlagView, rows: RowState) -> None:
        """See ``Kernels.latch``."""
        jit.latch[(1,)](
            flags.words,
            flags.acks,
            rows.slots,
            rows.generations,
            rows.live,
            rows.seq_lens,
            rows.slot_mapping,
            rows.control,
            rows.num_rows,
            BLOCK=triton.next_power_of_2(rows.num_rows),
            **LATCH_OPTIONS,
        )

    def write_kv(self, key: Tensor, value: Tensor, kv: PagedKV, slot_mapping: Tensor) -> None:
        """See ``Kernels.write_kv``."""
        num_tokens, num_kv_heads, head_dim = key.shape
        jit.write_kv[(num_tokens,)](
            key,
            value,
            kv.keys,
            kv.values,
            slot_mapping,
            num_kv_heads * head_dim,
            BLOCK=triton.next_power_of_2(num_kv_heads * head_dim),
            **SMALL_OPTIONS,
        )

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
        output = torch.empty_like(query)
        num_rows, num_heads, head_dim = query.shape
        num_kv_heads = kv.keys.shape[1]
        num_splits = triton.cdiv(kv.block_tables.shape[1] * kv.block_size, DECODE_SPLIT)
        parts, masses = output, output
        if num_splits > 1:
            shape = num_rows, num_heads, num_splits
            parts = torch.empty(*shape, head_dim, dtype=torch.float32, device=query.device)
            masses = torch.empty(shape, dtype=torch.float32, device=query.device)
        constants = _constants(query, kv, params, progress, options=DECODE_OPTIONS)
        jit.decode_attention[(num_rows, num_kv_heads, num_splits)](
            query,
            kv.keys,
            kv.values,
            parts,
            masses,
            kv.block_tables,
            rows.seq_lens,
            *_flags_of(flags, rows, progress),
            *_scalars(kv, params),
            BLOCK_M=max(MIN_TILE, triton.next_power_of_2(num_heads // num_kv_heads)),
            SPLIT=DECODE_SPLIT,
            HAS_SPLITS=num_splits > 1,
            **constants,
        )
        if num_splits > 1:
            shared = ("HEAD_DIM", "BLOCK_D", "TILE", "HAS_WINDOW")
            jit.merge_splits[(num_rows, num_heads)](
                parts,
                masses,
                output,
                rows.seq_lens,
                num_splits,
                params.window,
                SPLIT=DECODE_SPLIT,
                **{name: constants[name] for name in shared},
                **SMALL_OPTIONS,
            )
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
        output = torch.empty_like(query)
        grid = (triton.cdiv(max_query_len, QUERY_TILE), query.shape[1], rows.num_rows)
        jit.prefill_attention[grid](
            query,
            kv.keys,
            kv.values,
            output,
            kv.block_tables,
            rows.seq_lens,
            query_starts,
            *_flags_of(flags, rows, progress),
            *_scalars(kv, params),
            BLOCK_M=QUERY_TILE,
            **_constants(query, kv, params, progress, options=PREFILL_OPTIONS),
        )
        return output

    def sample(self, logits: Tensor, positions: Tensor, sampling: Sampling) -> Tensor:
        """See ``Kernels.sample``."""
        scores, order = filter_scores(logits.float(), sampling)
        num_rows, vocab_size = scores.shape
        output = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
        jit.sample[(num_rows,)](
            scores,
            sampling.temperatures,
            sampling.seeds,
            positions,
            output,
            vocab_size,
            MIN_TEMPERATURE=MIN_TEMPERATURE,
            BLOCK=VOCAB_TILE,
            **SMALL_OPTIONS,
        )
        if order is None:
            return output
        tokens = order.gather(-1, output.clamp(min=0)[:, None])[:, 0]
        return torch.where(output < 0, output, tokens)

    def advance(self, tokens: Tensor, state: DecodeState) -> None:
        """See ``Kernels.advance``."""
        rows = state.rows
        jit.advance[(1,)](
            tokens,
            rows.live,
            rows.seq_lens,
            rows.slot_mapping,
            state.block_tables,
            state.limits,
            state.stop_token_ids,
            state.token_ids,
            state.positions,
            state.drawn,
            state.num_drawn,
            rows.num_rows,
            state.block_tables.shape[1],
            state.drawn.shape[1],
            state.stop_token_ids.shape[1],
            BLOCK_SIZE=state.block_size,
            BLOCK=triton.next_power_of_2(rows.num_rows),
            **SMALL_OPTIONS,
        )


def _flags_of(flags: FlagView, rows: RowState, progress: Tensor | None) -> tuple[Tensor, ...]:
    # Without a progress, any tensor takes its place: nothing is stored there.
    unused = rows.control if progress is None else progress
    return flags.words, rows.slots, rows.generations, unused


def _scalars(kv: PagedKV, params: AttentionParams) -> tuple[int | float, ...]:
    return (
        kv.block_tables.shape[1],
        kv.keys.shape[1],
        params.scale,
        params.window,
        params.softcap,
    )


def _constants(
    query: Tensor,
    kv: PagedKV,
    params: AttentionParams,
    progress: Tensor | None,
    *,
    options: dict[str, int],
) -> dict[str, Any]:
    """What a kernel of attention is compiled for."""
    num_heads, head_dim = query.shape[1:]
    return {
        "HEAD_DIM": head_dim,
        "GROUP": num_heads // kv.keys.shape[1],
        "BLOCK_SIZE": kv.block_size,
        "BLOCK_D": max(MIN_TILE, triton.next_power_of_2(head_dim)),
        "TILE": KEY_TILE,
        "HAS_WINDOW": params.window > 0,
        "HAS_SOFTCAP": params.softcap > 0,
        "POLL_EVERY": params.poll_every,
        "HAS_PROGRESS": progress is not None,
        "NUM_THREADS": 32 * options["num_warps"],
        **options,
    }
