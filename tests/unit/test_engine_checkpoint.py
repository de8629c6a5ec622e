"""Weights on disk: read whole or in shards, refused where they do not fit the config."""

import json
from pathlib import Path
from typing import Literal

import pytest
import torch
from safetensors.torch import load_file, save_file

from disconnect_watch.engine import Engine, EngineConfig, SamplingParams
from disconnect_watch.engine.checkpoint import load_model, to_hugging_face
from disconnect_watch.engine.errors import CheckpointError
from disconnect_watch.engine.model import LlamaModel
from disconnect_watch.engine.model_config import ModelConfig
from tests.support.engine import (
    TINY_CONFIG,
    run_to_end,
    tiny_model,
    tokens_of,
    write_checkpoint,
)

CONFIG = ModelConfig.from_dict(TINY_CONFIG)


def load(path: Path, dtype: torch.dtype = torch.float32) -> LlamaModel:
    return load_model(path, CONFIG, dtype=dtype)


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    model = load(write_checkpoint(tmp_path))
    for name, parameter in tiny_model().named_parameters():
        assert torch.equal(model.get_parameter(name), parameter), name


def test_names_on_disk_are_those_of_hugging_face() -> None:
    names = set(to_hugging_face(tiny_model()))
    assert "model.layers.2.self_attn.k_proj.weight" in names
    assert "model.layers.0.mlp.up_proj.weight" in names
    assert "model.embed_tokens.weight" in names
    assert len(names) == 3 * 9 + 2


def test_shards_are_found_through_their_index(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    shards = {name: f"model-{index % 2}.safetensors" for index, name in enumerate(tensors)}
    for file in set(shards.values()):
        save_file({n: t for n, t in tensors.items() if shards[n] == file}, tmp_path / file)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": shards}))
    assert torch.equal(load(tmp_path).norm.weight, tiny_model().norm.weight)
    index.write_text("[]")
    with pytest.raises(CheckpointError, match="is no index"):
        load(tmp_path)


def test_a_shard_is_looked_for_in_the_directory_only(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "outside")
    inside = tmp_path / "inside"
    inside.mkdir()
    shards = {"model.norm.weight": "../outside/model.safetensors"}
    (inside / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    with pytest.raises(CheckpointError, match=r"inside/model\.safetensors cannot be read"):
        load(inside)


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("wanted", DTYPES)
@pytest.mark.parametrize("stored", DTYPES)
def test_weights_of_any_dtype_are_converted_to_the_one_asked_for(
    tmp_path: Path, stored: torch.dtype, wanted: torch.dtype
) -> None:
    write_checkpoint(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({name: tensor.to(stored) for name, tensor in load_file(file).items()}, file)
    expected = tiny_model().embed_tokens.weight.to(stored).to(wanted)
    weight = load(tmp_path, wanted).embed_tokens.weight
    assert weight.dtype is wanted
    assert torch.equal(weight, expected)


def test_a_tensor_that_the_config_has_no_use_for_is_named(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    spare = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8),
        "lm_head.weight": torch.zeros(264, 64),
    }
    save_file({**tensors, **spare}, file)
    load(tmp_path)
    save_file({**tensors, "model.layers.0.self_attn.q_proj.bias": torch.zeros(96)}, file)
    with pytest.raises(CheckpointError, match=r"no use for: model\.layers\.0\.self_attn\.q_proj"):
        load(tmp_path)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"no tensor model\.layers\.1\.mlp\.up_proj\.weight"):
        load(tmp_path)


def test_a_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.self_attn.k_proj.weight"] = torch.zeros(32, 63)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"k_proj\.weight has shape \(32, 63\)"):
        load(tmp_path)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    data = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        load(tmp_path)


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("auto", torch.float32), ("bfloat16", torch.bfloat16), ("float16", torch.float16)],
)
def test_an_engine_computes_in_float32_unless_told_otherwise(
    tmp_path: Path, dtype: Literal["auto", "bfloat16", "float16"], expected: torch.dtype
) -> None:
    write_checkpoint(tmp_path, dtype="bfloat16")
    engine = Engine.from_pretrained(tmp_path, EngineConfig(num_threads=1, dtype=dtype))
    engine.add_request("hello", SamplingParams(max_tokens=2), request_id="a")
    assert len(tokens_of(run_to_end(engine)["a"])) == 2
    assert {keys.dtype for keys in engine._runner.decoder.cache.keys} == {expected}
