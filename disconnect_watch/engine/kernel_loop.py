"""Decode for several steps in one launch: the host looks again when the device has ended.

The step is that of ``kernel_decoder.py`` for rows of one token, and draws and appends the token,
too; so the next one needs no host. Who leaves is dead at the next latch, in the middle of the
launch; the launch ends when all rows are dead or done. On a CPU the same step and latch run in a
loop of the host's.

A graph has its addresses built in. So rows, blocks and parameters lie in tensors that stay, made
for a number of rows that is a power of two; what is not taken of them is as good as dead.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from disconnect_watch.engine.kernel_attend import attention_params
from disconnect_watch.engine.kernel_batch import flags_of, signed
from disconnect_watch.engine.kv_cache import KVCache
from disconnect_watch.engine.logprobs import DrawnLogprobs, RowLogprobs, wants_logprobs
from disconnect_watch.engine.model import DecoderLayer, LlamaModel
from disconnect_watch.engine.outcome import Drawn, Sampled, TokenLogprobs
from disconnect_watch.engine.params import MAX_STOP_TOKEN_IDS
from disconnect_watch.engine.rotary import Rotary
from disconnect_watch.engine.schedule import ScheduledRow
from disconnect_watch.kernels import (
    Control,
    DecodeState,
    FlagView,
    Kernels,
    PagedKV,
    RowState,
    Sampling,
    make_loop,
)

__all__ = ["DecodeLoop", "LoopShape"]

#: Tokens that end a row: most have no more than so many, and a step compares with each.
FEW_STOPS = 8


@dataclass(frozen=True, slots=True)
class LoopShape:
    """What a loop's tensors are made for.

    Attributes:
        num_rows: at most.
        max_stops: tokens that end a row, at most.
        has_filter: whether a row may have ``top_k`` or ``top_p``, for which scores are sorted.
        has_logprobs: whether a row may tell how likely its tokens were.
    """

    num_rows: int
    max_stops: int
    has_filter: bool
    has_logprobs: bool

    @classmethod
    def of(cls, rows: Sequence[ScheduledRow], eos_token_ids: Sequence[int]) -> "LoopShape":
        """Return the smallest that the rows fit into; of few different ones."""
        params = [row.request.params for row in rows]
        num_stops = max(len(stops_of(row, eos_token_ids)) for row in rows)
        return cls(
            num_rows=1 << (len(rows) - 1).bit_length(),
            max_stops=FEW_STOPS
            if num_stops <= FEW_STOPS
            else MAX_STOP_TOKEN_IDS + len(eos_token_ids),
            has_filter=any(p.top_k > 0 or p.top_p < 1 for p in params),
            has_logprobs=any(wants_logprobs(p) for p in params),
        )


class DecodeLoop:
    """A model and its cache, and up to so many rows that decode.

    Args:
        model, cache, rotary, kernels, flags: see ``KernelDecoder``.
        shape: of the rows.
        max_steps: of one launch.
        max_blocks: of a row.

    Raises:
        UnavailableError, DriverError: a GPU on which the loop cannot be captured.
    """

    def __init__(
        self,
        model: LlamaModel,
        cache: KVCache,
        rotary: Rotary,
        *,
        kernels: Kernels,
        flags: FlagView,
        shape: LoopShape,
        max_steps: int,
        max_blocks: int,
    ) -> None:
        self._model = model
        self._cache = cache
        self._rotary = rotary
        self._kernels = kernels
        self._flags = flags
        self._eos_token_ids = model.config.eos_token_ids
        device = flags.words.device
        self._rows = RowState.create(shape.num_rows, device=device)
        self._state = DecodeState.create(
            self._rows,
            max_blocks=max_blocks,
            block_size=cache.block_size,
            max_steps=max_steps,
            max_stops=shape.max_stops,
        )

        def column(dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape.num_rows, dtype=dtype, device=device)

        self._sampling = Sampling(
            temperatures=column(torch.float32),
            seeds=column(torch.int64),
            top_k=column(torch.int32) if shape.has_filter else None,
            top_p=column(torch.float32) if shape.has_filter else None,
        )
        self._logprobs = (
            DrawnLogprobs(
                shape.num_rows, max_steps, vocab_size=model.config.vocab_size, device=device
            )
            if shape.has_logprobs
            else None
        )
        # What each latch acknowledges with, less one: the number of the step, not the latch's.
        self._before = torch.zeros(1, dtype=torch.int32, device=device)
        self._loop = make_loop(self._step, self._latch, self._rows)

    def run(
        self, rows: Sequence[ScheduledRow], *, step: int, look: Callable[[], None]
    ) -> list[Drawn]:
        """Compute rows of one token each, and go on for as many as ``num_draws`` says.

        Args:
            rows: that the shape has room for.
            step: number that acks are given.
            look: see ``StepLoop.wait``.

        Returns:
            What each row drew, in order; of a cancelled one also what nobody may hear.
        """
        self._put(rows)
        self._before.fill_(step - 1)
        self._flags.refresh()
        self._loop.launch(max(row.num_draws for row in rows))
        self._loop.wait(look)
        drawn, num_drawn = self._state.drawn.tolist(), self._state.num_drawn.tolist()
        told = None if self._logprobs is None else self._logprobs.read()
        return [
            self._result(
                row, drawn[index][: num_drawn[index]], None if told is None else told[index]
            )
            for index, row in enumerate(rows)
        ]

    def _result(
        self, row: ScheduledRow, tokens: list[int], logprobs: Sequence[RowLogprobs] | None
    ) -> Drawn:
        params = row.request.params
        result: Drawn
        if logprobs is not None and wants_logprobs(params):
            result = [
                Sampled(token, TokenLogprobs(token, chosen, top[: params.logprobs or 0]))
                for token, (chosen, top) in zip(tokens, logprobs, strict=False)
            ]
        else:
            result = [Sampled(token) for token in tokens]
        is_done = len(tokens) == row.num_draws or (
            tokens and tokens[-1] in stops_of(row, self._eos_token_ids)
        )
        if not is_done and not row.request.is_cancelled:
            result.append(FloatingPointError("scores of the next token are not finite"))
        return result

    def _put(self, rows: Sequence[ScheduledRow]) -> None:
        """Give the rows their places; what is behind them is dead."""
        state, num = self._state, len(rows)
        requests = [row.request for row in rows]
        params = [request.params for request in requests]

        def fill(target: Tensor, values: Sequence[object]) -> None:
            target[:num].copy_(torch.tensor(values, dtype=target.dtype))

        slots, generations = flags_of(rows)
        size = self._cache.block_size
        fill(self._rows.slots, slots)
        fill(self._rows.generations, generations)
        fill(self._rows.seq_lens, [row.stop for row in rows])
        fill(
            self._rows.slot_mapping,
            [row.block_ids[row.start // size] * size + row.start % size for row in rows],
        )
        for dead, nothing in (
            (self._rows.slots, -1),
            (self._rows.seq_lens, 0),
            (self._rows.slot_mapping, -1),
        ):
            dead[num:] = nothing
        self._rows.live[:num] = 1
        self._rows.live[num:] = 0
        fill(state.token_ids, [row.request.token_ids[row.start] for row in rows])
        fill(state.positions, [row.start for row in rows])
        fill(state.limits, [row.stop + row.num_draws for row in rows])
        state.num_drawn.zero_()
        width = max(len(row.block_ids) for row in rows)
        fill(
            state.block_tables[:, :width],
            [row.block_ids + [0] * (width - len(row.block_ids)) for row in rows],
        )
        stops = [stops_of(row, self._eos_token_ids) for row in rows]
        most = max(map(len, stops))
        state.stop_token_ids.fill_(-1)
        fill(state.stop_token_ids[:, :most], [each + [-1] * (most - len(each)) for each in stops])
        fill(self._sampling.temperatures, [p.temperature for p in params])
        fill(self._sampling.seeds, [signed(request.seed) for request in requests])
        if self._sampling.top_k is not None and self._sampling.top_p is not None:
            fill(self._sampling.top_k, [p.top_k for p in params])
            fill(self._sampling.top_p, [p.top_p for p in params])

    def _latch(self) -> None:
        control = self._rows.control
        control[Control.STEP : Control.STEP + 1].copy_(self._before)
        self._kernels.latch(self._flags, self._rows)

    def _step(self) -> None:
        state, cache = self._state, self._cache
        hidden: Tensor = self._model.embed_tokens(state.token_ids)
        rope = self._rotary(state.positions)
        for index, layer in enumerate(self._model.layers):
            assert isinstance(layer, DecoderLayer)
            query, key, value = layer.heads(hidden, rope)
            kv = PagedKV(
                cache.keys[index], cache.values[index], state.block_tables, cache.block_size
            )
            self._kernels.write_kv(
                key.contiguous(), value.contiguous(), kv, self._rows.slot_mapping
            )
            attended = self._kernels.decode_attention(
                query.contiguous(),
                kv,
                self._rows,
                self._flags,
                params=attention_params(layer.rule, query.shape[-1]),
            )
            hidden = layer.close(hidden, attended.flatten(1))
        logits = self._model.logits(hidden)
        tokens = self._kernels.sample(logits, state.positions + 1, self._sampling)
        if self._logprobs is not None:
            self._logprobs.note(logits, tokens, state.num_drawn)
        self._kernels.advance(tokens, state)


def stops_of(row: ScheduledRow, eos_token_ids: Sequence[int]) -> list[int]:
    """Return the tokens at which a row ends; see ``ending``."""
    params = row.request.params
    return [*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)]
