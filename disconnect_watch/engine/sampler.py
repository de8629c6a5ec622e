"""From scores to tokens, row by row independent of the other rows.

Rows are sampled together with those of their own kind only (greedy, plain, filtered): the sorted
order of the filtered ones would map the same random number to another token, so a request must
not be drawn into it by its neighbours' parameters.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from disconnect_watch.engine import _math
from disconnect_watch.engine.request import Request
from disconnect_watch.engine.rng import uniform

__all__ = ["argmax", "sample"]

#: At or below it the likeliest token is taken: scores divided by less could overflow.
MIN_TEMPERATURE = 1e-5


def argmax(scores: Tensor) -> Tensor:
    """Return the index of each row's greatest score, -1 where that is no finite number.

    Args:
        scores: [num_rows, size], float32, on a CPU.

    Returns:
        [num_rows], int64.
    """
    scores = scores.contiguous()
    chosen = torch.empty(scores.shape[0], dtype=torch.int64)
    num_rows, size = scores.shape
    _math.argmax(scores.data_ptr(), num_rows, size, chosen.data_ptr())
    return chosen


def sample(logits: Tensor, requests: Sequence[Request]) -> list[int | None]:
    """Choose the next token of each request.

    Args:
        logits: [num_requests, vocab_size], any float dtype.
        requests: whose parameters, seed and length say how.

    Returns:
        A token id for each, or None where the scores are no finite numbers.
    """
    logits = logits.float()
    chosen = argmax(logits)
    kinds: dict[Callable[[Tensor, Sequence[Request]], Tensor], list[int]] = {}
    for index, request in enumerate(requests):
        if request.params.temperature > MIN_TEMPERATURE:
            is_filtered = request.params.top_k > 0 or request.params.top_p < 1
            kinds.setdefault(_filtered if is_filtered else _plain, []).append(index)
    for draw, indices in kinds.items():
        rows = torch.tensor(indices)
        temperatures = [[requests[index].params.temperature] for index in indices]
        scores = logits[rows] / torch.tensor(temperatures)
        drawn = draw(scores, [requests[index] for index in indices])
        chosen[rows] = torch.where(chosen[rows] < 0, -1, drawn)
    return [None if token < 0 else token for token in chosen.tolist()]


def _plain(scores: Tensor, requests: Sequence[Request]) -> Tensor:
    return _invert(scores.softmax(-1), requests)


def _filtered(scores: Tensor, requests: Sequence[Request]) -> Tensor:
    """Keep the ``top_k`` likeliest, and of those the ``top_p`` mass: at least one is kept."""
    vocab_size = scores.shape[-1]
    scores, order = scores.sort(dim=-1, descending=True, stable=True)
    top_k = torch.tensor([[request.params.top_k or vocab_size] for request in requests])
    scores = scores.masked_fill(torch.arange(vocab_size) >= top_k, -torch.inf)
    probabilities = scores.softmax(-1)
    top_p = torch.tensor([[request.params.top_p] for request in requests])
    mass_before = probabilities.cumsum(-1) - probabilities
    probabilities = probabilities.masked_fill(mass_before >= top_p, 0)
    return torch.gather(order, -1, _invert(probabilities, requests)[:, None])[:, 0]


def _invert(probabilities: Tensor, requests: Sequence[Request]) -> Tensor:
    """Map one random number a row through the inverse of its cumulative distribution.

    Sums are taken in float64: over a large vocabulary float32 loses the small probabilities.
    """
    cumulative = probabilities.cumsum(-1, dtype=torch.float64)
    numbers = torch.tensor(
        [[uniform(request.seed, len(request.token_ids))] for request in requests],
        dtype=torch.float64,
    )
    drawn = torch.searchsorted(cumulative, numbers * cumulative[:, -1:], right=True)[:, 0]
    # Rounding may put the product on the total; a spoilt row is replaced by the caller.
    return drawn.clamp_(max=probabilities.shape[-1] - 1)
