"""Text that is streamed token by token is the text that decoding at once gives."""

from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from disconnect_watch.engine.errors import CheckpointError
from disconnect_watch.engine.tokenizer import Detokenizer
from disconnect_watch.engine.tokenizer import Tokenizer as EngineTokenizer
from tests.support.engine import byte_tokenizer


@cache
def sentencepiece() -> Tokenizer:
    """A vocabulary as Llama 2 has it: bytes by name, and ``▁`` for space."""
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁the", "é", "猫"]
    tokenizer = Tokenizer(
        models.BPE({name: i for i, name in enumerate(names)}, [], byte_fallback=True)
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def stream(tokenizer: Tokenizer, token_ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(EngineTokenizer(tokenizer))
    return [*(detokenizer.feed(token_id) for token_id in token_ids), detokenizer.flush()]


@given(st.lists(st.integers(0, 256), max_size=40))
def test_streamed_bytes_are_the_bytes_decoded_at_once(token_ids: list[int]) -> None:
    tokenizer = byte_tokenizer()
    assert "".join(stream(tokenizer, token_ids)) == tokenizer.decode(token_ids)


@given(st.text(st.sampled_from("aé猫🐈 \u200d\n"), max_size=20))
def test_no_half_of_a_character_is_ever_streamed(text: str) -> None:
    tokenizer = byte_tokenizer()
    token_ids = EngineTokenizer(tokenizer).encode(text)
    pieces = stream(tokenizer, token_ids)
    assert "".join(pieces) == text
    assert "\ufffd" not in "".join(pieces)
    # A character is there with the token that completes it, not later.
    ends = [len(text[: index + 1].encode()) for index in range(len(text))]
    assert [index + 1 for index, piece in enumerate(pieces) if piece] == ends


@given(st.text(st.sampled_from("aé猫🐈 "), max_size=20))
def test_sentencepiece_vocabularies_stream_the_same_text(text: str) -> None:
    tokenizer = sentencepiece()
    token_ids = tokenizer.encode(text.replace(" ", "▁")).ids
    assert "".join(stream(tokenizer, token_ids)) == tokenizer.decode(token_ids) == text


def test_bytes_that_never_become_a_character_are_replaced_at_the_end() -> None:
    tokenizer = byte_tokenizer()
    [first, second, *_] = EngineTokenizer(tokenizer).encode("猫")
    assert stream(tokenizer, [first, second]) == ["", "", "\ufffd"]


def test_bytes_that_are_wrong_are_not_held_back() -> None:
    tokenizer = byte_tokenizer()
    last = EngineTokenizer(tokenizer).encode("猫")[-1]
    assert stream(tokenizer, [last] * 5) == ["\ufffd"] * 5 + [""]


def test_special_tokens_add_no_text_and_other_added_ones_do() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken("<think é>", special=False)])
    assert stream(tokenizer, [256, 257, 256]) == ["", "<think é>", "", ""]


def test_ids_beyond_the_vocabulary_add_no_text() -> None:
    assert stream(byte_tokenizer(), [100_000]) == ["", ""]


def test_a_lone_surrogate_is_refused_as_a_value() -> None:
    with pytest.raises(ValueError, match="lone surrogate at index 2"):
        EngineTokenizer(byte_tokenizer()).encode("ab\ud800")


def test_limits_of_training_are_not_those_of_serving(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert len(EngineTokenizer.from_pretrained(tmp_path).encode("abcdef")) == 6


def test_a_decoder_that_is_not_known_is_refused() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(CheckpointError, match=r"has decoder \['WordPiece'\]"):
        EngineTokenizer(tokenizer)


def test_a_missing_or_damaged_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json does not exist"):
        EngineTokenizer.from_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is no tokenizer"):
        EngineTokenizer.from_pretrained(tmp_path)
