"""The encoder of the BERT family, over packed tokens: each sees all of its own text."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from disconnect_watch.engine.attend import AttentionRule, attend
from disconnect_watch.engine.checkpoint import fill
from disconnect_watch.engine.errors import CheckpointError
from disconnect_watch.engine.json_file import read_object

__all__ = ["BertEncoder", "EncoderConfig"]

#: Fields of ``config.json`` that change nothing here: of training, and of other heads.
HARMLESS = frozenset(
    {
        "architectures",
        "attention_probs_dropout_prob",
        "classifier_dropout",
        "dtype",
        "hidden_dropout_prob",
        "initializer_range",
        "model_type",
        "pad_token_id",
        "tie_word_embeddings",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
READ = frozenset(
    {
        "hidden_act",
        "hidden_size",
        "intermediate_size",
        "layer_norm_eps",
        "max_position_embeddings",
        "num_attention_heads",
        "num_hidden_layers",
        "position_embedding_type",
        "type_vocab_size",
        "vocab_size",
    }
)
#: Our names of parts, and theirs.
OUTER_PARTS = {
    "words": "embeddings.word_embeddings",
    "positions": "embeddings.position_embeddings",
    "types": "embeddings.token_type_embeddings",
    "norm": "embeddings.LayerNorm",
}
LAYER_PARTS = {
    "qkv_proj": ("attention.self.query", "attention.self.key", "attention.self.value"),
    "o_proj": ("attention.output.dense",),
    "attention_norm": ("attention.output.LayerNorm",),
    "up_proj": ("intermediate.dense",),
    "down_proj": ("output.dense",),
    "mlp_norm": ("output.LayerNorm",),
}


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """Shape and constants of one encoder."""

    vocab_size: int
    type_vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    max_position_embeddings: int
    layer_norm_eps: float

    @classmethod
    def from_pretrained(cls, path: str | Path) -> "EncoderConfig":
        """Read ``config.json``.

        Raises:
            CheckpointError: it is missing, or asks for what is not supported.
        """
        raw = read_object(Path(path) / "config.json")
        architecture = (raw.get("architectures") or ["(none)"])[0]
        if architecture != "BertModel":
            raise CheckpointError(f"architecture {architecture} is no encoder, only BertModel is")
        for name, value in raw.items():
            is_known = name in HARMLESS or name in READ or name[0] == "_"
            if not is_known and value is not None and value is not False:
                raise CheckpointError(
                    f"config.json has {name!r}, which is not known for {architecture}"
                )
        for name, only in (("hidden_act", "gelu"), ("position_embedding_type", "absolute")):
            if raw.get(name, only) != only:
                raise CheckpointError(f"{name} {raw[name]!r} is not supported, only {only!r}")
        try:
            return cls(
                vocab_size=int(raw["vocab_size"]),
                type_vocab_size=int(raw.get("type_vocab_size", 2)),
                hidden_size=int(raw["hidden_size"]),
                intermediate_size=int(raw["intermediate_size"]),
                num_layers=int(raw["num_hidden_layers"]),
                num_heads=int(raw["num_attention_heads"]),
                max_position_embeddings=int(raw["max_position_embeddings"]),
                layer_norm_eps=float(raw.get("layer_norm_eps", 1e-12)),
            )
        except KeyError as error:
            raise CheckpointError(f"config.json has no {error.args[0]!r}") from error


class EncoderLayer(nn.Module):
    """One layer: attention, then an MLP, each added to its input and normed behind that."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.layer_norm_eps
        self.num_heads = config.num_heads
        self.qkv_proj = nn.Linear(hidden, 3 * hidden)
        self.o_proj = nn.Linear(hidden, hidden)
        self.attention_norm = nn.LayerNorm(hidden, eps)
        self.up_proj = nn.Linear(hidden, config.intermediate_size)
        self.down_proj = nn.Linear(config.intermediate_size, hidden)
        self.mlp_norm = nn.LayerNorm(hidden, eps)

    def forward(self, hidden: Tensor, lengths: Sequence[int]) -> Tensor:
        """Return the hidden states after this layer, [num_tokens, hidden_size]."""
        heads = self.qkv_proj(hidden).view(len(hidden), 3, self.num_heads, -1)
        attended = torch.cat([self._attend(text) for text in heads.split_with_sizes(list(lengths))])
        hidden = self.attention_norm(hidden + self.o_proj(attended))
        down = self.down_proj(F.gelu(self.up_proj(hidden)))
        normed: Tensor = self.mlp_norm(hidden + down)
        return normed

    def _attend(self, heads: Tensor) -> Tensor:
        """One text, [tokens, 3, num_heads, head_dim] to [tokens, hidden_size]."""
        query, key, value = heads.permute(1, 2, 0, 3)[:, None]
        output = attend(query, key, value, mask=None, is_causal=False, rule=AttentionRule())
        return output[0].transpose(0, 1).flatten(1)


class BertEncoder(nn.Module):
    """Embeddings and layers; what is made of the last hidden states is the caller's affair."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.words = nn.Embedding(config.vocab_size, config.hidden_size)
        self.positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.types = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.norm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.num_layers))

    @classmethod
    def from_pretrained(cls, path: str | Path, config: EncoderConfig) -> "BertEncoder":
        """Read the weights of a directory, as float32.

        Raises:
            CheckpointError: as for ``checkpoint.load_model``.
        """
        with torch.device("meta"):
            model = cls(config)
        fill(model, path, sources=_sources, is_spare=_is_spare, dtype=torch.float32)
        return model

    def start(self, token_ids: Tensor, lengths: Sequence[int]) -> Tensor:
        """Return the hidden states before the first of ``layers``, [num_tokens, hidden_size].

        Args:
            token_ids: [num_tokens], int64; the texts behind each other.
            lengths: tokens of each text.
        """
        positions = torch.cat([torch.arange(length) for length in lengths])
        hidden = self.words(token_ids) + self.positions(positions) + self.types.weight[0]
        normed: Tensor = self.norm(hidden)
        return normed


def _sources(name: str, parameter: Tensor) -> list[tuple[str, int]]:
    match name.split("."):
        case ["layers", index, part, kind]:
            names = [f"encoder.layer.{index}.{theirs}.{kind}" for theirs in LAYER_PARTS[part]]
        case [part, kind]:
            names = [f"{OUTER_PARTS[part]}.{kind}"]
        case _:
            raise AssertionError(name)
    return [(source, len(parameter) // len(names)) for source in names]


def _is_spare(name: str) -> bool:
    """The pooler is for classes of pairs of texts, and position ids count from 0."""
    return name.startswith("pooler.") or name == "embeddings.position_ids"
