"""The decoder in C, for float32 on a CPU and one thread.

With few tokens in a step, which is what decoding is, operations of torch are mostly overhead and
copies: each gathers the keys of the whole batch anew, pads them, and packs the weights for the
product. Here weights are packed once, and attention reads the cache where it lies.

Each row is computed by itself, in one order of sums, so that its bits depend on no neighbour.
Rows of more than one token attend by torch, which is better at it when there are many; in
batch-invariant mode here, one token after the other.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from disconnect_watch.engine import _math
from disconnect_watch.engine.attend import soft_cap
from disconnect_watch.engine.attention import MAX_UNWATCHED
from disconnect_watch.engine.batch import PackedBatch
from disconnect_watch.engine.forward import Forward
from disconnect_watch.engine.kv_cache import KVCache
from disconnect_watch.engine.model import DecoderLayer, LlamaModel
from disconnect_watch.engine.modules import OffsetNorm
from disconnect_watch.engine.request import Request
from disconnect_watch.engine.rotary import Rotary
from disconnect_watch.engine.sampler import sample
from disconnect_watch.engine.schedule import ScheduledRow

__all__ = ["INSTRUCTIONS", "NativeDecoder"]

#: The set of instructions that is used: "avx512", "avx2" or "baseline".
INSTRUCTIONS: str = _math.INSTRUCTIONS

#: Of the numbers in ``batch.Singles``.
INT_BYTES = 4


class NativeDecoder:
    """A model, its weights packed; see ``forward.Decoder``.

    The packed weights are copies: what is changed in the model later is not seen.

    Args:
        model: weights, in eval mode.
        cache: where keys and values lie.
        rotary: of the positions that can occur.
        is_invariant: let no bit of a token depend on anything but the text before it.

    Raises:
        ValueError: the model is not what the C can compute; see ``can_run``.

    Threads: one at a time, as it has one workspace.
    """

    def __init__(
        self, model: LlamaModel, cache: KVCache, rotary: Rotary, *, is_invariant: bool = False
    ) -> None:
        if reason := self.reason_against(model):
            raise ValueError(f"the native decoder cannot run this model: {reason}")
        self.model = model
        self.cache = cache
        self._is_invariant = is_invariant
        self._cos, self._sin = rotary.tables
        self.layers = [
            _Layer(layer, model, cache) for layer in model.layers if isinstance(layer, DecoderLayer)
        ]
        self.norm = _Norm(model.norm)
        head = model.embed_tokens if model.lm_head is None else model.lm_head
        self.head = _Linear(head.weight, None)
        self._work = _Workspace(model, 0)

    @staticmethod
    def reason_against(model: LlamaModel) -> str | None:
        """Return why this model cannot be computed here, or None."""
        weight = model.embed_tokens.weight
        if weight.dtype is not torch.float32 or not weight.is_cpu:
            return f"its weights are {weight.dtype} on {weight.device}, not float32 on a cpu"
        if model.config.head_dim % _math.LANES:
            return f"head_dim is {model.config.head_dim}, not a multiple of {_math.LANES}"
        return None

    def begin(self, rows: Sequence[ScheduledRow], *, step: int) -> Forward:
        """See ``forward.Decoder``."""
        batch = PackedBatch(rows, cache=self.cache, is_native=True, is_invariant=self._is_invariant)
        if batch.num_tokens > self._work.num_tokens:
            self._work = _Workspace(self.model, batch.num_tokens)
        hidden = self.model.embed_tokens(batch.token_ids)
        return _NativeForward(self, self._work, batch, hidden)

    def sample(self, logits: Tensor, requests: Sequence[Request]) -> list[int | None]:
        """See ``forward.Decoder``."""
        return sample(logits, requests)

    def wait(self) -> None:
        """See ``forward.Decoder``: what has returned is done."""

    def rope(self, positions: Tensor) -> tuple[int, int, int, int]:
        """Return the last arguments of ``_math.rotate``."""
        return (
            self._cos.shape[-1],
            self._cos.data_ptr(),
            self._sin.data_ptr(),
            positions.data_ptr(),
        )

    def scores(self, hidden: Tensor) -> Tensor:
        """Return the scores after those hidden states, [num_tokens, vocab_size]."""
        num_tokens = hidden.shape[0]
        self.norm(hidden.data_ptr(), num_tokens, hidden.data_ptr())
        scores = torch.empty(num_tokens, self.head.num_outputs)
        self.head(hidden.data_ptr(), num_tokens, scores.data_ptr())
        softcap = self.model.config.logit_softcap
        return soft_cap(scores, softcap) if softcap else scores


class _NativeForward:
    def __init__(
        self, decoder: NativeDecoder, work: "_Workspace", batch: PackedBatch, hidden: Tensor
    ) -> None:
        self.batch = batch
        self._decoder = decoder
        self._work = work
        self._hidden = hidden
        self._rope = decoder.rope(batch.positions)

    def layer(self, index: int) -> bool:
        layer = self._decoder.layers[index]
        return layer(self._hidden, self._rope, self.batch, self._work)

    def logits(self, indices: Sequence[int]) -> Tensor:
        return self._decoder.scores(self._hidden[list(indices)])


class _Workspace:
    """What lies between the operations of a layer, for so many tokens; and their addresses."""

    def __init__(self, model: LlamaModel, num_tokens: int) -> None:
        config = model.config
        queries = config.num_heads * config.head_dim
        qkv = queries + 2 * config.num_kv_heads * config.head_dim
        self.num_tokens = num_tokens
        self.qkv = torch.empty(num_tokens, qkv)
        self.attended = torch.empty(num_tokens, queries)
        self._buffers = [
            torch.empty(num_tokens, size)
            for size in (config.hidden_size, 2 * config.intermediate_size, config.intermediate_size)
        ]
        self.normed, self.wide, self.gated = (buffer.data_ptr() for buffer in self._buffers)
        self._scratch = torch.empty(0)

    def scratch(self, size: int) -> int:
        """Return the address of so many floats."""
        if self._scratch.numel() < size:
            self._scratch = torch.empty(2 * size)
        return self._scratch.data_ptr()


class _Linear:
    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        weight = weight.detach().contiguous()
        self.num_outputs, self._num_inputs = weight.shape
        self._packed = torch.empty(_math.linear_size(self.num_outputs, self._num_inputs))
        _math.linear_pack(
            weight.data_ptr(), self.num_outputs, self._num_inputs, self._packed.data_ptr()
        )
        self._bias = None if bias is None else bias.detach().contiguous()
        self._packed_at = self._packed.data_ptr()
        self._bias_at = 0 if self._bias is None else self._bias.data_ptr()

    @classmethod
    def of(cls, linear: nn.Linear) -> "_Linear":
        return cls(linear.weight, linear.bias)

    def __call__(self, x: int, num_tokens: int, out: int, *, residual: int = 0) -> None:
        _math.linear(
            x,
            num_tokens,
            self._num_inputs,
            self._packed_at,
            self.num_outputs,
            self._bias_at,
            residual,
            out,
        )


class _Norm:
    def __init__(self, norm: nn.RMSNorm) -> None:
        weight = norm.weight.detach()
        self._weight = 1.0 + weight if isinstance(norm, OffsetNorm) else weight.contiguous()
        self._weight_at = self._weight.data_ptr()
        self._size = weight.numel()
        self._epsilon = norm.eps or 0.0

    @classmethod
    def of(cls, norm: nn.RMSNorm | None) -> "_Norm | None":
        return None if norm is None else cls(norm)

    def __call__(self, x: int, num_tokens: int, out: int, *, residual: int = 0) -> None:
        size = self._size
        _math.rms_norm(x, size, num_tokens, 1, size, self._weight_at, self._epsilon, residual, out)

    def heads(self, x: int, stride: int, num_tokens: int, num_heads: int) -> None:
        """Norm each of so many heads of each token, in place."""
        _math.rms_norm(
            x, stride, num_tokens, num_heads, self._size, self._weight_at, self._epsilon, 0, x
        )


@dataclass(slots=True)
class _Sizes:
    heads: int
    kv_heads: int
    head_dim: int
    qkv: int


class _Layer:
    """See ``model.DecoderLayer``, whose order of operations this is."""

    def __init__(self, layer: DecoderLayer, model: LlamaModel, cache: KVCache) -> None:
        config = model.config
        heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self._sizes = _Sizes(heads, kv_heads, head_dim, (heads + 2 * kv_heads) * head_dim)
        self._index, self._rule = layer.index, layer.rule
        self._intermediate_size = config.intermediate_size
        self._is_silu = layer.is_silu
        self._norm, self._mlp_norm = (
            _Norm(layer.input_layernorm),
            _Norm(layer.post_attention_layernorm),
        )
        self._q_norm, self._k_norm = _Norm.of(layer.q_norm), _Norm.of(layer.k_norm)
        self._output_norm = _Norm.of(layer.attention_output_norm)
        self._mlp_output_norm = _Norm.of(layer.mlp_output_norm)
        self._qkv, self._o = _Linear.of(layer.qkv_proj), _Linear.of(layer.o_proj)
        self._gate_up, self._down = _Linear.of(layer.gate_up_proj), _Linear.of(layer.down_proj)
        keys, values = cache.keys[layer.index], cache.values[layer.index]
        self._keys_at, self._values_at = keys.data_ptr(), values.data_ptr()
        scale = layer.rule.scale
        self._attention = _math.Attention(
            keys=self._keys_at,
            values=self._values_at,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            block_size=cache.block_size,
            scale=head_dim**-0.5 if scale is None else scale,
            softcap=layer.rule.softcap,
            window=layer.rule.window,
        )

    def __call__(
        self, hidden: Tensor, rope: tuple[int, int, int, int], batch: PackedBatch, work: _Workspace
    ) -> bool:
        """Compute the layer; ``hidden`` is changed in place. Returns as ``Forward.layer``."""
        num_tokens, hidden_at, normed = batch.num_tokens, hidden.data_ptr(), work.normed
        self._norm(hidden_at, num_tokens, normed)
        self._qkv(normed, num_tokens, work.qkv.data_ptr())
        if not self._attend(num_tokens, rope, batch, work):
            return False
        attended = work.attended.data_ptr()
        if self._output_norm is None:
            self._o(attended, num_tokens, hidden_at, residual=hidden_at)
        else:
            self._o(attended, num_tokens, normed)
            self._output_norm(normed, num_tokens, hidden_at, residual=hidden_at)
        self._mlp_norm(hidden_at, num_tokens, normed)
        self._gate_up(normed, num_tokens, work.wide)
        _math.gate(work.wide, num_tokens, self._intermediate_size, self._is_silu, work.gated)
        if self._mlp_output_norm is None:
            self._down(work.gated, num_tokens, hidden_at, residual=hidden_at)
        else:
            self._down(work.gated, num_tokens, normed)
            self._mlp_output_norm(normed, num_tokens, hidden_at, residual=hidden_at)
        return True

    def _attend(
        self,
        num_tokens: int,
        rope: tuple[int, int, int, int],
        batch: PackedBatch,
        work: _Workspace,
    ) -> bool:
        """From ``work.qkv`` to ``work.attended``, by way of the cache."""
        sizes, query = self._sizes, work.qkv.data_ptr()
        row_bytes = sizes.head_dim * work.qkv.itemsize
        key = query + sizes.heads * row_bytes
        value = key + sizes.kv_heads * row_bytes
        if self._q_norm is not None and self._k_norm is not None:
            self._q_norm.heads(query, sizes.qkv, num_tokens, sizes.heads)
            self._k_norm.heads(key, sizes.qkv, num_tokens, sizes.kv_heads)
        num_turned = sizes.heads + sizes.kv_heads
        _math.rotate(query, sizes.qkv, num_tokens, num_turned, sizes.head_dim, *rope)
        row_size, slots = sizes.kv_heads * sizes.head_dim, batch.slots.data_ptr()
        _math.scatter(key, sizes.qkv, num_tokens, row_size, slots, self._keys_at)
        _math.scatter(value, sizes.qkv, num_tokens, row_size, slots, self._values_at)
        for singles in batch.singles:
            scratch = work.scratch(singles.num_padded * sizes.heads)
            # Looked at once a piece: the attention of a long prompt is most of a layer's work.
            for done in range(0, singles.num_rows, MAX_UNWATCHED):
                if done and batch.is_left:
                    return False
                first = singles.first + done
                self._attention.attend(
                    query + first * sizes.qkv * work.qkv.itemsize,
                    sizes.qkv,
                    min(MAX_UNWATCHED, singles.num_rows - done),
                    singles.tables_at + done * singles.num_blocks * INT_BYTES,
                    singles.num_blocks,
                    singles.lengths_at + done * INT_BYTES,
                    scratch,
                    work.attended[first].data_ptr(),
                )
        heads = work.qkv[:num_tokens].view(num_tokens, -1, sizes.head_dim)
        parts = heads.split_with_sizes((sizes.heads, sizes.kv_heads, sizes.kv_heads), 1)
        for first, last, output in batch.attention.prefill(self._index, *parts, rule=self._rule):
            work.attended[first:last] = output
        return not (batch.has_longer and batch.is_left)
