"""Runs one step's rows through the model, and lets the caller look between any two layers."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from disconnect_watch.engine.batch import PackedBatch
from disconnect_watch.engine.forward import Decoder, TorchDecoder
from disconnect_watch.engine.kv_cache import KVCache
from disconnect_watch.engine.logprobs import token_logprobs
from disconnect_watch.engine.model import LlamaModel
from disconnect_watch.engine.native import NativeDecoder
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
        is_native: compute by ``native.py``, not by torch.
    """

    def __init__(
        self, model: LlamaModel, cache: KVCache, *, max_model_len: int, is_native: bool = False
    ) -> None:
        self._model = model
        self._cache = cache
        self._num_layers = len(model.layers)
        rotary = Rotary(model.config, length=max_model_len, dtype=model.embed_tokens.weight.dtype)
        self._decoder: Decoder = (
            NativeDecoder(model, cache, rotary) if is_native else TorchDecoder(model, rotary)
        )
        #: Given the scores of a step, returns those to sample from; for tests.
        self.logits_hook: Callable[[Tensor], Tensor] | None = None
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
        batch = PackedBatch(rows, cache=self._cache, is_native=self._decoder.is_native)
        forward = self._decoder.begin(batch)
        for index in range(self._num_layers):
            if dead := layer_check(index, batch.rows):
                if len(dead) == len(batch.rows):
                    return {}
                batch, kept = batch.without(dead)
                forward.keep(batch, kept)
            forward.layer(index)
            self.layer_tokens.append(batch.num_tokens)
        sampled = [
            (row.request, last - 1)
            for row, last in zip(batch.rows, batch.firsts[1:], strict=True)
            if row.is_sampled
        ]
        if not sampled:
            return {}
        requests = [request for request, _ in sampled]
        logits = forward.logits([index for _, index in sampled])
        if self.logits_hook is not None:
            logits = self.logits_hook(logits)
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
