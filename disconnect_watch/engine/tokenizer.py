"""Text to tokens, and tokens to text as they come, never half of a character.

The token table is read as bytes, once. A stream of tokens is then a stream of bytes, and an
incremental UTF-8 decoder holds back what is not whole yet: at most three bytes, whatever the
tokens are, where decoding token windows anew at each step can hold back for ever.
"""

import codecs
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as HuggingFaceTokenizer

from disconnect_watch.engine.errors import CheckpointError

__all__ = ["Detokenizer", "Tokenizer"]


class Tokenizer:
    """A ``tokenizer.json``, as encoder and as table of bytes.

    Supported are the two decoders that Llama-family checkpoints use: byte-level BPE, and
    SentencePiece as converted by Hugging Face (``▁`` for space, ``<0xNN>`` for bytes).

    Threads: ``encode`` may be called from any thread.
    """

    def __init__(self, tokenizer: HuggingFaceTokenizer) -> None:
        self._tokenizer = tokenizer
        spec = json.loads(tokenizer.to_str())
        to_bytes = _decoder_of(spec)
        self._bytes = [b""] * (max(tokenizer.get_vocab().values(), default=-1) + 1)
        for token, token_id in tokenizer.get_vocab().items():
            self._bytes[token_id] = to_bytes(token)
        # Added tokens stand for their literal text, except that special ones are never shown.
        for added in spec["added_tokens"]:
            self._bytes[added["id"]] = b"" if added["special"] else added["content"].encode()

    @classmethod
    def from_pretrained(cls, path: str | Path) -> "Tokenizer":
        """Read ``tokenizer.json`` of a model directory.

        Raises:
            CheckpointError: the file is missing, damaged, or of an unsupported kind.
        """
        file = Path(path) / "tokenizer.json"
        if not file.exists():
            raise CheckpointError(f"{file} does not exist, give a Hugging Face model dir")
        try:
            tokenizer = HuggingFaceTokenizer.from_file(str(file))
        except Exception as error:  # tokenizers raises Exception itself, nothing narrower
            raise CheckpointError(f"{file} is no tokenizer: {error}") from error
        # Limits of training are not limits of serving.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return cls(tokenizer)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Turn text into token ids, with those that the model wants around a prompt.

        Args:
            text: the prompt.
            add_special_tokens: False for the prompt of a chat, which its template has put them in.

        Raises:
            ValueError: the text holds half of a surrogate pair, which no UTF-8 can express.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"prompt has a lone surrogate at index {error.start}, send valid unicode"
            ) from error
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def bytes_of(self, token_id: int) -> bytes:
        """Return what a token adds to the text; nothing for special and for unknown ones.

        A model's vocabulary is often padded beyond that of its tokenizer.
        """
        return self._bytes[token_id] if token_id < len(self._bytes) else b""


class Detokenizer:
    """Text of one request as its tokens come. Bytes that are no UTF-8 become U+FFFD."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token_id: int) -> str:
        """Take the next token; return the characters that it completes."""
        return self._decoder.decode(self._tokenizer.bytes_of(token_id))

    def flush(self) -> str:
        """Return what stands for the bytes that will never be completed."""
        return self._decoder.decode(b"", final=True)


def _decoder_of(spec: dict[str, Any]) -> Callable[[str], bytes]:
    decoder = spec.get("decoder") or {}
    kinds = [part["type"] for part in decoder.get("decoders", [decoder]) if part]
    if kinds == ["ByteLevel"]:
        table = _byte_level_table()
        return lambda token: _byte_level(token, table)
    if "ByteFallback" in kinds:
        return _sentencepiece
    raise CheckpointError(
        f"tokenizer.json has decoder {kinds or None}, supported are ByteLevel and ByteFallback"
    )


def _byte_level_table() -> dict[str, int]:
    """Map each character of a byte-level vocabulary to its byte.

    Printable bytes of Latin-1 stand for themselves, the others for U+0100 and up in order.
    Source: openai/gpt-2, encoder.py.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {
        **{chr(byte): byte for byte in printable},
        **{chr(0x100 + index): byte for index, byte in enumerate(others)},
    }


def _byte_level(token: str, table: dict[str, int]) -> bytes:
    try:
        return bytes(table[character] for character in token)
    except KeyError:
        return token.encode()


def _sentencepiece(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes.fromhex(token[3:5])
    return token.replace("▁", " ").encode()
