"""Tiny random models of the frameworks that the hooks are for."""

import warnings
from typing import Any

import torch


def llama(num_layers: int = 3) -> Any:
    """A ``LlamaForCausalLM`` of transformers with 64 tokens and no end of text."""
    # On import transformers warns of deprecations in libraries that are neither its nor ours.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

        torch.manual_seed(1)
        config = transformers.LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            num_hidden_layers=num_layers,
            num_attention_heads=4,
            num_key_value_heads=4,
            intermediate_size=48,
            max_position_embeddings=1 << 16,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=0,
        )
        model: Any = transformers.LlamaForCausalLM(config)
        return model.eval()


def fires_at(token: Any, count: int) -> Any:
    """A forward pre-hook that cancels ``token`` at its call number ``count``, from 1."""
    calls = 0

    def hook(module: Any, args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == count:
            token.cancel()

    return hook
