"""What the loops of the GPU benchmark run: a step of a set length, or that of a decoder."""

import math
import time
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from disconnect_watch import CancelToken
from disconnect_watch.kernels import (
    AttentionParams,
    DecodeState,
    FlagView,
    PagedKV,
    RowState,
    Sampling,
    kernels_for,
)

__all__ = ["LLAMA_8B", "TINY", "DecodeWork", "ModelShape", "SpinWork"]

BLOCK_SIZE = 16


class SpinWork:
    """A step that keeps the device busy for about so many seconds and changes nothing.

    Attributes:
        rows: of which only the flags matter.
        step_seconds: as measured on a GPU; as asked for elsewhere.
    """

    def __init__(self, device: torch.device, *, num_rows: int, step_seconds: float) -> None:
        self.rows = RowState.create(num_rows, device=device)
        self.step_seconds = step_seconds
        self._num_products = 0
        if device.type == "cuda" and step_seconds:
            self._matrix = torch.randn(1024, 1024, device=device)
            self._output = torch.empty_like(self._matrix)
            self._num_products = 20
            per_product = self._measure() / 20
            self._num_products = round(step_seconds / per_product)
            self.step_seconds = self._measure()

    def _measure(self) -> float:
        self.step()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(10):
            self.step()
        torch.cuda.synchronize()
        return (time.perf_counter() - begin) / 10

    def step(self) -> None:
        """Run it once."""
        for _ in range(self._num_products):
            torch.mm(self._matrix, self._matrix, out=self._output)
        if not self.rows.live.is_cuda:
            time.sleep(self.step_seconds)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a decoder; names as in ``engine.config.ModelConfig``."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int


LLAMA_8B = ModelShape(32, 4096, 14336, 32, 8, 128, 128256)
TINY = ModelShape(1, 32, 64, 2, 1, 16, 50)


class DecodeWork:
    """Decode of a decoder with random weights, over rows that all have a context already.

    Args:
        shape: of the model.
        flags: seen by the attention kernels, and by the latch that is run between steps.
        num_rows: in the batch.
        context: tokens that a new row has.
        max_new_tokens: that it may get.

    Attributes:
        rows, state: as the kernels know them.
        kv: of the first layer.
        logits: [num_rows, vocab_size], of the last step.
    """

    def __init__(
        self,
        shape: ModelShape,
        flags: FlagView,
        *,
        num_rows: int,
        context: int,
        max_new_tokens: int,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        device = flags.words.device
        self.flags, self.context, self.max_new_tokens = flags, context, max_new_tokens
        self.rows = RowState.create(num_rows, device=device)
        blocks_per_row = -(-(context + max_new_tokens) // BLOCK_SIZE)
        self.state = DecodeState.create(
            self.rows, max_blocks=blocks_per_row, block_size=BLOCK_SIZE, max_steps=max_new_tokens
        )
        blocks = torch.arange(num_rows * blocks_per_row, dtype=torch.int32, device=device)
        self.state.block_tables.copy_(blocks.view(num_rows, blocks_per_row))

        def weights(*size: int) -> Tensor:
            return torch.randn(*size, dtype=dtype, device=device) / math.sqrt(size[-2])

        self._shape = shape
        self._splits = (shape.num_heads, shape.num_heads + shape.num_kv_heads)
        self._kernels = kernels_for(device)
        self._params = AttentionParams(scale=shape.head_dim**-0.5)
        num_slots = num_rows * blocks_per_row * BLOCK_SIZE
        queries = shape.num_heads * shape.head_dim
        keys = shape.num_kv_heads * shape.head_dim
        self._embedding = weights(shape.vocab_size, shape.hidden_size)
        self._head = weights(shape.hidden_size, shape.vocab_size)
        self._layers = [
            (
                weights(shape.hidden_size, queries + 2 * keys),
                weights(queries, shape.hidden_size),
                weights(shape.hidden_size, 2 * shape.intermediate_size),
                weights(shape.intermediate_size, shape.hidden_size),
                PagedKV(
                    torch.randn(
                        num_slots, shape.num_kv_heads, shape.head_dim, dtype=dtype, device=device
                    ),
                    torch.randn(
                        num_slots, shape.num_kv_heads, shape.head_dim, dtype=dtype, device=device
                    ),
                    self.state.block_tables,
                    BLOCK_SIZE,
                ),
            )
            for _ in range(shape.num_layers)
        ]
        self.kv = self._layers[0][-1]
        self._sampling = Sampling(
            temperatures=torch.ones(num_rows, device=device),
            seeds=torch.arange(num_rows, device=device),
        )
        self.logits = torch.zeros(num_rows, shape.vocab_size, device=device)

    def put(self, row: int, *, num_tokens: int, token: CancelToken | None) -> None:
        """Give a row to a new request, whose context is there already."""
        block = row * self.state.block_tables.shape[1]
        last = self.context - 1
        self.rows.put(
            row, seq_len=self.context, slot_mapping=block * BLOCK_SIZE + last, token=token
        )
        self.state.token_ids[row] = row % self._shape.vocab_size
        self.state.positions[row] = last
        self.state.limits[row] = self.context + num_tokens
        self.state.num_drawn[row] = 0

    def retire(self, row: int) -> None:
        """Take a row out on the host's word."""
        self.rows.live[row] = 0
        self.rows.seq_lens[row] = 0
        self.rows.slot_mapping[row] = -1

    def step(self) -> None:
        """One token for each live row."""
        shape, rows = self._shape, self.rows
        hidden = self._embedding[self.state.token_ids]
        for qkv, out, gate_up, down, kv in self._layers:
            heads = (_norm(hidden) @ qkv).view(len(hidden), -1, shape.head_dim)
            query, key, value = (
                part.contiguous() for part in heads.tensor_split(self._splits, dim=1)
            )
            self._kernels.write_kv(key, value, kv, rows.slot_mapping)
            attended = self._kernels.decode_attention(
                query, kv, rows, self.flags, params=self._params
            )
            hidden = hidden + attended.flatten(1) @ out
            gate, up = (_norm(hidden) @ gate_up).chunk(2, -1)
            hidden = hidden + (F.silu(gate) * up) @ down
        self.logits.copy_(_norm(hidden) @ self._head)
        tokens = self._kernels.sample(self.logits, self.state.positions + 1, self._sampling)
        self._kernels.advance(tokens, self.state)


def _norm(hidden: Tensor) -> Tensor:
    return hidden * hidden.square().mean(-1, keepdim=True).add(1e-5).rsqrt()
