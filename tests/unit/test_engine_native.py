"""The decoder in C: when it is taken, and that a row's bits are its own affair."""

import logging
from typing import Any

import pytest
import torch

from disconnect_watch.engine import Engine, EngineConfig, SamplingParams, arithmetic
from disconnect_watch.engine.native import INSTRUCTIONS, NativeDecoder
from tests.support.engine import (
    make_engine,
    run_to_end,
    tiny_model,
    write_checkpoint,
)

PROMPTS = {
    name: [(7 * i + len(name) * 31) % 256 for i in range(len(name) * 5)]
    for name in ("a", "bb", "cccc", "ddddd", "eeeeeeee", "ffffffffffff")
}


def decoder_of(engine: Engine) -> str:
    return type(engine._runner.decoder).__name__


def scores_of(
    monkeypatch: pytest.MonkeyPatch, names: list[str], **config: Any
) -> dict[str, list[torch.Tensor]]:
    """Scores of each token of each request, all of which run together."""
    engine = make_engine(arithmetic="native", **config)
    for name in names:
        engine.add_request(
            PROMPTS[name], SamplingParams(max_tokens=9, ignore_eos=True), request_id=name
        )
    rows: list[list[str]] = []
    seen: list[torch.Tensor] = []
    run = engine._runner.run

    def spy(logits: torch.Tensor) -> torch.Tensor:
        seen.append(logits.clone())
        return logits

    def note(scheduled: Any, **options: Any) -> Any:
        result = run(scheduled, **options)
        rows.append(list(result))
        return result

    engine._runner.logits_hook = spy
    monkeypatch.setattr(engine._runner, "run", note)
    run_to_end(engine)
    found: dict[str, list[torch.Tensor]] = {}
    for keys, logits in zip(rows, seen, strict=True):
        for key, row in zip(keys, logits, strict=True):
            found.setdefault(key, []).append(row)
    return found


def test_scores_have_the_same_bits_alone_and_in_company(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    together = scores_of(monkeypatch, list(PROMPTS), max_num_batched_tokens=256, num_blocks=128)
    for name in PROMPTS:
        alone = scores_of(monkeypatch, [name], max_num_batched_tokens=256, num_blocks=128)
        assert len(together[name]) == len(alone[name]) == 9
        for ours, theirs in zip(together[name], alone[name], strict=True):
            assert torch.equal(ours, theirs), name


def test_native_is_the_default_for_one_thread_and_float32() -> None:
    assert decoder_of(make_engine()) == "NativeDecoder"
    assert decoder_of(make_engine(arithmetic="torch")) == "TorchDecoder"


def test_torch_is_the_default_for_half_precision_and_for_several_threads(tmp_path: Any) -> None:
    path = write_checkpoint(tmp_path / "model")
    threads = torch.get_num_threads()
    try:
        half = Engine.from_pretrained(path, EngineConfig(dtype="bfloat16", num_threads=1))
        assert decoder_of(half) == "TorchDecoder"
        several = Engine.from_pretrained(path, EngineConfig(num_threads=2))
        assert decoder_of(several) == "TorchDecoder"
    finally:
        torch.set_num_threads(threads)


def test_what_computes_and_what_is_missing_for_better_is_told_at_start(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    no_gpu = "no GPU is used: torch finds no CUDA device"
    with caplog.at_level(logging.INFO, "disconnect_watch.engine"):
        stats = make_engine().stats()
        assert stats.arithmetic == f"native, {INSTRUCTIONS}"
        assert stats.missing == (no_gpu,)
        stats = make_engine(arithmetic="torch").stats()
    assert stats.arithmetic == "torch"
    assert stats.missing == ("the decoder in C is not used: arithmetic is 'torch'", no_gpu)
    assert [record.getMessage() for record in caplog.records] == [
        f"the engine computes by native, {INSTRUCTIONS}",
        no_gpu,
        "the engine computes by torch",
        *stats.missing,
    ]


def test_a_gpu_that_nobody_asked_for_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    [lack] = make_engine().stats().missing
    assert lack == "no GPU is used: arithmetic is 'auto', set it to 'triton'"


def test_a_gpu_gets_half_precision_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arithmetic, "triton_device", lambda: torch.device("cuda", 0))
    assert arithmetic.dtype_of(EngineConfig(arithmetic="triton")) is torch.bfloat16
    assert arithmetic.dtype_of(EngineConfig(arithmetic="triton", dtype="float32")) is torch.float32
    assert arithmetic.dtype_of(EngineConfig()) is torch.float32


def test_what_c_cannot_compute_is_refused_where_it_was_asked_for(tmp_path: Any) -> None:
    path = write_checkpoint(tmp_path / "model")
    config = EngineConfig(dtype="float16", arithmetic="native", num_threads=1)
    with pytest.raises(ValueError, match=r"arithmetic is 'native'.*weights are torch\.float16"):
        Engine.from_pretrained(path, config)


def test_an_unknown_arithmetic_is_refused() -> None:
    with pytest.raises(ValueError, match="arithmetic is 'abacus'"):
        EngineConfig(arithmetic="abacus")  # type: ignore[arg-type]


def test_a_head_that_fills_no_vector_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("disconnect_watch.engine._math.LANES", 12)
    assert NativeDecoder.reason_against(tiny_model()) == "head_dim is 16, not a multiple of 12"
    assert decoder_of(make_engine()) == "TorchDecoder"
