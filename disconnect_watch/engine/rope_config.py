"""How rotary frequencies are stretched for contexts longer than those of training."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from disconnect_watch.engine.errors import CheckpointError

__all__ = [
    "DynamicScaling",
    "LinearScaling",
    "Llama3Scaling",
    "LongScaling",
    "RopeConfig",
    "RopeScaling",
    "YarnScaling",
]


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """All frequencies divided by ``factor``. Source: arXiv:2306.15595."""

    factor: float


@dataclass(frozen=True, slots=True)
class DynamicScaling:
    """A base that grows with the length, once that exceeds ``original_length``.

    Source: "dynamic" of transformers, which is NTK-aware scaling (arXiv:2309.00071, section 3.1)
    with a factor that follows the length.
    """

    factor: float
    original_length: int


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Long waves stretched, short ones kept, those between blended.

    Source: Meta's llama-models, ``apply_scaling`` (arXiv:2407.21783, section 3.4.1 has the base
    only).
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_length: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """As for Llama 3, with the blend linear in the dimension. Source: arXiv:2309.00071.

    Attributes:
        beta_fast, beta_slow: turns within ``original_length`` between which the blend lies.
        attention_factor: cosines and sines are multiplied by it.
        truncate: whether the ends of the blend are moved out to whole dimensions.
    """

    factor: float
    original_length: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class LongScaling:
    """A divisor for each frequency, found by search. Source: arXiv:2402.13753 (LongRoPE).

    Attributes:
        short_factors, long_factors: up to ``original_length``, and beyond it.
        attention_factor: cosines and sines are multiplied by it.
    """

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_length: int
    attention_factor: float


RopeScaling = LinearScaling | DynamicScaling | Llama3Scaling | YarnScaling | LongScaling

#: What each kind may say; what is None in a file is as good as not there.
FIELDS: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "dynamic": frozenset({"factor"}),
    "llama3": frozenset(
        {
            "factor",
            "low_freq_factor",
            "high_freq_factor",
            "original_max_position_embeddings",
        }
    ),
    "yarn": frozenset(
        {
            "factor",
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        }
    ),
    "longrope": frozenset(
        {
            "factor",
            "original_max_position_embeddings",
            "attention_factor",
            "short_factor",
            "long_factor",
        }
    ),
}
COMMON_FIELDS = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding of one model.

    Attributes:
        theta: base of the frequencies.
        scaling: None for frequencies as they were trained.
        partial_factor: the part of each head's dimensions that is turned, from the first on.
    """

    theta: float = 10000.0
    scaling: RopeScaling | None = None
    partial_factor: float = 1.0

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "RopeConfig":
        """Read both spellings of a ``config.json``.

        transformers 4 kept theta beside ``rope_scaling``, 5 has it in ``rope_parameters``.

        Raises:
            CheckpointError: a kind or a field of it that is not known.
            KeyError: a field is missing.
        """
        parameters = {
            **{name: raw[name] for name in ("rope_theta", "partial_rotary_factor") if name in raw},
            **(raw.get("rope_parameters") or raw.get("rope_scaling") or {}),
        }
        parameters = {name: value for name, value in parameters.items() if value is not None}
        kind = parameters.get("rope_type") or parameters.get("type") or "default"
        # What Phi-3 called it before others took it over.
        kind = "longrope" if kind == "su" else kind
        if kind not in FIELDS:
            raise CheckpointError(
                f"rope scaling {kind!r} is not supported, only {', '.join(sorted(FIELDS))}"
            )
        unknown = parameters.keys() - FIELDS[kind] - COMMON_FIELDS
        if unknown:
            raise CheckpointError(f"rope scaling {kind!r} has an unknown field {min(unknown)!r}")
        return cls(
            theta=float(parameters.get("rope_theta", 10000.0)),
            scaling=_scaling(kind, parameters, raw),
            partial_factor=float(parameters.get("partial_rotary_factor", 1.0)),
        )


def _scaling(
    kind: str, parameters: Mapping[str, Any], raw: Mapping[str, Any]
) -> RopeScaling | None:
    # Phi-3 has it outside, where it counts more than what is inside.
    length = int(
        raw.get("original_max_position_embeddings")
        or parameters.get("original_max_position_embeddings")
        or raw["max_position_embeddings"]
    )
    match kind:
        case "linear":
            return LinearScaling(float(parameters["factor"]))
        case "dynamic":
            return DynamicScaling(float(parameters["factor"]), length)
        case "llama3":
            return Llama3Scaling(
                float(parameters["factor"]),
                float(parameters["low_freq_factor"]),
                float(parameters["high_freq_factor"]),
                length,
            )
        case "yarn":
            return _yarn(parameters, raw["max_position_embeddings"], length)
        case "longrope":
            factor = float(parameters.get("factor") or raw["max_position_embeddings"] / length)
            magnitude = math.sqrt(1 + math.log(factor) / math.log(length)) if factor > 1 else 1.0
            return LongScaling(
                tuple(map(float, parameters["short_factor"])),
                tuple(map(float, parameters["long_factor"])),
                length,
                float(parameters.get("attention_factor", magnitude)),
            )
    return None


def _yarn(parameters: Mapping[str, Any], max_length: int, length: int) -> YarnScaling:
    factor = float(parameters.get("factor") or max_length / length)
    some, all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")
    magnitude = _magnitude(factor, 1.0)
    if some and all_dim:
        magnitude = _magnitude(factor, some) / _magnitude(factor, all_dim)
    return YarnScaling(
        factor,
        length,
        float(parameters.get("attention_factor", magnitude)),
        beta_fast=float(parameters.get("beta_fast", 32.0)),
        beta_slow=float(parameters.get("beta_slow", 1.0)),
        truncate=bool(parameters.get("truncate", True)),
    )


def _magnitude(factor: float, scale: float) -> float:
    """By how much attention is sharpened. Source: arXiv:2309.00071, equation 22."""
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0
