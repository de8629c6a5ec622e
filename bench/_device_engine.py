"""The embedded engine on a device, with one step a launch and with several."""

import random
import time
from dataclasses import dataclass, field

import torch

from bench._device_work import ModelShape
from bench._leavers import Leavers
from disconnect_watch import CancelToken
from disconnect_watch.engine import DEFAULT_MODEL, Engine, EngineConfig, SamplingParams
from disconnect_watch.engine.model import LlamaModel
from disconnect_watch.engine.model_config import ModelConfig
from disconnect_watch.engine.tokenizer import Tokenizer

__all__ = ["EngineRun", "make_engine", "run_engine"]

CONTEXT = 32


@dataclass(slots=True)
class EngineRun:
    """What one run came to.

    Attributes:
        num_tokens: that reached a client.
        seconds: of the decode, prompts left out.
        num_wasted: tokens drawn for those who had left.
        num_left: who left.
        reusable_ms: of each leave, until its blocks were given up.
    """

    num_tokens: int = 0
    seconds: float = 0.0
    num_wasted: int = 0
    num_left: int = 0
    reusable_ms: list[float] = field(default_factory=list)


def make_engine(
    shape: ModelShape,
    *,
    device: torch.device,
    dtype: torch.dtype,
    num_rows: int,
    num_tokens: int,
    device_steps: int,
) -> Engine:
    """An engine with random weights, and room for so many rows of so many tokens."""
    config = ModelConfig.from_dict(
        {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": shape.vocab_size,
            "hidden_size": shape.hidden_size,
            "intermediate_size": shape.intermediate_size,
            "num_hidden_layers": shape.num_layers,
            "num_attention_heads": shape.num_heads,
            "num_key_value_heads": shape.num_kv_heads,
            "head_dim": shape.head_dim,
            "max_position_embeddings": CONTEXT + num_tokens,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "tie_word_embeddings": True,
            "eos_token_id": 0,
        }
    )
    torch.manual_seed(0)
    with device:
        model = LlamaModel(config).to(dtype).eval().requires_grad_(False)
    return Engine(
        model,
        Tokenizer.from_pretrained(DEFAULT_MODEL),
        config=EngineConfig(
            arithmetic="triton",
            device_steps=device_steps,
            max_num_seqs=num_rows,
            max_num_batched_tokens=max(512, num_rows * CONTEXT),
            num_blocks=num_rows * (-(-(CONTEXT + num_tokens) // 16) + 1),
            enable_prefix_caching=False,
        ),
    )


def run_engine(
    engine: Engine, *, num_rows: int, num_tokens: int, share: float = 0.0, within: float = 0.0
) -> EngineRun:
    """Let a full batch decode, of which a share leaves at random times.

    Args:
        num_tokens: that each wants.
        share: of those who leave.
        within: seconds from the first decode in which they do.
    """
    rng = random.Random(0)
    tokens = [CancelToken() for _ in range(num_rows)]
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, temperature=1.0, seed=0)
    for index, token in enumerate(tokens):
        prompt = [1 + (7 * index + at) % 40 for at in range(CONTEXT)]
        engine.add_request(prompt, params, request_id=f"r{index}", cancel=token)
    leaving = rng.sample(tokens, round(share * num_rows))
    result = EngineRun(num_left=len(leaving))
    engine.step()  # all prompts
    with Leavers(waits_for_ack=False) as leavers:
        begin = time.perf_counter()
        for token in leaving:
            leavers.add(begin + rng.uniform(0, within), token)
        while engine.has_work:
            for output in engine.step():
                result.num_tokens += len(output.token_ids)
                if output.outcome is not None and output.outcome.kind == "cancelled":
                    outcome = output.outcome
                    result.num_wasted += outcome.num_wasted_tokens
                    result.reusable_ms.append((outcome.freed_at_ns - outcome.flag_at_ns) / 1e6)
        result.seconds = time.perf_counter() - begin
    return result
