"""What is read from config.json, and what is refused rather than ignored."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from disconnect_watch.engine import DEFAULT_MODEL, Engine, EngineConfig, ModelConfig
from disconnect_watch.engine.config import RopeScaling
from disconnect_watch.engine.errors import CheckpointError
from tests.support.engine import TINY_CONFIG, make_engine

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def parse(**fields: Any) -> ModelConfig:
    return ModelConfig.from_dict({**TINY_CONFIG, **fields})


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
    ],
)
def test_all_spellings_of_rope_are_read(fields: dict[str, Any]) -> None:
    config = parse(**fields)
    assert config.rope_theta == 5e5
    assert config.rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 64)


def test_a_rope_scaling_that_is_not_known_is_refused() -> None:
    with pytest.raises(CheckpointError, match="'yarn' is not supported"):
        parse(rope_scaling={"rope_type": "yarn", "factor": 4.0})


def test_an_architecture_that_is_not_known_is_refused() -> None:
    with pytest.raises(CheckpointError, match="GPT2LMHeadModel is not supported"):
        parse(architectures=["GPT2LMHeadModel"])


def test_another_activation_is_refused() -> None:
    with pytest.raises(CheckpointError, match="'gelu' is not supported"):
        parse(hidden_act="gelu")


def test_heads_that_cannot_be_grouped_are_refused() -> None:
    with pytest.raises(CheckpointError, match="6 attention heads cannot share 4"):
        parse(num_key_value_heads=4)


def test_a_missing_field_is_named() -> None:
    raw = {key: value for key, value in TINY_CONFIG.items() if key != "hidden_size"}
    with pytest.raises(CheckpointError, match="no 'hidden_size'"):
        ModelConfig.from_dict(raw)


def test_qwen2_has_biases_that_its_config_does_not_mention() -> None:
    config = parse(architectures=["Qwen2ForCausalLM"])
    assert (config.qkv_bias, config.output_bias, config.qk_norm) == (True, False, False)


def test_qwen3_norms_queries_and_keys() -> None:
    assert parse(architectures=["Qwen3ForCausalLM"]).qk_norm


def test_a_sliding_window_bounds_the_context_where_it_is_used() -> None:
    assert parse(sliding_window=100).max_position_embeddings == 100
    assert parse(sliding_window=None).max_position_embeddings == 256
    unused = parse(sliding_window=100, use_sliding_window=False)
    assert unused.max_position_embeddings == 256


def test_end_tokens_come_from_the_generation_config_first(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY_CONFIG))
    assert ModelConfig.from_pretrained(tmp_path).eos_token_ids == (256,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    assert ModelConfig.from_pretrained(tmp_path).eos_token_ids == (7, 8)
    (tmp_path / "generation_config.json").write_text("{}")
    assert ModelConfig.from_pretrained(tmp_path).eos_token_ids == (256,)


@pytest.mark.parametrize(("text", "message"), [("{", "is no JSON"), ("[]", "holds a list")])
def test_a_config_that_is_no_object_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        ModelConfig.from_pretrained(tmp_path)


def test_a_directory_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json does not exist"):
        ModelConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"block_size": 0}, "block_size is 0"),
        ({"num_blocks": -1}, "num_blocks is -1"),
        ({"max_model_len": 1}, "max_model_len is 1"),
        ({"max_num_seqs": 65, "max_num_batched_tokens": 64}, "at least max_num_seqs"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
    ],
)
def test_limits_out_of_range_are_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(**fields)


def test_the_longest_request_must_fit_into_the_cache() -> None:
    with pytest.raises(ValueError, match="cannot hold one request of 128 tokens"):
        make_engine(num_blocks=31)


def test_the_context_is_no_longer_than_the_model_knows() -> None:
    with pytest.raises(ValueError, match="the model knows 256 positions"):
        make_engine(max_model_len=257)


def test_a_small_cache_shortens_the_context_that_nobody_fixed() -> None:
    assert make_engine(max_model_len=None, num_blocks=10).max_model_len == 40
    assert make_engine(max_model_len=None, num_blocks=1000).max_model_len == 256


def test_the_cache_takes_its_budget_or_what_all_requests_could_fill() -> None:
    # One block: 3 layers, keys and values, 4 tokens, 2 heads of 16 numbers of 4 bytes.
    block_bytes = 3 * 2 * 4 * 2 * 16 * 4
    budget = make_engine(num_blocks=None, kv_cache_bytes=40 * block_bytes + 1)
    assert budget.stats().num_blocks == 40
    plenty = make_engine(num_blocks=None, kv_cache_bytes=1 << 30)
    assert plenty.stats().num_blocks == 8 * 128 // 4


def test_small_model_computes_on_one_thread_unless_told_otherwise() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        Engine.from_pretrained(DEFAULT_MODEL, EngineConfig(num_blocks=256, num_threads=2))
        assert torch.get_num_threads() == 2
        Engine.from_pretrained(DEFAULT_MODEL, EngineConfig(num_blocks=256))
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
