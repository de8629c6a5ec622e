"""Weights on disk, in the layout of Hugging Face, to and from the fused names of the model."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from disconnect_watch.engine.errors import CheckpointError
from disconnect_watch.engine.model import LlamaModel
from disconnect_watch.engine.model_config import ModelConfig

__all__ = ["fill", "load_model", "to_hugging_face"]

# Within one layer: our name, and theirs; several of theirs lie behind each other in ours.
LAYER_PARTS = {
    "input_layernorm": ("input_layernorm",),
    "qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "q_norm": ("self_attn.q_norm",),
    "k_norm": ("self_attn.k_norm",),
    "o_proj": ("self_attn.o_proj",),
    "post_attention_layernorm": ("post_attention_layernorm",),
    "gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "down_proj": ("mlp.down_proj",),
}
# Where one tensor of theirs holds all of ours, and where they name the norms otherwise.
FUSED_PARTS = {
    "qkv_proj": ("self_attn.qkv_proj",),
    "gate_up_proj": ("mlp.gate_up_proj",),
}
OUTPUT_NORM_PARTS = {
    "attention_output_norm": ("post_attention_layernorm",),
    "post_attention_layernorm": ("pre_feedforward_layernorm",),
    "mlp_output_norm": ("post_feedforward_layernorm",),
}
OUTER_PARTS = {
    "embed_tokens": "model.embed_tokens",
    "norm": "model.norm",
    "lm_head": "lm_head",
}


def load_model(path: str | Path, config: ModelConfig, *, dtype: torch.dtype) -> LlamaModel:
    """Build the model and fill it from the ``*.safetensors`` files of a directory.

    Args:
        path: holds ``model.safetensors``, or shards and ``model.safetensors.index.json``.
        config: of that same directory.
        dtype: what the weights are converted to.

    Raises:
        CheckpointError: a file or tensor is missing, damaged, or of another shape than the
            config says, or there is a tensor that the model would not use.
    """
    with torch.device("meta"):
        model = LlamaModel(config)
    fill(
        model,
        path,
        sources=lambda name, parameter: _sources(name, parameter, config),
        is_spare=lambda name: _is_spare(name, config),
        dtype=dtype,
    )
    return model


def fill(
    model: nn.Module,
    path: str | Path,
    *,
    sources: Callable[[str, Tensor], list[tuple[str, int]]],
    is_spare: Callable[[str], bool],
    dtype: torch.dtype,
) -> None:
    """Give a model on the meta device its weights, and put it in eval mode.

    Args:
        model: whose parameters are replaced.
        path: of the directory.
        sources: for one of our parameters their names, and how many of its rows each of them has.
        is_spare: whether a tensor is known to be of no use.
        dtype: what the weights are converted to.

    Raises:
        CheckpointError: as for ``load_model``.
    """
    tensors = dict(_read_tensors(Path(path)))
    state: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        parts: list[Tensor] = []
        for source, num_rows in sources(name, parameter):
            if source not in tensors:
                raise CheckpointError(f"{path} has no tensor {source}")
            expected = (num_rows, *parameter.shape[1:])
            if tensors[source].shape != expected:
                raise CheckpointError(
                    f"{source} has shape {tuple(tensors[source].shape)}, config.json asks for "
                    f"{expected}"
                )
            # Each original is let go at once, so that never all weights are there twice.
            parts.append(tensors.pop(source).to(dtype))
        state[name] = torch.cat(parts)
    unused = [name for name in tensors if not is_spare(name)]
    if unused:
        raise CheckpointError(
            f"{path} has {len(unused)} tensors that the config gives no use for: "
            f"{', '.join(sorted(unused)[:3])}"
        )
    model.load_state_dict(state, assign=True)
    model.eval().requires_grad_(False)


def to_hugging_face(model: LlamaModel) -> dict[str, Tensor]:
    """Return the weights under the names that ``transformers`` reads, contiguous and detached."""
    state: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        first = 0
        for source, num_rows in _sources(name, parameter, model.config):
            state[source] = parameter.detach()[first : first + num_rows].contiguous()
            first += num_rows
    return state


def _sources(name: str, parameter: Tensor, config: ModelConfig) -> list[tuple[str, int]]:
    """Return their names for one of our parameters, and how many of its rows each of them has."""
    match name.split("."):
        case ["layers", index, part, kind]:
            parts = {
                **LAYER_PARTS,
                **(FUSED_PARTS if config.is_stored_fused else {}),
                **(OUTPUT_NORM_PARTS if config.has_output_norms else {}),
            }
            sources = [f"model.layers.{index}.{theirs}.{kind}" for theirs in parts[part]]
        case [part, kind]:
            sources = [f"{OUTER_PARTS[part]}.{kind}"]
        case _:
            raise AssertionError(name)
    if part == "qkv_proj" and len(sources) > 1:
        num_keys = config.num_kv_heads * config.head_dim
        return list(
            zip(sources, [config.num_heads * config.head_dim, num_keys, num_keys], strict=True)
        )
    return [(source, parameter.shape[0] // len(sources)) for source in sources]


def _is_spare(name: str, config: ModelConfig) -> bool:
    """Old checkpoints hold the rotary frequencies too, and some a second copy of a tied head."""
    return name.endswith("rotary_emb.inv_freq") or (
        config.tie_word_embeddings and name == "lm_head.weight"
    )


def _read_tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    index = path / "model.safetensors.index.json"
    if index.exists():
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            files = sorted({Path(file).name for file in weight_map.values()})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{index} is no index of safetensors files") from error
    else:
        files = ["model.safetensors"]
    for file in files:
        try:
            with safe_open(path / file, framework="pt") as shard:
                for name in shard.keys():  # noqa: SIM118 - not a dict, it cannot be iterated
                    yield name, shard.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path / file} cannot be read: {error}") from error
