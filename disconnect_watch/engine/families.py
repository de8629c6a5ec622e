"""What sets the supported architectures apart, in the words of their ``config.json``."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["COMMON", "FAMILIES", "HARMLESS", "Family"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One architecture.

    Attributes:
        defaults: what transformers takes for a field that the file does not have.
        fields: those it reads besides the ones that all have (``COMMON``).
        features: fields of ``ModelConfig`` that follow from the architecture alone.
        windowed: which layers have the sliding window, if there is one: every one, those from
            ``max_window_layers`` on, or every other one from the first.
    """

    defaults: Mapping[str, Any] = field(default_factory=dict)
    fields: frozenset[str] = frozenset()
    features: Mapping[str, Any] = field(default_factory=dict)
    windowed: Literal["none", "every", "upper", "alternating"] = "none"


#: Fields that every family reads.
COMMON = frozenset(
    {
        "architectures",
        "dtype",
        "eos_token_id",
        "head_dim",
        "hidden_size",
        "intermediate_size",
        "max_position_embeddings",
        "num_attention_heads",
        "num_hidden_layers",
        "num_key_value_heads",
        "rms_norm_eps",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "tie_word_embeddings",
        "torch_dtype",
        "vocab_size",
    }
)

#: Fields that change no score: of training, of other libraries, of who made the file.
HARMLESS = frozenset(
    {
        "attention_dropout",
        "auto_map",
        "bos_token_id",
        "cache_implementation",
        "chunk_size_feed_forward",
        "embd_pdrop",
        "id2label",
        "initializer_range",
        "label2id",
        "max_length",
        "model_type",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "pretraining_tp",
        "problem_type",
        "resid_pdrop",
        "return_dict",
        "transformers_version",
        "unk_token_id",
        "use_cache",
    }
)

_QWEN_WINDOW = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(
        defaults={"attention_bias": False, "mlp_bias": False, "hidden_act": "silu"},
    ),
    "MistralForCausalLM": Family(
        defaults={"hidden_act": "silu", "sliding_window": 4096},
        windowed="every",
    ),
    "Qwen2ForCausalLM": Family(
        defaults={"hidden_act": "silu", **_QWEN_WINDOW},
        fields=frozenset({"layer_types"}),
        # It has these biases without a field that says so.
        features={"qkv_bias": True},
        windowed="upper",
    ),
    "Qwen3ForCausalLM": Family(
        defaults={"head_dim": 128, "attention_bias": False, "hidden_act": "silu", **_QWEN_WINDOW},
        fields=frozenset({"layer_types"}),
        features={"qk_norm": True},
        windowed="upper",
    ),
    "Phi3ForCausalLM": Family(
        defaults={"hidden_act": "silu", "rms_norm_eps": 1e-5, "sliding_window": None},
        fields=frozenset({"original_max_position_embeddings", "partial_rotary_factor"}),
        features={"is_stored_fused": True},
        windowed="every",
    ),
    "Gemma2ForCausalLM": Family(
        defaults={
            "attention_bias": False,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "tie_word_embeddings": True,
        },
        # Its files have hidden_act too, which nobody reads.
        fields=frozenset({"hidden_act", "layer_types"}),
        features={"is_embedding_scaled": True, "is_norm_offset": True, "has_output_norms": True},
        windowed="alternating",
    ),
}
