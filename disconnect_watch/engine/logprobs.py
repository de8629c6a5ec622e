"""How likely the sampled tokens were, for those who ask."""

from collections.abc import Sequence

import torch
from torch import Tensor

from disconnect_watch.engine.outcome import TokenLogprobs

__all__ = ["token_logprobs"]


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
