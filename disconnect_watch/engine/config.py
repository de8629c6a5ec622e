"""What a model is (from its ``config.json``) and how the engine runs it (from the user)."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from disconnect_watch.engine.errors import CheckpointError

__all__ = ["EngineConfig", "ModelConfig", "RopeScaling"]

ARCHITECTURES = frozenset(
    {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
)


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the context that the model was trained at.

    Source: the ``rope_scaling`` (since transformers 5: ``rope_parameters``) entry of config.json.
    """

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape and constants of one decoder of the Llama family.

    Dimension names in the engine's docstrings are the names of these fields.
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
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    dtype: str = "float32"
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise CheckpointError(
                f"{self.num_heads} attention heads cannot share {self.num_kv_heads} key/value heads"
            )

    @classmethod
    def from_pretrained(cls, path: str | Path) -> "ModelConfig":
        """Read ``config.json``, and end tokens from ``generation_config.json`` if there is one.

        Raises:
            CheckpointError: a file is missing, is no JSON, or asks for what is not supported.
        """
        raw = _read_json(Path(path) / "config.json")
        generation = Path(path) / "generation_config.json"
        if generation.exists():
            raw = {
                **raw,
                "eos_token_id": _read_json(generation).get("eos_token_id")
                or raw.get("eos_token_id"),
            }
        return cls.from_dict(raw)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "ModelConfig":
        """Translate a ``config.json`` in the form of Hugging Face.

        Raises:
            CheckpointError: an unknown architecture, a missing field, or a feature that would
                silently change the results if it were ignored.
        """
        architecture = (raw.get("architectures") or ["(none)"])[0]
        if architecture not in ARCHITECTURES:
            raise CheckpointError(
                f"architecture {architecture} is not supported, use one of "
                f"{', '.join(sorted(ARCHITECTURES))}"
            )
        if raw.get("hidden_act", "silu") != "silu":
            raise CheckpointError(f"hidden_act {raw['hidden_act']!r} is not supported, only 'silu'")
        try:
            num_heads = int(raw["num_attention_heads"])
            rope_theta, rope_scaling = _rope(raw)
            biased = bool(raw.get("attention_bias", False))
            return cls(
                vocab_size=int(raw["vocab_size"]),
                hidden_size=int(raw["hidden_size"]),
                intermediate_size=int(raw["intermediate_size"]),
                num_layers=int(raw["num_hidden_layers"]),
                num_heads=num_heads,
                num_kv_heads=int(raw.get("num_key_value_heads") or num_heads),
                head_dim=int(raw.get("head_dim") or raw["hidden_size"] // num_heads),
                max_position_embeddings=_context(raw),
                rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
                rope_theta=rope_theta,
                rope_scaling=rope_scaling,
                tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
                # Qwen2 has these biases without a field that says so.
                qkv_bias=biased or architecture == "Qwen2ForCausalLM",
                output_bias=biased,
                mlp_bias=bool(raw.get("mlp_bias", False)),
                qk_norm=architecture == "Qwen3ForCausalLM",
                dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
                eos_token_ids=_token_ids(raw.get("eos_token_id")),
            )
        except KeyError as error:
            raise CheckpointError(f"config.json has no {error.args[0]!r}") from error


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How one engine runs its model. Every limit is checked when the engine is made.

    Args:
        block_size: tokens in one block of the KV cache.
        num_blocks: blocks in the cache; None takes what ``kv_cache_bytes`` allows, and no more
            than ``max_num_seqs`` requests of full length could fill.
        kv_cache_bytes: memory budget of the cache when ``num_blocks`` is None.
        max_num_seqs: requests that run at the same time.
        max_num_batched_tokens: tokens in one step, which is also the longest prefill chunk; at
            least ``max_num_seqs``, so that every running request advances in each step.
        max_queue: requests that may wait.
        enable_prefix_caching: keep full blocks of what was computed, cancelled requests
            included, until the space is needed, and share them between requests that begin alike.
        max_model_len: tokens of prompt and answer together; None takes the model's own limit, or
            less where the cache is smaller than that.
        dtype: of weights and cache: ``"auto"`` is float32, the fastest on a CPU whatever the
            checkpoint has.
        num_threads: of torch within one operation; None takes one for a model of fewer than
            ``SMALL_MODEL`` parameters and leaves torch's setting alone for others. The setting is
            the process's, not the engine's.
        step_log_size: how many of the last steps ``Engine.step_log`` remembers.
    """

    block_size: int = 16
    num_blocks: int | None = None
    kv_cache_bytes: int = 256 << 20
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_queue: int = 1024
    enable_prefix_caching: bool = True
    max_model_len: int | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    num_threads: int | None = None
    step_log_size: int = 4096

    def __post_init__(self) -> None:
        for name in (
            "block_size",
            "num_blocks",
            "kv_cache_bytes",
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_queue",
            "num_threads",
            "step_log_size",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}, it must be at least 1")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ValueError(f"max_model_len is {self.max_model_len}, it must be at least 2")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, it must be at least "
                f"max_num_seqs ({self.max_num_seqs})"
            )
        if self.dtype not in ("auto", "float32", "bfloat16", "float16"):
            raise ValueError(
                f"dtype is {self.dtype!r}, it must be auto, float32, bfloat16 or float16"
            )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} does not exist, give a Hugging Face model dir") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}, not an object")
    return value


def _rope(raw: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Read both spellings: transformers 4 kept theta beside ``rope_scaling``, 5 puts it inside."""
    parameters = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = float(parameters.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind == "default":
        return theta, None
    if kind not in ("linear", "llama3"):
        raise CheckpointError(f"rope scaling {kind!r} is not supported, only linear and llama3")
    factor = float(parameters["factor"])
    if kind == "linear":
        return theta, RopeScaling("linear", factor)
    return theta, RopeScaling(
        "llama3",
        factor,
        low_freq_factor=float(parameters["low_freq_factor"]),
        high_freq_factor=float(parameters["high_freq_factor"]),
        original_max_position_embeddings=int(parameters["original_max_position_embeddings"]),
    )


def _context(raw: Mapping[str, Any]) -> int:
    """Full attention equals sliding-window attention as long as the window is not exceeded."""
    window = raw.get("sliding_window")
    if window is None or not raw.get("use_sliding_window", True):
        window = math.inf
    return int(min(raw["max_position_embeddings"], window))


def _token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)
