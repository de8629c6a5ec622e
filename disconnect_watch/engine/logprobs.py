"""How likely the sampled tokens were, for those who ask."""

from collections.abc import Sequence

import torch
from torch import Tensor

from disconnect_watch.engine.outcome import TokenLogprobs
from disconnect_watch.engine.params import MAX_LOGPROBS, SamplingParams

__all__ = ["DrawnLogprobs", "RowLogprobs", "token_logprobs", "wants_logprobs"]

#: Of one token: its own logarithm, and id and logarithm of the likeliest.
RowLogprobs = tuple[float, tuple[tuple[int, float], ...]]


def wants_logprobs(params: SamplingParams) -> bool:
    """Whether it must be known how likely the tokens were: to tell it, or to choose by it."""
    return params.logprobs is not None or params.is_best_of


def token_logprobs(
    logits: Tensor, token_ids: Sequence[int], num_top: Sequence[int]
) -> list[TokenLogprobs]:
    """Look up how likely each token was, and which ones were likeliest.

    They are those of the model itself: before temperature, ``top_k`` and ``top_p``.

    Args:
        logits: [num_rows, vocab_size], any float dtype.
        token_ids: the token that each row went on with.
        num_top: how many of the likeliest each row wants.
    """
    logprobs = logits.float().log_softmax(-1)
    chosen = logprobs.gather(-1, torch.tensor(token_ids, device=logits.device)[:, None])[
        :, 0
    ].tolist()
    values, indices = logprobs.topk(min(max(num_top), logits.shape[-1]), dim=-1)
    top = [
        tuple(zip(ids, scores, strict=True))
        for ids, scores in zip(indices.tolist(), values.tolist(), strict=True)
    ]
    return [
        TokenLogprobs(token_id, logprob, ranked[:num])
        for token_id, logprob, ranked, num in zip(token_ids, chosen, top, num_top, strict=True)
    ]


class DrawnLogprobs:
    """The same for steps that a device takes by itself: it notes them, and the host reads them.

    Args:
        num_rows, max_steps: for so many tokens of each row.
        vocab_size: of the scores.
        device: of the scores.
    """

    def __init__(
        self, num_rows: int, max_steps: int, *, vocab_size: int, device: torch.device
    ) -> None:
        self._num_top = min(MAX_LOGPROBS, vocab_size)
        shape = num_rows, max_steps
        self._chosen = torch.zeros(shape, device=device)
        self._values = torch.zeros(*shape, self._num_top, device=device)
        self._ids = torch.zeros(*shape, self._num_top, dtype=torch.int64, device=device)

    def note(self, logits: Tensor, tokens: Tensor, num_drawn: Tensor) -> None:
        """Put down how likely each row's next token is; a graph can capture it.

        Args:
            logits: [num_rows, vocab_size], any float dtype.
            tokens: [num_rows], int64; of a row of -1 what is put down means nothing.
            num_drawn: [num_rows], int32; which of the row's tokens it is, from 0.
        """
        logprobs = logits.float().log_softmax(-1)
        at = num_drawn.long().clamp(max=self._chosen.shape[1] - 1)[:, None]
        self._chosen.scatter_(1, at, logprobs.gather(-1, tokens.clamp(min=0)[:, None]))
        values, ids = logprobs.topk(self._num_top, dim=-1)
        where = at[:, :, None].expand(-1, 1, self._num_top)
        self._values.scatter_(1, where, values[:, None])
        self._ids.scatter_(1, where, ids[:, None])

    def read(self) -> list[list[RowLogprobs]]:
        """Return what was put down, by row and token; waits for the device."""
        return [
            [
                (logprob, tuple(zip(ids, values, strict=True)))
                for logprob, ids, values in zip(*row, strict=True)
            ]
            for row in zip(
                self._chosen.tolist(), self._ids.tolist(), self._values.tolist(), strict=True
            )
        ]
