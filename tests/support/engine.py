"""Small random checkpoints, engines on them, and the long way to the tokens they must give."""

import json
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from disconnect_watch.engine import Engine, EngineConfig, RequestOutput
from disconnect_watch.engine.attention import CausalAttention
from disconnect_watch.engine.checkpoint import to_hugging_face
from disconnect_watch.engine.model import LlamaModel
from disconnect_watch.engine.model_config import ModelConfig
from disconnect_watch.engine.rotary import Rotary
from disconnect_watch.engine.tokenizer import Tokenizer as EngineTokenizer

#: config.json of a three-layer model with grouped queries; end token 256 is behind the 256 bytes.
TINY_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 264,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 256,
}


def byte_tokenizer() -> Tokenizer:
    """A byte-level tokenizer: the 256 bytes in the order of their characters, and an end token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    return tokenizer


@cache
def engine_tokenizer() -> EngineTokenizer:
    """The same as the engine reads it; it has no state."""
    return EngineTokenizer(byte_tokenizer())


@cache
def tiny_model(seed: int = 0) -> LlamaModel:
    """The model of ``TINY_CONFIG``; see ``random_model``."""
    return random_model(TINY_CONFIG, seed=seed)


def random_model(config: Mapping[str, Any], *, seed: int = 0) -> LlamaModel:
    """Random weights, large enough that the likeliest token is likeliest by far."""
    model = LlamaModel(ModelConfig.from_dict(dict(config)))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(std=0.25, generator=generator)
    return model.eval().requires_grad_(False)


def write_checkpoint(path: Path, **config: Any) -> Path:
    """Write the tiny model as a Hugging Face directory, its config changed by ``config``."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({**TINY_CONFIG, **config}))
    save_file(to_hugging_face(tiny_model()), path / "model.safetensors")
    byte_tokenizer().save(str(path / "tokenizer.json"))
    return path


def make_engine(model: LlamaModel | None = None, **config: Any) -> Engine:
    """An engine on the tiny model, small enough that limits are reached: 4 tokens a block."""
    return Engine(
        model or tiny_model(),
        engine_tokenizer(),
        config=EngineConfig(
            **{
                "block_size": 4,
                "num_blocks": 64,
                "max_model_len": 128,
                "max_num_seqs": 8,
                "max_num_batched_tokens": 64,
                "num_threads": 1,
                **config,
            }
        ),
    )


def record_scores(engine: Engine) -> dict[str, list[torch.Tensor]]:
    """From now on, the scores of each token of each request, [vocab_size] each, by its key."""
    found: dict[str, list[torch.Tensor]] = {}
    seen: list[torch.Tensor] = []
    runner = engine._runner
    run = runner.run

    def keep(logits: torch.Tensor) -> torch.Tensor:
        seen.append(logits.clone())
        return logits

    def note(rows: Any, **options: Any) -> Any:
        results = run(rows, **options)
        for logits in seen:
            for key, row in zip(results, logits, strict=True):
                found.setdefault(key, []).append(row)
        seen.clear()
        return results

    runner.logits_hook = keep
    runner.run = note  # type: ignore[method-assign]
    return found


def run_to_end(engine: Engine, *, max_steps: int = 2000) -> dict[str, list[RequestOutput]]:
    """Step until nothing is left to do, and check the ledger after each; outputs by request."""
    outputs: dict[str, list[RequestOutput]] = {}
    for _ in range(max_steps):
        if not engine.has_work:
            return outputs
        collect(engine.step(), outputs)
        engine.check_integrity()
    raise AssertionError(f"not done after {max_steps} steps: {engine.stats()}")


def collect(step: Iterable[RequestOutput], outputs: dict[str, list[RequestOutput]]) -> None:
    """Add one step's outputs, and hold that nothing follows an outcome."""
    for output in step:
        seen = outputs.setdefault(output.request_id, [])
        assert not seen or seen[-1].outcome is None, f"{output.request_id} spoke after its end"
        seen.append(output)


def tokens_of(outputs: list[RequestOutput]) -> list[int]:
    """All token ids of one request."""
    return [token for output in outputs for token in output.token_ids]


@torch.inference_mode()
def dense_logits(
    model: LlamaModel, token_ids: list[int], *, length: int | None = None
) -> torch.Tensor:
    """Scores after each token, computed at once and without a cache, [num_tokens, vocab_size].

    ``length`` is what the rotary table is made for, if that is more than the tokens.
    """
    dtype = model.embed_tokens.weight.dtype
    rotary = Rotary(model.config, length=length or len(token_ids), dtype=dtype)
    hidden = model(
        torch.tensor(token_ids),
        rotary(torch.arange(len(token_ids))),
        CausalAttention(num_sequences=1),
    )
    return model.logits(hidden)


def dense_greedy(model: LlamaModel, prompt: list[int], num_tokens: int) -> list[int]:
    """The likeliest continuation, each token computed from the whole text before it."""
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(int(dense_logits(model, token_ids)[-1].argmax()))
    return token_ids[len(prompt) :]


def is_greedy(
    model: LlamaModel, prompt: list[int], tokens: list[int], *, length: int | None = None
) -> bool:
    """Whether each token is the likeliest after all before it; one forward over all of them."""
    if not tokens:
        return True
    scores = dense_logits(model, prompt + tokens[:-1], length=length)[len(prompt) - 1 :]
    return scores.argmax(-1).tolist() == tokens
