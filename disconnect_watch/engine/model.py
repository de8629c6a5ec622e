"""The decoder of the Llama family, over packed tokens, with attention left to the caller.

Tokens of all sequences lie behind each other in one dimension, ``num_tokens``; nothing but
attention looks across tokens. What attention is, the caller says: dense and causal for training,
through a paged cache for serving. So the same layers serve both, and a serving loop may stop, or
take tokens out, between any two of them.
"""

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from disconnect_watch.engine.attend import AttentionRule, soft_cap
from disconnect_watch.engine.model_config import ModelConfig
from disconnect_watch.engine.modules import OffsetNorm, ScaledEmbedding
from disconnect_watch.engine.rotary import rotate

__all__ = ["Attention", "DecoderLayer", "LlamaModel"]


class Attention(Protocol):
    """Attend from each token to those before it in its own sequence."""

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, rule: AttentionRule
    ) -> Tensor:
        """Compute one layer's attention.

        Args:
            layer: index of the layer, which has keys and values of its own.
            query: [num_tokens, num_heads, head_dim], rotated.
            key: [num_tokens, num_kv_heads, head_dim], rotated.
            value: [num_tokens, num_kv_heads, head_dim].
            rule: of the layer.

        Returns:
            [num_tokens, num_heads * head_dim].
        """
        ...


class DecoderLayer(nn.Module):
    """One layer: attention, then a gated MLP, each behind an RMS norm and added to its input."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.index = index
        self.num_heads = config.num_heads
        self.num_kv_heads = config.num_kv_heads
        self.head_dim = config.head_dim
        hidden, queries = config.hidden_size, config.num_heads * config.head_dim
        keys = config.num_kv_heads * config.head_dim
        self.rule = AttentionRule(
            scale=config.attention_scale,
            window=config.windows[index] if config.windows else 0,
            softcap=config.attention_softcap,
        )
        self.input_layernorm = _norm(config, hidden)
        self.qkv_proj = nn.Linear(hidden, queries + 2 * keys, bias=config.qkv_bias)
        self.q_norm = _norm(config, self.head_dim) if config.qk_norm else None
        self.k_norm = _norm(config, self.head_dim) if config.qk_norm else None
        self.o_proj = nn.Linear(queries, hidden, bias=config.output_bias)
        self.attention_output_norm = _norm(config, hidden) if config.has_output_norms else None
        self.post_attention_layernorm = _norm(config, hidden)
        self.gate_up_proj = nn.Linear(hidden, 2 * config.intermediate_size, bias=config.mlp_bias)
        self.is_silu = config.activation == "silu"
        self.down_proj = nn.Linear(config.intermediate_size, hidden, bias=config.mlp_bias)
        self.mlp_output_norm = _norm(config, hidden) if config.has_output_norms else None

    def forward(self, hidden: Tensor, rope: tuple[Tensor, Tensor], attention: Attention) -> Tensor:
        """Return the hidden states after this layer, [num_tokens, hidden_size]."""
        query, key, value = self.heads(hidden, rope)
        return self.close(hidden, attention(self.index, query, key, value, rule=self.rule))

    def heads(self, hidden: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """The layer up to its attention: returns what that is given, see ``Attention``."""
        heads = self.qkv_proj(self.input_layernorm(hidden)).view(
            hidden.shape[0], self.num_heads + 2 * self.num_kv_heads, self.head_dim
        )
        if self.q_norm is None or self.k_norm is None:
            turned, value = heads.split_with_sizes(
                (self.num_heads + self.num_kv_heads, self.num_kv_heads), 1
            )
        else:
            query, key, value = heads.split_with_sizes(
                (self.num_heads, self.num_kv_heads, self.num_kv_heads), 1
            )
            turned = torch.cat((self.q_norm(query), self.k_norm(key)), 1)
        query, key = rotate(turned, rope).split_with_sizes((self.num_heads, self.num_kv_heads), 1)
        return query, key, value

    def close(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """The layer from its attention on, [num_tokens, num_heads * head_dim], to its end."""
        attended = self.o_proj(attended)
        if self.attention_output_norm is not None:
            attended = self.attention_output_norm(attended)
        hidden = hidden + attended
        gate, up = self.gate_up_proj(self.post_attention_layernorm(hidden)).chunk(2, -1)
        gate = F.silu(gate) if self.is_silu else F.gelu(gate, approximate="tanh")
        down: Tensor = self.down_proj(gate * up)
        if self.mlp_output_norm is not None:
            down = self.mlp_output_norm(down)
        return hidden + down


class LlamaModel(nn.Module):
    """Embedding, decoder layers, final norm and the projection to the vocabulary.

    Parameters are fused where that saves an operation (``qkv_proj``, ``gate_up_proj``);
    ``checkpoint`` translates to and from the names of Hugging Face.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        embedding = ScaledEmbedding if config.is_embedding_scaled else nn.Embedding
        self.embed_tokens = embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(config.num_layers))
        self.norm = _norm(config, config.hidden_size)
        self.lm_head = (
            None
            if config.tie_word_embeddings
            else nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        )

    def forward(
        self, token_ids: Tensor, rope: tuple[Tensor, Tensor], attention: Attention
    ) -> Tensor:
        """Run all layers; autograd works through it.

        Args:
            token_ids: [num_tokens], int64.
            rope: ``Rotary(positions)`` for the position of each token in its sequence.
            attention: ``CausalAttention`` for training.

        Returns:
            Final hidden states, [num_tokens, hidden_size]; give ``logits`` those it needs.
        """
        hidden: Tensor = self.embed_tokens(token_ids)
        for layer in self.layers:
            hidden = layer(hidden, rope, attention)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Return scores of the next token, [num_tokens, vocab_size], in the model's dtype."""
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        scores = F.linear(self.norm(hidden), head.weight)
        softcap = self.config.logit_softcap
        return soft_cap(scores, softcap) if softcap else scores


def _norm(config: ModelConfig, size: int) -> nn.RMSNorm:
    norm = OffsetNorm if config.is_norm_offset else nn.RMSNorm
    return norm(size, config.rms_norm_eps)
