"""Attention, dense: every token sees those before it in its own sequence."""

from torch import Tensor
from torch.nn import functional as F

__all__ = ["CausalAttention"]


class CausalAttention:
    """Sequences of one length behind each other, nothing cached: for training and for checks."""

    def __init__(self, *, num_sequences: int) -> None:
        self._num_sequences = num_sequences

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See ``model.Attention``; ``num_tokens`` is a multiple of the number of sequences."""
        output = F.scaled_dot_product_attention(
            self._split(query),
            self._split(key),
            self._split(value),
            is_causal=True,
            enable_gqa=True,
        )
        return output.transpose(1, 2).reshape(query.shape[0], -1)

    def _split(self, heads: Tensor) -> Tensor:
        """[num_tokens, heads, head_dim] to [num_sequences, heads, length, head_dim]."""
        return heads.view(self._num_sequences, -1, *heads.shape[1:]).transpose(1, 2)
