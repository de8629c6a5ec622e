"""Weights on disk: read whole or in shards, refused where they do not fit the config."""

import json
from pathlib import Path
from typing import Literal

import pytest
import torch
from safetensors.torch import load_file, save_file

from disconnect_watch.engine import Engine, EngineConfig, SamplingParams
from disconnect_watch.engine.checkpoint import load_model, to_hugging_face
from disconnect_watch.engine.config import ModelConfig
from disconnect_watch.engine.errors import CheckpointError
from disconnect_watch.engine.model import LlamaModel
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


def test_weights_are_converted_to_the_dtype_asked_for(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    assert load(tmp_path, torch.bfloat16).embed_tokens.weight.dtype is torch.bfloat16


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
    ("dtype", "expected"), [("auto", torch.float32), ("bfloat16", torch.bfloat16)]
)
def test_an_engine_computes_in_float32_unless_told_otherwise(
    tmp_path: Path, dtype: Literal["auto", "bfloat16"], expected: torch.dtype
) -> None:
    write_checkpoint(tmp_path, dtype="bfloat16")
    engine = Engine.from_pretrained(tmp_path, EngineConfig(num_threads=1, dtype=dtype))
    engine.add_request("hello", SamplingParams(max_tokens=2), request_id="a")
    assert len(tokens_of(run_to_end(engine)["a"])) == 2
    assert {keys.dtype for keys in engine._runner._cache.keys} == {expected}
