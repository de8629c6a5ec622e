"""The decoder against transformers, and the paged engine against the plain decoder."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from disconnect_watch.engine import Engine, EngineConfig, SamplingParams
from tests.support.engine import (
    byte_tokenizer,
    dense_logits,
    is_greedy,
    run_to_end,
    tokens_of,
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
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
}
YARN_IN_FULL = {
    **YARN,
    "factor": 2.0,
    # Long enough that the blend begins and ends between two dimensions.
    "original_max_position_embeddings": 128,
    "beta_fast": 16.0,
    "beta_slow": 2.0,
    "mscale": 0.7,
    "mscale_all_dim": 0.9,
    "truncate": False,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
    "long_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5],
}

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
    "llama-dynamic-within": ("Llama", {"rope_parameters": DYNAMIC}),
    "llama-yarn": ("Llama", {"rope_parameters": YARN}),
    "qwen2-yarn-in-full": ("Qwen2", {"rope_parameters": YARN_IN_FULL}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-window": ("Mistral", {"sliding_window": 13}),
    "qwen2": ("Qwen2", {}),
    "qwen2-window-above": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3-biased-window-by-layer": (
        "Qwen3",
        {
            "head_dim": 32,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 40,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "phi3": ("Phi3", {}),
    "phi3-window": ("Phi3", {"sliding_window": 29}),
    "phi3-longrope-beyond": (
        "Phi3",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64},
    ),
    "phi3-longrope-within": (
        "Phi3",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 128},
    ),
    "phi3-partial": (
        "Phi3",
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
    ),
    "gemma2": (
        "Gemma2",
        {
            "head_dim": 32,
            "sliding_window": 21,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 5.0,
        },
    ),
    "gemma2-uncapped-biased": (
        "Gemma2",
        {
            "head_dim": 16,
            "attention_bias": True,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
        },
    ),
}
PROMPT = [(17 * index + 5) % 256 for index in range(90)]


def make_reference(family: str, fields: dict[str, Any], path: Path) -> Any:
    """A random model of transformers, saved to a directory in many shards."""
    # On import transformers warns of deprecations in libraries that are neither its nor ours.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers
    torch.manual_seed(7)
    # Its faster attention leaves the soft cap out.
    config = getattr(transformers, f"{family}Config")(
        **{**BASE, **fields}, attn_implementation="eager"
    )
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(std=0.2)
    model.save_pretrained(path, max_shard_size="100KB")
    byte_tokenizer().save(str(path / "tokenizer.json"))
    return model


@pytest.fixture(scope="module", params=FAMILY)
def reference(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, Path]:
    """A model of transformers, and the directory it was saved to."""
    path = tmp_path_factory.mktemp(request.param)
    return make_reference(*FAMILY[request.param], path), path


def make_engine(path: Path, **config: Any) -> Engine:
    return Engine.from_pretrained(path, EngineConfig(num_threads=1, num_blocks=64, **config))


@torch.no_grad()
def scores_of(reference: Any, token_ids: list[int]) -> torch.Tensor:
    scores: torch.Tensor = reference(torch.tensor([token_ids])).logits[0]
    return scores


def test_scores_are_those_of_transformers(reference: tuple[Any, Path]) -> None:
    model, path = reference
    scores = dense_logits(make_engine(path)._runner.decoder.model, PROMPT)
    torch.testing.assert_close(scores, scores_of(model, PROMPT), rtol=1e-4, atol=1e-4)


def test_greedy_tokens_are_those_of_transformers(reference: tuple[Any, Path]) -> None:
    model, path = reference
    token_ids = list(PROMPT)
    for _ in range(12):
        token_ids.append(int(scores_of(model, token_ids)[-1].argmax()))
    engine = make_engine(
        path, max_num_batched_tokens=32, max_num_seqs=2, max_model_len=len(token_ids)
    )
    engine.add_request(PROMPT, SamplingParams(max_tokens=12), request_id="a")
    assert tokens_of(run_to_end(engine)["a"]) == token_ids[len(PROMPT) :]


@pytest.mark.parametrize("arithmetic", ["native", "torch"])
@pytest.mark.parametrize("chunk", [1, 7, 512])
def test_paged_and_chunked_scores_are_the_plain_ones(
    reference: tuple[Any, Path], chunk: int, arithmetic: str
) -> None:
    engine = make_engine(
        reference[1],
        max_num_batched_tokens=chunk,
        max_num_seqs=1,
        block_size=4,
        arithmetic=arithmetic,
    )
    seen: list[torch.Tensor] = []
    model = engine._runner.decoder.model

    def spy(logits: torch.Tensor) -> torch.Tensor:
        seen.append(logits)
        return logits

    engine._runner.logits_hook = spy
    engine.add_request(PROMPT, SamplingParams(max_tokens=6), request_id="a")
    tokens = tokens_of(run_to_end(engine)["a"])
    expected = dense_logits(model, PROMPT + tokens[:-1], length=engine.max_model_len)
    expected = expected[len(PROMPT) - 1 :]
    torch.testing.assert_close(torch.cat(seen), expected, rtol=1e-4, atol=1e-4)
    assert tokens == expected.argmax(-1).tolist()


@pytest.mark.parametrize("arithmetic", ["native", "torch"])
def test_rows_of_different_lengths_get_what_each_gets_alone(
    reference: tuple[Any, Path], arithmetic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(
        reference[1],
        max_num_batched_tokens=48,
        block_size=4,
        max_num_seqs=8,
        arithmetic=arithmetic,
    )
    prompts = {str(length): PROMPT[-length:] for length in (6, 14, 20, 50, 60, 90)}
    for name, prompt in prompts.items():
        engine.add_request(prompt, SamplingParams(max_tokens=8), request_id=name)
    sizes: list[int] = []
    run = engine._runner.run

    def spy(rows: Any, **options: Any) -> Any:
        sizes.append(len(rows))
        return run(rows, **options)

    monkeypatch.setattr(engine._runner, "run", spy)
    outputs = run_to_end(engine)
    # A step that failed would have been run again, row by row.
    assert len(sizes) == engine.stats().num_steps
    assert max(sizes) > 3
    length, model = engine.max_model_len, engine._runner.decoder.model
    for name, prompt in prompts.items():
        assert is_greedy(model, prompt, tokens_of(outputs[name]), length=length), name


def test_the_dynamic_base_grows_with_the_length_beyond_that_of_the_file(tmp_path: Path) -> None:
    fields = {"rope_parameters": DYNAMIC, "max_position_embeddings": 64}
    reference = make_reference("Llama", fields, tmp_path)
    model = make_engine(tmp_path)._runner.decoder.model
    for length in (50, 90, 120):
        tokens = (PROMPT + PROMPT)[:length]
        expected = scores_of(reference, tokens)
        torch.testing.assert_close(dense_logits(model, tokens), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "gemma2", "phi3-longrope-beyond"])
def test_scores_in_half_precision_are_as_near_as_those_of_transformers(
    tmp_path: Path, family: str, dtype: torch.dtype
) -> None:
    reference = make_reference(*FAMILY[family], tmp_path)
    exact = scores_of(reference, PROMPT)
    theirs = (scores_of(reference.to(dtype), PROMPT).float() - exact).abs().mean()
    name: Any = str(dtype).removeprefix("torch.")
    model = make_engine(tmp_path, dtype=name)._runner.decoder.model
    scores = dense_logits(model, PROMPT, length=102)
    assert scores.dtype is dtype
    assert (scores.float() - exact).abs().mean() < 1.5 * theirs
