"""Runs one step's rows through the model, and lets the caller look between any two layers."""

from collections.abc import Sequence

import torch
from torch import Tensor

from disconnect_watch.engine.batch import PackedBatch
from disconnect_watch.engine.kv_cache import KVCache
from disconnect_watch.engine.logprobs import token_logprobs
from disconnect_watch.engine.model import LlamaModel
from disconnect_watch.engine.outcome import Sampled, TokenLogprobs
from disconnect_watch.engine.request import Request
from disconnect_watch.engine.rotary import Rotary
from disconnect_watch.engine.sampler import sample
from disconnect_watch.engine.schedule import LayerCheck, ScheduledRow

__all__ = ["ModelRunner"]


class ModelRunner:
    """A model and its cache.

    Args:
        model: weights, in eval mode.
        cache: of the same dtype.
        max_model_len: positions that can occur.
    """

    def __init__(self, model: LlamaModel, cache: KVCache, *, max_model_len: int) -> None:
        self._model = model
        self._cache = cache
        self._rotary = Rotary(
            model.config, length=max_model_len, dtype=model.embed_tokens.weight.dtype
        )
        #: Tokens that each layer computed in the last step, in order; short if it was cut.
        self.layer_tokens: list[int] = []
        self._acked_step = 0

    @property
    def acked_step(self) -> int:
        """See ``schedule.Runner``: what has returned touches nothing any more."""
        return self._acked_step

    @torch.inference_mode()
    def run(
        self, rows: Sequence[ScheduledRow], *, step: int, layer_check: LayerCheck
    ) -> dict[str, Sampled | Exception]:
        """See ``schedule.Runner``; a row whose scores are not finite gets an error.

        Keys and values of a row go to its own slots only, so running a row again, alone or in
        other company, repeats the same writes.
        """
        try:
            return self._run(rows, layer_check)
        finally:
            self._acked_step = step

    def _run(
        self, rows: Sequence[ScheduledRow], layer_check: LayerCheck
    ) -> dict[str, Sampled | Exception]:
        batch = PackedBatch(rows, cache=self._cache)
        hidden = self._model.embed_tokens(batch.token_ids)
        rope = self._rotary(batch.positions)
        for index, layer in enumerate(self._model.layers):
            if dead := layer_check(index, batch.rows):
                if len(dead) == len(batch.rows):
                    return {}
                batch, kept = batch.without(dead)
                hidden = hidden.index_select(0, kept)
                rope = self._rotary(batch.positions)
            hidden = layer(hidden, rope, batch.attention)
            self.layer_tokens.append(batch.num_tokens)
        sampled = [
            (row.request, last - 1)
            for row, last in zip(batch.rows, batch.firsts[1:], strict=True)
            if row.is_sampled
        ]
        if not sampled:
            return {}
        requests = [request for request, _ in sampled]
        logits = self._model.logits(hidden[[index for _, index in sampled]])
        tokens = sample(logits, requests)
        logprobs = _logprobs(logits, requests, tokens)
        return {
            request.key: FloatingPointError("scores of the next token are not finite")
            if token is None
            else Sampled(token, logprobs.get(request.key))
            for request, token in zip(requests, tokens, strict=True)
        }


def _logprobs(
    logits: Tensor, requests: Sequence[Request], tokens: Sequence[int | None]
) -> dict[str, TokenLogprobs]:
    """Compute them for the requests that need them, by key."""
    wanted = [
        (index, request.key, token, request.params.logprobs or 0)
        for index, (request, token) in enumerate(zip(requests, tokens, strict=True))
        if token is not None and (request.params.logprobs is not None or request.params.is_best_of)
    ]
    if not wanted:
        return {}
    indices, names, chosen, num_top = zip(*wanted, strict=True)
    found = token_logprobs(logits[list(indices)], chosen, num_top)
    return dict(zip(names, found, strict=True))
