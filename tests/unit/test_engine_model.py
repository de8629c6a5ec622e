"""The decoder against transformers, and the paged engine against the plain decoder."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from disconnect_watch.engine import Engine, EngineConfig, SamplingParams
from tests.support.engine import (
    byte_tokenizer,
    dense_greedy,
    dense_logits,
    run_to_end,
    tokens_of,
    write_checkpoint,
)

BASE = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}

#: name of the transformers classes, and what their config has besides BASE.
FAMILY: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied-biased-rope3": (
        "Llama",
        {
            "tie_word_embeddings": True,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": LLAMA3,
        },
    ),
    "llama-linear": ("Llama", {"rope_parameters": LINEAR}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
}
PROMPT = [(17 * index + 5) % 256 for index in range(90)]


@pytest.fixture(scope="module", params=FAMILY)
def reference(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, Path]:
    """A random model of transformers, and the directory it was saved to."""
    # On import transformers warns of deprecations in libraries that are neither its nor ours.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers
    family, fields = FAMILY[request.param]
    torch.manual_seed(7)
    config = getattr(transformers, f"{family}Config")(**{**BASE, **fields})
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(std=0.2)
    path = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(path, max_shard_size="100KB")
    byte_tokenizer().save(str(path / "tokenizer.json"))
    return model, path


def make_engine(path: Path, **config: Any) -> Engine:
    return Engine.from_pretrained(path, EngineConfig(num_threads=1, num_blocks=64, **config))


def test_scores_are_those_of_transformers(reference: tuple[Any, Path]) -> None:
    model, path = reference
    with torch.no_grad():
        expected = model(torch.tensor([PROMPT])).logits[0]
    scores = dense_logits(make_engine(path)._runner._model, PROMPT)
    torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-4)


def test_greedy_tokens_are_those_of_transformers(reference: tuple[Any, Path]) -> None:
    model, path = reference
    token_ids = list(PROMPT)
    with torch.no_grad():
        for _ in range(12):
            token_ids.append(int(model(torch.tensor([token_ids])).logits[0, -1].argmax()))
    engine = make_engine(path, max_num_batched_tokens=32, max_num_seqs=2)
    engine.add_request(PROMPT, SamplingParams(max_tokens=12), request_id="a")
    assert tokens_of(run_to_end(engine)["a"]) == token_ids[len(PROMPT) :]


@pytest.mark.parametrize("chunk", [1, 7, 32, 512])
def test_paged_and_chunked_scores_are_the_plain_ones(
    tmp_path: Path, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path)
    engine = make_engine(tmp_path, max_num_batched_tokens=chunk, max_num_seqs=1, block_size=4)
    seen: list[torch.Tensor] = []
    logits = engine._runner._model.logits

    def spy(hidden: torch.Tensor) -> torch.Tensor:
        seen.append(logits(hidden))
        return seen[-1]

    monkeypatch.setattr(engine._runner._model, "logits", spy)
    engine.add_request(PROMPT, SamplingParams(max_tokens=6), request_id="a")
    tokens = tokens_of(run_to_end(engine)["a"])
    monkeypatch.undo()
    expected = dense_logits(engine._runner._model, PROMPT + tokens[:-1])[len(PROMPT) - 1 :]
    torch.testing.assert_close(torch.cat(seen), expected, rtol=1e-4, atol=1e-4)
    assert tokens == dense_greedy(engine._runner._model, PROMPT, 6)
