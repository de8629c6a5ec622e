"""The engine's own step on a device: the tokens of the plain model, and a prompt that is left."""

import threading

import pytest
import torch

from disconnect_watch.engine import Engine, SamplingParams
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


@pytest.mark.parametrize("device_steps", [1, 8])
def test_likeliest_tokens_are_those_of_the_plain_model(
    device: torch.device, device_steps: int
) -> None:
    # An engine moves its model to the device; the plain one stays where it is.
    engine = make_engine(
        random_model(TINY_CONFIG),
        arithmetic="triton",
        max_num_batched_tokens=40,
        device_steps=device_steps,
    )
    assert engine.stats().arithmetic == f"triton, on {device}"
    prompts = {
        name: [(13 * index + 41 * len(name)) % 256 for index in range(length)]
        for name, length in (("a", 3), ("bb", 21), ("ccc", 70))
    }
    for name, prompt in prompts.items():
        engine.add_request(prompt, params(20), request_id=name)
    for name, outputs in run_to_end(engine).items():
        assert tokens_of(outputs) == dense_greedy(tiny_model(), prompts[name], 20), name
    if device_steps > 1:
        # One row is a step behind the others: what is left is drawn in three launches.
        assert engine.stats().num_steps < 10


def test_draws_of_a_launch_are_those_of_single_steps(device: torch.device) -> None:
    found = []
    for device_steps in (1, 8):
        engine = make_engine(
            random_model(TINY_CONFIG), arithmetic="triton", device_steps=device_steps
        )
        for seed in range(4):
            drawn = SamplingParams(
                max_tokens=20, ignore_eos=True, temperature=0.9, top_k=30, top_p=0.9, seed=seed
            )
            engine.add_request([5, 6, 7], drawn, request_id=str(seed))
        found.append({name: tokens_of(outputs) for name, outputs in run_to_end(engine).items()})
    assert found[0] == found[1]


@pytest.mark.parametrize("way", ["token", "abort", "deadline"])
def test_who_ends_while_the_graph_runs_is_told_nothing_and_the_launch_ends(
    device: torch.device, way: str
) -> None:
    """The only row: a launch that did not see it end would draw all of its tokens."""
    num_tokens = 30_000
    config = {**TINY_CONFIG, "max_position_embeddings": num_tokens + 64}
    engine = make_engine(
        random_model(config),
        arithmetic="triton",
        device_steps=num_tokens,
        num_blocks=num_tokens // 16 + 8,
        block_size=16,
        max_model_len=num_tokens + 64,
    )
    _compile(engine)
    token, has_begun = CancelToken(), threading.Event()
    is_late = False
    engine.clock = lambda: 10**10 if is_late else 1
    request = engine.add_request(
        [5, 6, 7], params(num_tokens), request_id="a", cancel=token, time_limit=1.0
    )

    def end() -> None:
        nonlocal is_late
        has_begun.wait(60)
        if way == "token":
            token.cancel(Reason.FIN)
        elif way == "abort":
            request.mark_cancelled(Reason.ABORTED)
        else:
            is_late = True

    num_looks = 0

    def look(step: int, layer: int) -> None:
        nonlocal num_looks
        # The prompt has a look a layer. After some in the loop it runs.
        num_looks += step > num_before + 1
        if num_looks == 10:
            has_begun.set()

    num_before = engine.stats().num_steps
    engine.layer_hook = look
    ender = threading.Thread(target=end)
    ender.start()
    outputs = run_to_end(engine)["a"]
    ender.join()
    assert len(tokens_of(outputs)) == 1, "the one that the prompt gave"
    outcome = outputs[-1].outcome
    assert outcome is not None
    assert outcome.kind == "cancelled"
    assert outcome.num_wasted_tokens < num_tokens - 1
    assert engine.stats().num_blocks_available == engine.stats().num_blocks


def _compile(engine: Engine) -> None:
    """Run a loop to its end, so that the next one is launched without a wait."""
    engine.add_request([5, 6, 7], params(9), request_id="first")
    run_to_end(engine)


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
