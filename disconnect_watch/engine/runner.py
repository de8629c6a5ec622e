"""Runs one step's rows through the model, and lets the caller look between any two layers."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from disconnect_watch.engine.batch import TokenBatch
from disconnect_watch.engine.forward import Decoder, Forward, LoopDecoder
from disconnect_watch.engine.logprobs import token_logprobs, wants_logprobs
from disconnect_watch.engine.outcome import Drawn, Sampled, TokenLogprobs
from disconnect_watch.engine.request import Request
from disconnect_watch.engine.schedule import LayerCheck, ScheduledRow

__all__ = ["ModelRunner"]

#: Tokens from which on a row is computed by itself: with so many, a product of its own costs little
#: more than a part in another one.
MIN_OWN_GROUP = 32


class ModelRunner:
    """A model and its cache, and what computes them.

    Args:
        decoder: of both.
    """

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
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
    ) -> dict[str, Drawn]:
        """See ``schedule.Runner``; a row whose scores are not finite gets an error.

        Keys and values of a row go to its own slots only, so running a row again, alone or in
        other company, repeats the same writes.
        """
        try:
            if max(row.num_draws for row in rows) > 1:
                return self._run_loop(rows, step, layer_check)
            return self._run(rows, step, layer_check)
        finally:
            self.decoder.wait()
            self._acked_step = step

    def _run_loop(
        self, rows: Sequence[ScheduledRow], step: int, layer_check: LayerCheck
    ) -> dict[str, Drawn]:
        """Several steps in one launch, in which the rows obey their flags without the host.

        The host only looks on: it sets the flags of those whose time is over, and notes who left.
        """
        assert isinstance(self.decoder, LoopDecoder), "rows of several draws need a loop"
        live = list(rows)

        def look() -> None:
            if live and (dead := layer_check(0, live)):
                gone = {row.request.key for row in dead}
                live[:] = [row for row in live if row.request.key not in gone]

        look()
        if not live:
            return {}
        begun = list(live)
        drawn = self.decoder.decode(begun, step=step, look=look)
        num_computed = sum(map(len, drawn))
        self.layer_tokens += [num_computed] * len(self.decoder.model.layers)
        return {row.request.key: result for row, result in zip(begun, drawn, strict=True)}

    def _run(
        self, rows: Sequence[ScheduledRow], step: int, layer_check: LayerCheck
    ) -> dict[str, Drawn]:
        groups = [_Group(self.decoder.begin(group, step=step)) for group in _grouped(rows)]
        live = list(rows)
        for index in range(len(self.decoder.model.layers)):
            if dead := layer_check(index, live):
                gone = {row.request.key for row in dead}
                live = [row for row in live if row.request.key not in gone]
                groups = [group for group in groups if not group.is_gone(gone)]
            groups = [group for group in groups if group.forward.layer(index)]
            if not groups:
                return {}
            self.layer_tokens.append(sum(group.batch.num_tokens for group in groups))
        scored = [(row, scores) for group in groups for row, scores in group.score()]
        wanted = {row.request.key for row in live}
        scored = [(row, scores) for row, scores in scored if row.request.key in wanted]
        if not scored:
            return {}
        requests = [row.request for row, _ in scored]
        logits = torch.stack([scores for _, scores in scored])
        if self.logits_hook is not None:
            logits = self.logits_hook(logits)
        tokens = self.decoder.sample(logits, requests)
        logprobs = _logprobs(logits, requests, tokens)
        return {
            request.key: [
                FloatingPointError("scores of the next token are not finite")
                if token is None
                else Sampled(token, logprobs.get(request.key))
            ]
            for request, token in zip(requests, tokens, strict=True)
        }


@dataclass(frozen=True, slots=True)
class _Group:
    """Rows that are computed together, from the first layer to their scores or not at all.

    How a product of matrices rounds may depend on the number of its rows. So none of a group leaves
    it on the way, and a row's bits are the same whether others of the step leave or stay.
    """

    forward: Forward

    @property
    def batch(self) -> TokenBatch:
        return self.forward.batch

    def is_gone(self, keys: Collection[str]) -> bool:
        """Whether all of its rows are among those that left."""
        return all(row.request.key in keys for row in self.batch.rows)

    def score(self) -> list[tuple[ScheduledRow, Tensor]]:
        """Return the scores of what follows each row that reaches its last token."""
        last = [
            (row, first - 1)
            for row, first in zip(self.batch.rows, self.batch.firsts[1:], strict=True)
            if row.is_sampled
        ]
        if not last:
            return []
        logits = self.forward.logits([index for _, index in last])
        return [(row, scores) for (row, _), scores in zip(last, logits, strict=True)]


def _grouped(rows: Sequence[ScheduledRow]) -> list[list[ScheduledRow]]:
    """Split a step's rows: each long one by itself, so that it can leave, all short ones together.

    A short one that dies stays till the end of the step: its few tokens cost less than a product
    of their own would.
    """
    short = [row for row in rows if row.num_tokens < MIN_OWN_GROUP]
    long = [[row] for row in rows if row.num_tokens >= MIN_OWN_GROUP]
    return [short, *long] if short else long


def _logprobs(
    logits: Tensor, requests: Sequence[Request], tokens: Sequence[int | None]
) -> dict[str, TokenLogprobs]:
    """Compute them for the requests that need them, by key."""
    wanted = [
        (index, request.key, token, request.params.logprobs or 0)
        for index, (request, token) in enumerate(zip(requests, tokens, strict=True))
        if token is not None and wants_logprobs(request.params)
    ]
    if not wanted:
        return {}
    indices, names, chosen, num_top = zip(*wanted, strict=True)
    found = token_logprobs(logits[list(indices)], chosen, num_top)
    return dict(zip(names, found, strict=True))
