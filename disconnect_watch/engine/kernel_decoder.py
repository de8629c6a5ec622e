"""The decoder with the kernels of ``disconnect_watch.kernels``: on a GPU, or interpreted on a CPU.

Products of matrices are torch's; what touches the cache, looks at a flag or draws a token is ours.

A GPU works on what the host has launched a while ago, so flags are looked at where the work is: the
latch runs before each layer of a prompt and once a step for the rest, and attention looks while it
runs. The host keeps at most one layer of a prompt ahead, lest its own looks come too early to
spare anything.
"""

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from disconnect_watch.engine.attend import AttentionRule
from disconnect_watch.engine.forward import Forward
from disconnect_watch.engine.kernel_attend import attention_params
from disconnect_watch.engine.kernel_batch import KernelBatch, signed
from disconnect_watch.engine.kernel_loop import DecodeLoop, LoopShape
from disconnect_watch.engine.kv_cache import KVCache
from disconnect_watch.engine.model import DecoderLayer, LlamaModel
from disconnect_watch.engine.outcome import Drawn
from disconnect_watch.engine.pace import Pace
from disconnect_watch.engine.request import Request
from disconnect_watch.engine.rotary import Rotary
from disconnect_watch.engine.schedule import ScheduledRow
from disconnect_watch.kernels import (
    FlagView,
    Kernels,
    PagedKV,
    Sampling,
    open_view,
)

__all__ = ["KernelDecoder", "flags_on"]


@cache
def flags_on(device: torch.device) -> FlagView:
    """The process's flags as a device sees them; for good, since pages are registered once."""
    return open_view(device)


class KernelDecoder:
    """A model whose weights and cache are on the device of the kernels; see ``forward.Decoder``.

    Args:
        model: weights, in eval mode.
        cache: where keys and values lie.
        rotary: of the positions that can occur.
        kernels: that run on that device.
        flags: as it sees them.
        max_steps: of one launch; 1 for a host that decides on each.
        max_blocks: that a request can have.
    """

    def __init__(
        self,
        model: LlamaModel,
        cache: KVCache,
        rotary: Rotary,
        *,
        kernels: Kernels,
        flags: FlagView,
        max_steps: int = 1,
        max_blocks: int = 0,
    ) -> None:
        self.model = model
        self.cache = cache
        self._rotary = rotary
        self._kernels = kernels
        self._flags = flags
        self._device = flags.words.device
        self._max_steps = max_steps
        self._max_blocks = max_blocks
        self._loops: dict[LoopShape, DecodeLoop] = {}

    def begin(self, rows: Sequence[ScheduledRow], *, step: int) -> Forward:
        """See ``forward.Decoder``."""
        batch = KernelBatch(rows, block_size=self.cache.block_size, device=self._device, step=step)
        return _KernelForward(
            self.model, self.cache, self._rotary, batch, kernels=self._kernels, flags=self._flags
        )

    def sample(self, logits: Tensor, requests: Sequence[Request]) -> list[int | None]:
        """See ``forward.Decoder``: the same numbers as on the host, see ``kernels.random``."""
        params = [request.params for request in requests]

        def column(values: list[int] | list[float], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=self._device)

        sampling = Sampling(
            temperatures=column([p.temperature for p in params], torch.float32),
            seeds=column([signed(request.seed) for request in requests], torch.int64),
            top_k=column([p.top_k for p in params], torch.int32)
            if any(p.top_k for p in params)
            else None,
            top_p=column([p.top_p for p in params], torch.float32)
            if any(p.top_p < 1 for p in params)
            else None,
        )
        positions = column([len(request.token_ids) for request in requests], torch.int64)
        tokens = self._kernels.sample(logits, positions, sampling).tolist()
        return [None if token < 0 else token for token in tokens]

    def decode(
        self, rows: Sequence[ScheduledRow], *, step: int, look: Callable[[], None]
    ) -> list[Drawn]:
        """See ``forward.Decoder``."""
        shape = LoopShape.of(rows, self.model.config.eos_token_ids)
        loop = self._loops.get(shape)
        if loop is None:
            loop = self._loops[shape] = DecodeLoop(
                self.model,
                self.cache,
                self._rotary,
                kernels=self._kernels,
                flags=self._flags,
                shape=shape,
                max_steps=self._max_steps,
                max_blocks=self._max_blocks,
            )
        return loop.run(rows, step=step, look=look)

    def wait(self) -> None:
        """See ``forward.Decoder``."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        self._flags.collect()


class _KernelForward:
    def __init__(
        self,
        model: LlamaModel,
        cache: KVCache,
        rotary: Rotary,
        batch: KernelBatch,
        *,
        kernels: Kernels,
        flags: FlagView,
    ) -> None:
        self.batch = batch
        self._model = model
        self._cache = cache
        self._kernels = kernels
        self._flags = flags
        self._hidden: Tensor = model.embed_tokens(batch.token_ids)
        self._rope = rotary(batch.positions)
        is_ahead = batch.has_longer and self._hidden.is_cuda
        self._pace = Pace(torch.cuda.Event) if is_ahead else None

    def layer(self, index: int) -> bool:
        if index == 0 or self.batch.has_longer:
            self._latch()
        layer = self._model.layers[index]
        assert isinstance(layer, DecoderLayer)
        attended = self._attend(index, *layer.heads(self._hidden, self._rope), layer.rule)
        if self.batch.has_longer and self.batch.is_left:
            return False
        self._hidden = layer.close(self._hidden, attended)
        if self._pace is not None:
            self._pace.launched()
        return True

    def logits(self, indices: Sequence[int]) -> Tensor:
        return self._model.logits(self._hidden[list(indices)])

    def _latch(self) -> None:
        self._flags.refresh()
        self.batch.begin_latch()
        self._kernels.latch(self._flags, self.batch.state)
        self.batch.end_latch()

    def _attend(
        self, index: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule
    ) -> Tensor:
        """See ``model.Attention``."""
        batch, num_singles = self.batch, self.batch.num_singles
        query = query.contiguous()
        params = attention_params(rule, query.shape[-1])

        def paged(block_tables: Tensor) -> PagedKV:
            keys, values = self._cache.keys[index], self._cache.values[index]
            return PagedKV(keys, values, block_tables, self._cache.block_size)

        outputs: list[Tensor] = []
        for part in (batch.singles, batch.longer):
            if part is None:
                continue
            kv = paged(part.block_tables)
            if not outputs:
                self._kernels.write_kv(key.contiguous(), value.contiguous(), kv, batch.live_slots)
            if part is batch.singles:
                output = self._kernels.decode_attention(
                    query[:num_singles], kv, part.rows, self._flags, params=params
                )
            else:
                output = self._kernels.prefill_attention(
                    query[num_singles:],
                    kv,
                    part.rows,
                    self._flags,
                    query_starts=batch.query_starts,
                    max_query_len=batch.max_query_len,
                    params=params,
                )
            outputs.append(output)
        return torch.cat(outputs).flatten(1)
