"""Rotary position embedding: the angles, and their application to queries and keys."""

import math

import torch
from torch import Tensor

from disconnect_watch.engine.model_config import ModelConfig
from disconnect_watch.engine.rope_config import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    RopeScaling,
    YarnScaling,
)

__all__ = ["Rotary", "rotate"]


class Rotary:
    """Cosines and sines of every position up to a length, looked up per batch.

    Scalings that depend on the length of a sequence are taken for ``length``, whatever the
    sequence has: keys that lie in the cache cannot be turned again when theirs grows, and a block
    may be shared between a long sequence and a short one.

    Source: arXiv:2104.09864, in the half-split layout of Hugging Face checkpoints: dimension
    ``i`` is paired with ``i + rotary_dim / 2``.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        length: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        theta, magnitude = config.rope.theta, 1.0
        scaling = config.rope.scaling
        if isinstance(scaling, DynamicScaling):
            theta *= _growth(scaling, length, config.rotary_dim)
        elif isinstance(scaling, YarnScaling | LongScaling):
            magnitude = scaling.attention_factor
        exponents = torch.arange(0, config.rotary_dim, 2, dtype=torch.float32) / config.rotary_dim
        frequencies = _scale(1.0 / theta**exponents, scaling, theta=theta, length=length)
        angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)
        cos, sin = angles.cos() * magnitude, angles.sin() * magnitude
        self._cos = torch.cat((cos, cos), dim=-1).to(device, dtype)
        # The sign of the rotation is folded in, so that rotate() needs no negation.
        self._sin = torch.cat((-sin, sin), dim=-1).to(device, dtype)

    @property
    def tables(self) -> tuple[Tensor, Tensor]:
        """Cosines and sines of all positions, [length, rotary_dim], the sign folded into these."""
        return self._cos, self._sin

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of ``positions`` [num_tokens], each [num_tokens, 1, rotary_dim].

        The middle dimension broadcasts over heads.
        """
        return (
            self._cos.index_select(0, positions).unsqueeze(1),
            self._sin.index_select(0, positions).unsqueeze(1),
        )


def rotate(heads: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Turn ``heads`` [num_tokens, heads, head_dim] by the angles that ``Rotary`` returned."""
    cos, sin = rope
    rotary_dim = cos.shape[-1]
    if rotary_dim < heads.shape[-1]:
        sizes = (rotary_dim, heads.shape[-1] - rotary_dim)
        turned, kept = heads.split_with_sizes(sizes, -1)
        return torch.cat((rotate(turned, rope), kept), -1)
    return torch.addcmul(heads * cos, heads.roll(rotary_dim // 2, dims=-1), sin)


def _growth(scaling: DynamicScaling, length: int, dim: int) -> float:
    ratio: float = max(length / scaling.original_length, 1.0)
    return float((scaling.factor * ratio - (scaling.factor - 1)) ** (dim / (dim - 2)))


def _scale(
    frequencies: Tensor, scaling: RopeScaling | None, *, theta: float, length: int
) -> Tensor:
    match scaling:
        case None | DynamicScaling():
            return frequencies
        case LinearScaling(factor):
            return frequencies / factor
        case LongScaling():
            is_long = length > scaling.original_length
            return frequencies / torch.tensor(
                scaling.long_factors if is_long else scaling.short_factors
            )
        case Llama3Scaling():
            turns = scaling.original_length * frequencies / (2 * math.pi)
            span = scaling.high_freq_factor - scaling.low_freq_factor
            keep = ((turns - scaling.low_freq_factor) / span).clamp(0, 1)
        case YarnScaling():
            keep = _yarn_keep(scaling, theta, len(frequencies))
    return keep * frequencies + (1 - keep) * frequencies / scaling.factor


def _yarn_keep(scaling: YarnScaling, theta: float, num_frequencies: int) -> Tensor:
    """Return how much of each frequency is kept as it is, 1 for the fastest."""

    def index_of(turns: float) -> float:
        """Where, between the indices, the frequency would lie that turns so often."""
        wave = scaling.original_length / (2 * math.pi * turns)
        return num_frequencies * math.log(wave) / math.log(theta)

    first, last = index_of(scaling.beta_fast), index_of(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * num_frequencies - 1)
    # Where the two are one, the blend is a step.
    span = last - first or 0.001
    return 1 - ((torch.arange(num_frequencies) - first) / span).clamp(0, 1)
