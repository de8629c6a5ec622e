"""A tokenizer of a few words, and a small random encoder for it."""

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from disconnect_watch.engine import Embedder
from disconnect_watch.engine.encoder import BertEncoder, EncoderConfig

__all__ = ["random_embedder", "word_tokenizer"]


def word_tokenizer() -> Tokenizer:
    words = ["[CLS]", "[SEP]", "one", "two", "three", "four", "five", "six", "seven"]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[SEP]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 0), ("[SEP]", 1)]
    )
    # As in directories of sentence-transformers; neither may come into the vectors.
    tokenizer.enable_padding(length=32)
    tokenizer.enable_truncation(4)
    return tokenizer


def random_embedder() -> Embedder:
    """An encoder of three layers, without a checkpoint and without transformers."""
    torch.manual_seed(3)
    config = EncoderConfig(
        vocab_size=9,
        type_vocab_size=2,
        hidden_size=32,
        intermediate_size=48,
        num_layers=3,
        num_heads=4,
        max_position_embeddings=24,
        layer_norm_eps=1e-12,
    )
    tokenizer = word_tokenizer()
    tokenizer.no_padding()
    tokenizer.no_truncation()
    model = BertEncoder(config).eval().requires_grad_(False)
    return Embedder(model, tokenizer, max_length=24, pooling="mean", is_normalized=False)
