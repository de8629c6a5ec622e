"""From queries, keys and values to sums: scale, soft cap and mask, whatever holds the keys."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["AttentionRule", "attend", "mask_of", "soft_cap"]


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """How one layer attends.

    Attributes:
        scale: factor of the scores; None for ``head_dim ** -0.5``.
        window: how many tokens, itself included, one sees at most; 0 for all before it.
        softcap: scores are bent into (-softcap, softcap); 0 for not at all.
    """

    scale: float | None = None
    window: int = 0
    softcap: float = 0.0


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None,
    is_causal: bool,
    rule: AttentionRule,
) -> Tensor:
    """Attend, with all of the rule but its window, which is the mask's affair.

    Args:
        query: [batch, heads, queries, head_dim].
        key, value: [batch, kv_heads, keys, head_dim]; heads are a multiple of kv_heads.
        mask: 0 or -inf, broadcast to [batch, heads, queries, keys]; None for all keys.
        is_causal: without a mask, query i sees the keys up to i.
        rule: see there.

    Returns:
        Like ``query``.
    """
    group = query.shape[1] // key.shape[1]
    if not rule.softcap:
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=is_causal,
            scale=rule.scale,
            enable_gqa=group > 1,
        )
    if is_causal:
        positions = torch.arange(query.shape[2])
        mask = mask_of(positions > positions[:, None], query.dtype)
    if group > 1:
        key, value = (heads.repeat_interleave(group, 1) for heads in (key, value))
    scale = query.shape[-1] ** -0.5 if rule.scale is None else rule.scale
    scores = soft_cap(query @ key.transpose(-1, -2) * scale, rule.softcap)
    if mask is not None:
        scores = scores + mask
    return scores.softmax(-1, dtype=torch.float32).to(value.dtype) @ value


def soft_cap(scores: Tensor, bound: float) -> Tensor:
    """Bend scores into (-bound, bound). Source: arXiv:2408.00118, section 2 (Gemma 2)."""
    return (scores / bound).tanh() * bound


def mask_of(is_hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what added to scores hides those: -inf where ``is_hidden``, 0 elsewhere."""
    return torch.zeros(is_hidden.shape, dtype=dtype).masked_fill_(is_hidden, -torch.inf)
