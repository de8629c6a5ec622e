"""The engine's own step on a device: the tokens of the plain model, and a prompt that is left."""

import torch

from disconnect_watch.engine import SamplingParams
from disconnect_watch.engine.model import LlamaModel
from disconnect_watch.engine.model_config import ModelConfig
from disconnect_watch.token import CancelToken, Reason
from tests.support.engine import (
    TINY_CONFIG,
    dense_greedy,
    make_engine,
    random_model,
    run_to_end,
    tiny_model,
    tokens_of,
)

NUM_LONG = 32_000


def params(num_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, ignore_eos=True)


def test_likeliest_tokens_are_those_of_the_plain_model(device: torch.device) -> None:
    # An engine moves its model to the device; the plain one stays where it is.
    engine = make_engine(random_model(TINY_CONFIG), arithmetic="triton", max_num_batched_tokens=40)
    assert engine.stats().arithmetic == f"triton, on {device}"
    prompts = {
        name: [(13 * index + 41 * len(name)) % 256 for index in range(length)]
        for name, length in (("a", 3), ("bb", 21), ("ccc", 70))
    }
    for name, prompt in prompts.items():
        engine.add_request(prompt, params(8), request_id=name)
    for name, outputs in run_to_end(engine).items():
        assert tokens_of(outputs) == dense_greedy(tiny_model(), prompts[name], 8), name


def test_nothing_of_a_long_prompt_is_launched_behind_the_layer_of_the_leave(
    device: torch.device,
) -> None:
    config = {**TINY_CONFIG, "max_position_embeddings": NUM_LONG + 64, "num_hidden_layers": 24}
    model = LlamaModel(ModelConfig.from_dict(config)).to(torch.bfloat16).eval()
    engine = make_engine(
        model.requires_grad_(False),
        arithmetic="triton",
        block_size=16,
        num_blocks=NUM_LONG // 16 + 8,
        max_model_len=NUM_LONG + 64,
        max_num_batched_tokens=8192,
    )
    token = CancelToken()

    def leave(step: int, layer: int) -> None:
        if (step, layer) == (3, 12):
            token.cancel(Reason.FIN)

    engine.layer_hook = leave
    prompt = [(17 * index + 3) % 256 for index in range(NUM_LONG)]
    engine.add_request(prompt, params(4), request_id="long", cancel=token)
    [output] = run_to_end(engine)["long"]
    assert output.outcome is not None
    assert (output.outcome.kind, output.outcome.phase) == ("cancelled", "prefill")
    [*_, cut] = engine.step_log
    assert cut.layer_tokens == (8192,) * 12
    assert engine.stats().num_blocks_available == engine.stats().num_blocks
