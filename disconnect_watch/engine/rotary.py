"""Rotary position embedding: the angles, and their application to queries and keys."""

import math

import torch
from torch import Tensor

from disconnect_watch.engine.config import ModelConfig, RopeScaling

__all__ = ["Rotary", "rotate"]


class Rotary:
    """Cosines and sines of every position up to a length, looked up per batch.

    Source: arXiv:2104.09864, in the half-split layout of Hugging Face checkpoints: dimension
    ``i`` is paired with ``i + head_dim / 2``.
    """

    def __init__(self, config: ModelConfig, *, length: int, dtype: torch.dtype) -> None:
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        frequencies = 1.0 / config.rope_theta**exponents
        if config.rope_scaling is not None:
            frequencies = _scale(frequencies, config.rope_scaling)
        angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)
        self._cos = torch.cat((angles.cos(), angles.cos()), dim=-1).to(dtype)
        # The sign of the rotation is folded in, so that rotate() needs no negation.
        self._sin = torch.cat((-angles.sin(), angles.sin()), dim=-1).to(dtype)

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of ``positions`` [num_tokens], each [num_tokens, 1, head_dim].

        The middle dimension broadcasts over heads.
        """
        return (
            self._cos.index_select(0, positions).unsqueeze(1),
            self._sin.index_select(0, positions).unsqueeze(1),
        )


def rotate(heads: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Turn ``heads`` [num_tokens, heads, head_dim] by the angles that ``Rotary`` returned."""
    cos, sin = rope
    return torch.addcmul(heads * cos, heads.roll(heads.shape[-1] // 2, dims=-1), sin)


def _scale(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    # Llama 3: long waves are stretched, short ones kept, those between blended.
    # Source: rope_scaling of Llama 3.1 (arXiv:2407.21783, section 3.4.1 gives the base only; the
    # blend is in Meta's llama-models, apply_scaling).
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    keep = ((turns - scaling.low_freq_factor) / span).clamp(0, 1)
    return keep * frequencies + (1 - keep) * frequencies / scaling.factor
