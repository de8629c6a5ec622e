"""What a model is, from the ``config.json`` of its directory."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from disconnect_watch.engine.errors import CheckpointError
from disconnect_watch.engine.families import COMMON, FAMILIES, HARMLESS, Family
from disconnect_watch.engine.json_file import read_object
from disconnect_watch.engine.rope_config import DynamicScaling, RopeConfig, YarnScaling
from disconnect_watch.errors import shown

__all__ = ["ModelConfig"]

#: Names of activations, and ours.
ACTIVATIONS: dict[str, Literal["silu", "gelu_tanh"]] = {
    "silu": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape and constants of one decoder of the Llama family.

    Dimension names in the engine's docstrings are the names of these fields.

    Attributes:
        max_position_embeddings: tokens that a sequence may have.
        windows: for each layer how many tokens, itself included, a token sees at most, 0 for all;
            empty if all layers see all.
        attention_scale: factor of the attention scores; None for ``head_dim ** -0.5``.
        attention_softcap, logit_softcap: bounds that a tanh bends scores into; 0 for none.
        is_norm_offset: the weights of the RMS norms are stored less one.
        has_output_norms: attention and MLP are normed behind, too, before they are added.
        is_embedding_scaled: embeddings are multiplied by ``hidden_size ** 0.5``.
        is_stored_fused: the checkpoint has one tensor for queries, keys and values, and one for
            gate and up.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = field(default_factory=RopeConfig)
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    activation: Literal["silu", "gelu_tanh"] = "silu"
    windows: tuple[int, ...] = ()
    attention_scale: float | None = None
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0
    is_norm_offset: bool = False
    has_output_norms: bool = False
    is_embedding_scaled: bool = False
    is_stored_fused: bool = False
    dtype: str = "float32"
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise CheckpointError(
                f"{self.num_heads} attention heads cannot share {self.num_kv_heads} key/value heads"
            )
        if self.rotary_dim % 2 or not 0 < self.rotary_dim <= self.head_dim:
            raise CheckpointError(
                f"{self.rotary_dim} of {self.head_dim} dimensions of a head cannot be turned in "
                "pairs: head_dim and partial_rotary_factor do not fit"
            )

    @property
    def rotary_dim(self) -> int:
        """Dimensions of each head that are turned by the position."""
        return int(self.head_dim * self.rope.partial_factor)

    @classmethod
    def from_pretrained(cls, path: str | Path) -> "ModelConfig":
        """Read ``config.json``, and end tokens from ``generation_config.json`` if there is one.

        Raises:
            CheckpointError: a file is missing, is no JSON, or asks for what is not supported.
        """
        raw = read_object(Path(path) / "config.json")
        generation = Path(path) / "generation_config.json"
        if generation.exists():
            raw = {
                **raw,
                "eos_token_id": read_object(generation).get("eos_token_id")
                or raw.get("eos_token_id"),
            }
        return cls.from_dict(raw)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "ModelConfig":
        """Translate a ``config.json`` in the form of Hugging Face.

        Raises:
            CheckpointError: an unknown architecture, a missing field, a value that is none of its
                field, or a feature that would silently change the results if it were ignored.
        """
        try:
            return cls._from_dict(raw)
        except CheckpointError:
            raise
        except KeyError as error:
            raise CheckpointError(f"config.json has no {error.args[0]!r}") from error
        except (ArithmeticError, TypeError, ValueError) as error:
            raise CheckpointError(f"config.json has a value of the wrong kind: {error}") from error

    @classmethod
    def _from_dict(cls, raw: Mapping[str, Any]) -> "ModelConfig":
        architecture = (raw.get("architectures") or ["(none)"])[0]
        family = FAMILIES.get(architecture)
        if family is None:
            raise CheckpointError(
                f"architecture {architecture} is not supported, use one of "
                f"{', '.join(sorted(FAMILIES))}"
            )
        _refuse_unknown(raw, family)
        raw = {**family.defaults, **raw}
        hidden_size = _count(raw, "hidden_size")
        num_heads = _count(raw, "num_attention_heads")
        num_layers = _count(raw, "num_hidden_layers")
        rope = RopeConfig.from_dict(raw)
        if rope.partial_factor != 1 and "partial_rotary_factor" not in family.fields:
            raise CheckpointError(f"{architecture} cannot have a partial_rotary_factor")
        biased = bool(raw.get("attention_bias"))
        scalar = raw.get("query_pre_attn_scalar")
        return cls(
            vocab_size=_count(raw, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_count(raw, "intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=_count(raw, "num_key_value_heads", default=num_heads),
            head_dim=_count(raw, "head_dim", default=hidden_size // num_heads),
            max_position_embeddings=_max_length(_count(raw, "max_position_embeddings"), rope),
            rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            rope=rope,
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            activation=_activation(raw),
            windows=_windows(raw, family, num_layers),
            attention_scale=None if scalar is None else float(scalar) ** -0.5,
            attention_softcap=float(raw.get("attn_logit_softcapping") or 0.0),
            logit_softcap=float(raw.get("final_logit_softcapping") or 0.0),
            dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
            eos_token_ids=_token_ids(raw.get("eos_token_id")),
            **{
                "qkv_bias": biased,
                "output_bias": biased,
                "mlp_bias": bool(raw.get("mlp_bias")),
                **family.features,
            },
        )


def _count(raw: Mapping[str, Any], name: str, *, default: int | None = None) -> int:
    """Read how many there are of something; ``default`` stands for null and for no field."""
    value = raw[name] if default is None or raw.get(name) is not None else default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CheckpointError(
            f"config.json has {name!r} {shown(value)}, it must be an integer of at least 1"
        )
    return value


def _refuse_unknown(raw: Mapping[str, Any], family: Family) -> None:
    """Refuse a field that might change what the model computes.

    One that is off (None, False) can change nothing, nor does one that begins with an underscore.
    """
    known = COMMON | HARMLESS | family.fields | family.defaults.keys()
    for name, value in raw.items():
        if name not in known and value is not None and value is not False and name[0] != "_":
            raise CheckpointError(
                f"config.json has {name!r}, which is not known for "
                f"{raw['architectures'][0]}; remove it if the scores do not depend on it"
            )


def _max_length(length: int, rope: RopeConfig) -> int:
    """Two of the scalings are for what lies beyond the length that the file may have."""
    if isinstance(rope.scaling, DynamicScaling | YarnScaling):
        return max(length, int(rope.scaling.original_length * rope.scaling.factor))
    return length


def _activation(raw: Mapping[str, Any]) -> Literal["silu", "gelu_tanh"]:
    source = "hidden_activation" if "hidden_activation" in raw else "hidden_act"
    name = raw[source]
    if name not in ACTIVATIONS:
        raise CheckpointError(
            f"{source} {name!r} is not supported, only {', '.join(sorted(ACTIVATIONS))}"
        )
    return ACTIVATIONS[name]


def _windows(raw: Mapping[str, Any], family: Family, num_layers: int) -> tuple[int, ...]:
    window = raw.get("sliding_window")
    if not window or family.windowed == "none" or not raw.get("use_sliding_window", True):
        return ()
    types = raw.get("layer_types")
    if types is None:
        first, stride = {
            "every": (0, 1),
            "upper": (int(raw.get("max_window_layers", 0)), 1),
            "alternating": (0, 2),
        }[family.windowed]
        windowed = range(first, num_layers, stride)
        return tuple(int(window) if index in windowed else 0 for index in range(num_layers))
    if len(types) != num_layers:
        raise CheckpointError(f"layer_types has {len(types)} entries for {num_layers} layers")
    for kind in types:
        if kind not in ("full_attention", "sliding_attention"):
            raise CheckpointError(f"layer type {kind!r} is not supported")
    return tuple(int(window) if kind == "sliding_attention" else 0 for kind in types)


def _token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)
