"""A tokenizer of a few words, a small random encoder for it, and one that is held in its work."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from disconnect_watch.engine import Embedder
from disconnect_watch.engine.encoder import BertEncoder, EncoderConfig
from tests.support.net import PATIENCE

__all__ = ["Hold", "held", "random_embedder", "word_tokenizer"]


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


class Hold:
    """The encoder is held before a layer; ``layers`` are those that were computed since."""

    def __init__(self) -> None:
        self.reached, self._opened = threading.Event(), threading.Event()
        self.layers: list[int] = []

    def on_layer(self, index: int) -> None:
        self.layers.append(index)
        if index == 1 and not self.reached.is_set():
            self.reached.set()
            self._opened.wait(PATIENCE)

    def wait(self) -> None:
        """Wait until it is held."""
        assert self.reached.wait(PATIENCE)

    def open(self) -> None:
        """Let it go on, and hold it no more."""
        self._opened.set()


@contextmanager
def held(embedder: Embedder) -> Iterator[Hold]:
    """Hold an encoder in its next work, before its second layer."""
    hold = Hold()
    hooks = [
        layer.register_forward_pre_hook(lambda *_, index=index: hold.on_layer(index))
        for index, layer in enumerate(embedder._model.layers)
    ]
    try:
        yield hold
    finally:
        hold.open()
        for hook in hooks:
            hook.remove()
