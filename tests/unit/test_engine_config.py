"""What is read from config.json, and what is refused rather than ignored."""

import json
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from disconnect_watch.engine import DEFAULT_MODEL, Engine, EngineConfig, ModelConfig
from disconnect_watch.engine.errors import CheckpointError
from disconnect_watch.engine.families import FAMILIES
from disconnect_watch.engine.rope_config import (
    Llama3Scaling,
    LongScaling,
    RopeConfig,
    RopeScaling,
    YarnScaling,
)
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
    assert config.rope == RopeConfig(5e5, Llama3Scaling(8.0, 1.0, 4.0, 64))


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2]}


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        (YARN, YarnScaling(4.0, 256, 1 + 0.1 * math.log(4))),
        ({**YARN, "factor": 0.5}, YarnScaling(0.5, 256, 1.0)),
        ({**YARN, "factor": None}, YarnScaling(1.0, 256, 1.0)),
        ({**YARN, "attention_factor": 0.7}, YarnScaling(4.0, 256, 0.7)),
        ({**YARN, "mscale": 0.7, "mscale_all_dim": 0.7}, YarnScaling(4.0, 256, 1.0)),
        (
            {**YARN, "beta_fast": 16, "truncate": False},
            YarnScaling(4.0, 256, 1 + 0.1 * math.log(4), 16.0, 1.0, False),
        ),
        (
            {**LONGROPE, "original_max_position_embeddings": 16},
            LongScaling((1.0,), (2.0,), 16, 2**0.5),
        ),
        ({**LONGROPE, "rope_type": "su"}, LongScaling((1.0,), (2.0,), 256, 1.0)),
        ({**LONGROPE, "attention_factor": 1.5}, LongScaling((1.0,), (2.0,), 256, 1.5)),
    ],
)
def test_what_a_rope_scaling_leaves_open_is_filled_in(
    scaling: dict[str, Any], expected: RopeScaling
) -> None:
    assert parse(rope_scaling=scaling).rope.scaling == expected


def test_scalings_beyond_the_length_of_the_file_allow_that_length() -> None:
    assert parse(rope_scaling=YARN).max_position_embeddings == 1024
    dynamic = parse(rope_scaling={"rope_type": "dynamic", "factor": 2.0})
    assert dynamic.max_position_embeddings == 512
    linear = parse(rope_scaling={"rope_type": "linear", "factor": 2.0})
    assert linear.max_position_embeddings == 256


def test_a_rope_scaling_that_is_not_known_is_refused() -> None:
    with pytest.raises(CheckpointError, match="'proportional' is not supported"):
        parse(rope_scaling={"rope_type": "proportional", "factor": 4.0})


def test_a_field_of_a_rope_scaling_that_is_not_known_is_refused() -> None:
    with pytest.raises(CheckpointError, match="'linear' has an unknown field 'beta_fast'"):
        parse(rope_scaling={"rope_type": "linear", "factor": 4.0, "beta_fast": 1})


def test_heads_that_are_turned_in_part_are_refused_where_the_family_has_none() -> None:
    with pytest.raises(CheckpointError, match="cannot have a partial_rotary_factor"):
        parse(rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.5})


@pytest.mark.parametrize(
    "fields",
    [
        {"quantization_config": {"bits": 4}},
        {"sliding_window": 100},
        {"final_logit_softcapping": 30.0},
        {"layer_types": ["full_attention"] * 3},
        {"partial_rotary_factor": 0.5},
    ],
)
def test_a_field_that_the_family_does_not_know_is_refused_by_name(fields: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=f"config.json has {next(iter(fields))!r}"):
        parse(**fields)


def test_a_field_that_is_off_is_let_pass() -> None:
    assert parse(quantization_config=None, use_bidirectional_attention=False) == parse()


def test_what_a_file_leaves_out_is_what_transformers_takes() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers
    for architecture, family in FAMILIES.items():
        theirs = getattr(transformers, architecture.replace("ForCausalLM", "Config"))
        for name, value in family.defaults.items():
            assert getattr(theirs, name) == value, (architecture, name)
        for name, value in {"rms_norm_eps": 1e-6, "tie_word_embeddings": False}.items():
            assert getattr(theirs, name) == family.defaults.get(name, value), (architecture, name)


def test_an_architecture_that_is_not_known_is_refused() -> None:
    with pytest.raises(CheckpointError, match="GPT2LMHeadModel is not supported"):
        parse(architectures=["GPT2LMHeadModel"])


def test_another_activation_is_refused() -> None:
    with pytest.raises(CheckpointError, match="'gelu' is not supported"):
        parse(hidden_act="gelu")


def test_heads_that_cannot_be_grouped_are_refused() -> None:
    with pytest.raises(CheckpointError, match="6 attention heads cannot share 4"):
        parse(num_key_value_heads=4)


@pytest.mark.parametrize("value", [None, "64", -1, 0, 1.5, True, [64], {}, math.nan])
@pytest.mark.parametrize("field", ["hidden_size", "num_hidden_layers", "vocab_size"])
def test_a_size_that_is_none_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(CheckpointError, match=f"'{field}' .*, it must be an integer of at least 1"):
        parse(**{field: value})


@pytest.mark.parametrize("field", ["num_key_value_heads", "head_dim"])
def test_a_size_that_may_be_left_out_may_be_null_but_not_zero(field: str) -> None:
    without = {name: value for name, value in TINY_CONFIG.items() if name != field}
    # What the six heads can share.
    without |= {"hidden_size": 96}
    assert ModelConfig.from_dict({**without, field: None}) == ModelConfig.from_dict(without)
    with pytest.raises(CheckpointError, match=f"'{field}' 0, it must be"):
        parse(**{field: 0})


@pytest.mark.parametrize(
    "fields",
    [
        {"architectures": 1.5},
        {"architectures": {"a": 1}},
        {"rms_norm_eps": "small"},
        {"rope_theta": [1]},
        {"rope_scaling": "linear"},
        {"rope_scaling": {"rope_type": ["linear"]}},
        {"eos_token_id": 1.5},
        {"head_dim": 15},
    ],
)
def test_a_value_that_is_none_of_its_field_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError):
        parse(**fields)


def test_a_missing_field_is_named() -> None:
    raw = {key: value for key, value in TINY_CONFIG.items() if key != "hidden_size"}
    with pytest.raises(CheckpointError, match="no 'hidden_size'"):
        ModelConfig.from_dict(raw)


def test_qwen2_has_biases_that_its_config_does_not_mention() -> None:
    config = parse(architectures=["Qwen2ForCausalLM"])
    assert (config.qkv_bias, config.output_bias, config.qk_norm) == (True, False, False)


def test_qwen3_norms_queries_and_keys() -> None:
    assert parse(architectures=["Qwen3ForCausalLM"]).qk_norm


@pytest.mark.parametrize(
    ("family", "fields", "windows"),
    [
        ("Mistral", {"sliding_window": 9}, (9, 9, 9)),
        ("Mistral", {}, (4096, 4096, 4096)),
        ("Mistral", {"sliding_window": None}, ()),
        ("Phi3", {}, ()),
        ("Phi3", {"sliding_window": 9}, (9, 9, 9)),
        ("Qwen2", {"sliding_window": 9}, ()),
        ("Qwen2", {"use_sliding_window": True, "max_window_layers": 2}, (0, 0, 4096)),
        ("Gemma2", {"sliding_window": 9}, (9, 0, 9)),
        (
            "Gemma2",
            {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
            (0, 4096, 0),
        ),
    ],
)
def test_each_family_has_its_window_where_transformers_has_it(
    family: str, fields: dict[str, Any], windows: tuple[int, ...]
) -> None:
    raw = {**TINY_CONFIG, "architectures": [f"{family}ForCausalLM"]}
    assert ModelConfig.from_dict({**raw, **fields}).windows == windows


@pytest.mark.parametrize(
    ("types", "message"),
    [
        (["full_attention"], "has 1 entries for 3 layers"),
        (["linear_attention"] * 3, "'linear_attention' is not supported"),
    ],
)
def test_layer_types_that_do_not_fit_are_refused(types: list[str], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        parse(architectures=["Gemma2ForCausalLM"], layer_types=types)


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
