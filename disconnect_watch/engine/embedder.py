"""Texts to vectors, by an encoder and what its directory says of pooling."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F

from disconnect_watch.engine.encoder import BertEncoder, EncoderConfig
from disconnect_watch.engine.errors import CheckpointError
from disconnect_watch.engine.json_file import read_object
from disconnect_watch.token import CancelToken

__all__ = ["Embedder"]

Pooling = Literal["mean", "cls", "last"]
#: Fields of a pooling config, and what they turn on.
POOLINGS: dict[str, Pooling] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
}


class Embedder:
    """A directory of sentence-transformers with a ``BertModel`` in it.

    Threads: its methods may be called from any thread.

    Attributes:
        dim: numbers in a vector.
        max_length: tokens that a text may have.
    """

    def __init__(
        self,
        model: BertEncoder,
        tokenizer: Tokenizer,
        *,
        max_length: int,
        pooling: Pooling,
        is_normalized: bool,
        max_batched_tokens: int = 4096,
    ) -> None:
        self.dim = model.words.embedding_dim
        self.max_length = max_length
        self._model = model
        self._tokenizer = tokenizer
        self._pooling = pooling
        self._is_normalized = is_normalized
        self._max_batched_tokens = max_batched_tokens

    @classmethod
    def from_pretrained(cls, path: str | Path) -> "Embedder":
        """Read a directory; without a ``modules.json`` the mean is taken and not normalized.

        Raises:
            CheckpointError: a file is missing, damaged, or asks for what is not supported.
        """
        path = Path(path)
        config = EncoderConfig.from_pretrained(path)
        pooling, is_normalized = _read_modules(path)
        max_length = config.max_position_embeddings
        limits = path / "sentence_bert_config.json"
        if limits.exists():
            max_length = min(max_length, read_object(limits).get("max_seq_length") or max_length)
        file = path / "tokenizer.json"
        try:
            tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # tokenizers raises Exception itself, nothing narrower
            raise CheckpointError(f"{file} is no tokenizer: {error}") from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return cls(
            BertEncoder.from_pretrained(path, config),
            tokenizer,
            max_length=max_length,
            pooling=pooling,
            is_normalized=is_normalized,
        )

    def embed(self, texts: Sequence[str], *, cancel: CancelToken | None = None) -> Tensor:
        """Turn each text into a vector: ``tokenize``, then ``embed_tokens``."""
        return self.embed_tokens(self.tokenize(texts), cancel=cancel)

    def tokenize(self, inputs: Sequence[str | Sequence[int]]) -> list[list[int]]:
        """Turn texts into token ids, with those that the model puts around; check what are ids.

        Args:
            inputs: of at most ``max_length`` tokens each.

        Raises:
            ValueError: one is empty or too long, none is cut without a word; or it has an id
                that is none.
        """
        token_ids = [
            self._tokenizer.encode(each).ids if isinstance(each, str) else list(each)
            for each in inputs
        ]
        vocab_size = self._model.words.num_embeddings
        for index, ids in enumerate(token_ids):
            if not ids:
                raise ValueError(f"text {index} has no tokens, send at least one")
            if len(ids) > self.max_length:
                raise ValueError(
                    f"text {index} has {len(ids)} tokens, send at most {self.max_length}"
                )
            if min(ids) < 0 or max(ids) >= vocab_size:
                raise ValueError(f"text {index} has a token id outside [0, {vocab_size})")
        return token_ids

    @torch.inference_mode()
    def embed_tokens(
        self, token_ids: Sequence[list[int]], *, cancel: CancelToken | None = None
    ) -> Tensor:
        """Turn each text, of which ``tokenize`` made tokens, into a vector.

        Args:
            cancel: looked at before each layer.

        Returns:
            [len(token_ids), dim], float32.

        Raises:
            ClientDisconnected: the token has fired; nothing more is computed.
        """
        vectors = [torch.empty(0, self.dim)]
        vectors += [self._embed(batch, cancel) for batch in self._batches(token_ids)]
        return torch.cat(vectors)

    def _embed(self, token_ids: list[list[int]], cancel: CancelToken | None) -> Tensor:
        lengths = [len(ids) for ids in token_ids]
        packed = torch.tensor([token for ids in token_ids for token in ids])
        hidden = self._model.start(packed, lengths)
        for layer in self._model.layers:
            if cancel is not None:
                cancel.raise_if_cancelled()
            hidden = layer(hidden, lengths)
        texts = hidden.split_with_sizes(lengths)
        match self._pooling:
            case "mean":
                vectors = torch.stack([text.mean(0) for text in texts])
            case "cls":
                vectors = torch.stack([text[0] for text in texts])
            case "last":
                vectors = torch.stack([text[-1] for text in texts])
        return F.normalize(vectors, dim=-1) if self._is_normalized else vectors

    def _batches(self, token_ids: Sequence[list[int]]) -> Iterator[list[list[int]]]:
        """Cut the texts into batches of bounded size, in order."""
        batch: list[list[int]] = []
        num_tokens = 0
        for ids in token_ids:
            if batch and num_tokens + len(ids) > self._max_batched_tokens:
                yield batch
                batch, num_tokens = [], 0
            batch.append(ids)
            num_tokens += len(ids)
        if batch:
            yield batch


def _read_modules(path: Path) -> tuple[Pooling, bool]:
    """Return the pooling, and whether vectors are brought to length 1."""
    file = path / "modules.json"
    if not file.exists():
        return "mean", False
    try:
        modules = [(str(m["type"]).split(".")[-1], m["path"]) for m in json.loads(file.read_text())]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file} is no list of modules") from error
    kinds = [kind for kind, _ in modules]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise CheckpointError(
            f"{file} has modules {kinds}, only Pooling and Normalize are supported"
        )
    return _read_pooling(read_object(path / modules[1][1] / "config.json")), kinds[
        -1
    ] == "Normalize"


def _read_pooling(raw: dict[str, Any]) -> Pooling:
    active = [name for name, value in raw.items() if name.startswith("pooling_mode") and value]
    if len(active) != 1 or active[0] not in POOLINGS:
        raise CheckpointError(
            f"pooling {' and '.join(active) or None} is not supported, only one of "
            f"{', '.join(POOLINGS)}"
        )
    return POOLINGS[active[0]]
