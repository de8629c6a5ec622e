"""The engine's own step on Triton's kernels, interpreted: the same tokens, and cut within them."""

import logging
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from disconnect_watch.engine import Engine, EngineConfig, SamplingParams, kernel_attend
from disconnect_watch.engine.arithmetic import dtype_of
from disconnect_watch.engine.kernel_decoder import KernelDecoder
from disconnect_watch.engine.pace import Pace
from disconnect_watch.kernels import FlagView, Kernels, RowState
from disconnect_watch.token import CancelToken, Reason
from tests.support.engine import (
    TINY_CONFIG,
    collect,
    dense_greedy,
    make_engine,
    random_model,
    record_scores,
    run_to_end,
    tiny_model,
    tokens_of,
)

PROMPTS = {
    name: [(13 * index + 41 * len(name)) % 256 for index in range(length)]
    for name, length in (("a", 3), ("bb", 21), ("ccc", 40), ("dddd", 9))
}
LONG = [(29 * index + 7) % 256 for index in range(300)]
#: Everything that a rule of attention can ask for, and norms wherever one can be.
GEMMA: dict[str, Any] = {
    **TINY_CONFIG,
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 24,
    "attn_logit_softcapping": 30.0,
    "final_logit_softcapping": 20.0,
    "sliding_window": 12,
}


@pytest.fixture(autouse=True)
def _interpreted(interpreted: Kernels) -> None:
    """All of this file needs Triton in its interpreter."""


def params(num_tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, ignore_eos=True, **more)


def decoder_of(engine: Engine) -> KernelDecoder:
    decoder = engine._runner.decoder
    assert isinstance(decoder, KernelDecoder)
    return decoder


def serve(engine: Engine, num_tokens: int, *, seed: int = 0, **more: Any) -> dict[str, list[int]]:
    for index, (name, prompt) in enumerate(PROMPTS.items()):
        engine.add_request(prompt, params(num_tokens, seed=seed + index, **more), request_id=name)
    return {name: tokens_of(outputs) for name, outputs in run_to_end(engine).items()}


@pytest.mark.slow
def test_likeliest_tokens_are_those_of_the_plain_model_whatever_runs_together() -> None:
    engine = make_engine(arithmetic="triton", max_num_batched_tokens=40, num_blocks=48)
    for name, tokens in serve(engine, 5).items():
        assert tokens == dense_greedy(tiny_model(), PROMPTS[name], 5), name
    assert engine.stats().arithmetic == "triton, interpreted on a cpu"


@pytest.mark.slow
def test_scores_and_draws_are_those_of_torch() -> None:
    found = {}
    for arithmetic in ("triton", "torch"):
        engine = make_engine(arithmetic=arithmetic)
        scores = record_scores(engine)
        tokens = serve(engine, 3, seed=2**64 - 4, temperature=1.1, top_k=20, top_p=0.9, logprobs=2)
        found[arithmetic] = tokens, scores
    tokens, scores = found["triton"]
    assert tokens == found["torch"][0]
    for key, rows in found["torch"][1].items():
        for ours, theirs in zip(scores[key], rows, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_windows_and_soft_caps_are_the_models() -> None:
    model = random_model(GEMMA)
    engine = make_engine(model, arithmetic="triton")
    engine.add_request(PROMPTS["ccc"], params(3), request_id="a")
    [outputs] = run_to_end(engine).values()
    assert tokens_of(outputs) == dense_greedy(model, PROMPTS["ccc"], 3)


class Tiles:
    """Counts the tiles of keys that attention works on, and acts at one of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from disconnect_watch.kernels.jit import attention

        self.num_done = 0
        self.cancel_at: dict[int, CancelToken] = {}
        tile = attention._attend_tile

        def attend_tile(*args: Any) -> Any:
            self.num_done += 1
            if token := self.cancel_at.get(self.num_done):
                token.cancel(Reason.FIN)
            return tile(*args)

        monkeypatch.setattr(attention, "_attend_tile", attend_tile)


def test_a_client_that_leaves_in_mid_kernel_costs_no_tile_behind_the_next_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tiles = Tiles(monkeypatch)
    monkeypatch.setattr(kernel_attend, "POLL_EVERY", 2)
    engine = make_engine(
        arithmetic="triton", max_num_batched_tokens=384, max_model_len=256, num_blocks=128
    )
    token = CancelToken()
    engine.add_request(LONG[:250], params(4), request_id="leaves", cancel=token)
    engine.add_request(PROMPTS["bb"], params(4), request_id="stays")
    # In each layer the short prompt comes first, a tile for every head; then the long one, whose
    # first queries see two tiles and the others four. The client leaves in the second layer, in
    # the first tile of the second head.
    whole_layer = 6 + 6 * (2 + 4)
    tiles.cancel_at[whole_layer + 6 + 3] = token
    outputs = {output.request_id: output for output in engine.step()}
    # One tile more up to the next look; and the last layer of who stays.
    assert tiles.num_done == whole_layer + 6 + 4 + 6
    [record] = engine.step_log
    assert record.layer_tokens == (250 + 21, 21, 21)
    assert record.dropped == {"leaves": 2}
    assert outputs["leaves"].outcome is not None
    assert outputs["leaves"].token_ids == ()
    engine.check_integrity()
    assert engine.block_owners == {"stays"}
    collected = {"stays": [outputs["stays"]]}
    for name, more in run_to_end(engine).items():
        collected[name] += more
    assert tokens_of(collected["stays"]) == dense_greedy(tiny_model(), PROMPTS["bb"], 4)


def test_a_flag_that_the_host_missed_ends_the_row_on_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The host has looked, and launches; the latch sees the client leave before the layer runs."""
    engine = make_engine(arithmetic="triton")
    decoder, token = decoder_of(engine), CancelToken()
    latch, keys, states = decoder._kernels.latch, decoder.cache.keys[0], []
    canary = 0

    def late(flags: FlagView, rows: RowState) -> None:
        nonlocal canary
        if len(engine.step_log) == 2:
            canary = engine._pool.block_ids("leaves")[1] * 4
            keys[canary] = 7.0
            token.cancel(Reason.RESET)
        latch(flags, rows)
        states.append((rows.live.tolist(), rows.seq_lens.tolist(), token.acked))

    monkeypatch.setattr(decoder._kernels, "latch", late)
    engine.add_request(PROMPTS["a"], params(6), request_id="leaves", cancel=token)
    engine.add_request(PROMPTS["bb"], params(6), request_id="stays")
    outputs: dict[str, list[Any]] = {}
    for _ in range(3):
        collect(engine.step(), outputs)
    assert states[-1] == ([0, 1], [0, 23], 3), "dead, and acknowledged by the step's number"
    assert bool((keys[canary] == 7.0).all()), "a dead row has written"
    assert outputs["leaves"][-1].token_ids == ()
    for name, more in run_to_end(engine).items():
        outputs[name] += more
    assert tokens_of(outputs["stays"]) == dense_greedy(tiny_model(), PROMPTS["bb"], 6)
    assert engine.stats().num_blocks_available == engine.stats().num_blocks


def test_the_host_is_one_layer_ahead_and_no_more() -> None:
    """A device is played by a list: what was waited for, in order."""
    waited: list[int] = []
    recorded: list[object] = []

    class Mark:
        def record(self) -> None:
            recorded.append(self)

        def synchronize(self) -> None:
            waited.append(recorded.index(self))

    pace = Pace(Mark)
    told = []
    for _ in range(4):
        pace.launched()
        told.append(list(waited))
    assert told == [[], [0], [0, 1], [0, 1, 2]]


def test_what_computes_and_what_is_missing_is_told_at_start(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "disconnect_watch.engine"):
        stats = make_engine(arithmetic="triton").stats()
    assert stats.missing == ("device 'cpu' runs no CUDA graph: the host decides on every step",)
    assert [record.getMessage() for record in caplog.records] == [
        "the engine computes by triton, interpreted on a cpu",
        *stats.missing,
    ]


def test_half_precision_is_a_gpus_default_and_not_the_interpreters() -> None:
    assert dtype_of(EngineConfig(arithmetic="triton")) is torch.float32


def test_batch_invariance_is_not_promised() -> None:
    with pytest.raises(ValueError, match="'native' or 'auto', not 'triton'"):
        EngineConfig(batch_invariant=True, arithmetic="triton")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "lack"),
    [
        ("", "torch finds no CUDA device, and without TRITON_INTERPRET=1"),
        ("import sys; sys.modules['triton'] = None", "triton is not installed: pip install"),
    ],
)
def test_a_machine_without_is_told_what_it_lacks(before: str, lack: str) -> None:
    script = (
        f"{before}\n"
        "import torch; torch.cuda.is_available = lambda: False\n"
        "from disconnect_watch.engine import Engine, EngineConfig\n"
        "try: Engine.from_pretrained(config=EngineConfig(arithmetic='triton'))\n"
        "except ValueError as error: print(error)"
    )
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    assert done.stdout.startswith(f"arithmetic is 'triton', which cannot run here: {lack}")
