"""The step loop when clients leave: out at once, blocks back, one outcome, nobody else touched.

Judged by the step log and the ledger. ``layer_hook`` runs right before the flags are read for a
layer, so a test can let a client leave in the middle of a forward.
"""

import time
from collections.abc import Callable

import pytest

from disconnect_watch.engine import Engine, Outcome, RequestOutput, SamplingParams
from disconnect_watch.token import CancelToken, Reason
from tests.support.engine import (
    collect,
    dense_greedy,
    make_engine,
    run_to_end,
    tiny_model,
    tokens_of,
)

LONG = [(13 * index + 3) % 256 for index in range(50)]
SHORT = [7, 8, 9]


def params(num_tokens: int = 60) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, ignore_eos=True)


def submit(engine: Engine, request_id: str, prompt: list[int], num_tokens: int = 60) -> CancelToken:
    token = CancelToken()
    engine.add_request(prompt, params(num_tokens), request_id=request_id, cancel=token)
    return token


def outcome_of(outputs: list[RequestOutput]) -> Outcome:
    [outcome] = [output.outcome for output in outputs if output.outcome is not None]
    return outcome


def at_layer(engine: Engine, step: int, layer: int, act: Callable[[], object]) -> None:
    """Do something once, right before the flags are read for that layer of that step."""

    def hook(at_step: int, at_layer: int) -> None:
        if (at_step, at_layer) == (step, layer):
            act()

    engine.layer_hook = hook


def collect_all(engine: Engine, outputs: dict[str, list[RequestOutput]]) -> None:
    """Run to the end, and add what comes to what came."""
    for request_id, more in run_to_end(engine).items():
        outputs.setdefault(request_id, []).extend(more)


def test_a_client_that_leaves_the_queue_is_never_scheduled() -> None:
    engine = make_engine(max_num_seqs=1)
    submit(engine, "runs", SHORT)
    token = submit(engine, "waits", SHORT)
    engine.step()
    token.cancel(Reason.FIN)
    outputs = run_to_end(engine)
    outcome = outcome_of(outputs["waits"])
    assert (outcome.kind, outcome.reason, outcome.phase) == ("cancelled", Reason.FIN, "waiting")
    assert (outcome.num_generated_tokens, outcome.num_blocks_freed) == (0, 0)
    assert engine.step_log[1].aborted == ("waits",)
    assert not any("waits" in record.scheduled for record in engine.step_log)


def test_a_client_that_left_before_admission_ends_in_the_queue() -> None:
    engine = make_engine()
    token = CancelToken()
    token.cancel(Reason.RESET)
    engine.add_request(SHORT, params(), request_id="a", cancel=token)
    [output] = engine.step()
    assert output.outcome is not None
    assert (output.outcome.reason, output.outcome.phase) == (Reason.RESET, "waiting")
    assert engine.step_log[0].scheduled == {}
    assert not engine.has_work


def test_a_client_that_leaves_mid_stream_is_out_at_the_next_step() -> None:
    engine = make_engine()
    token = submit(engine, "a", SHORT)
    for _ in range(5):
        engine.step()
    assert engine.block_owners == {"a"}
    token.cancel(Reason.FIN)
    [output] = engine.step()
    engine.check_integrity()
    assert output.text_delta == ""
    assert output.token_ids == ()
    outcome = output.outcome
    assert outcome is not None
    assert (outcome.kind, outcome.reason, outcome.phase) == ("cancelled", Reason.FIN, "decode")
    assert (outcome.num_generated_tokens, outcome.num_wasted_tokens) == (5, 0)
    assert outcome.num_blocks_freed == 2
    assert engine.step_log[-1].scheduled == {}
    assert engine.step_log[-1].freed_block_ids == (0, 1)
    assert engine.block_ledger == {}
    times = [
        token.cancelled_at_ns,
        outcome.seen_at_ns,
        outcome.dropped_at_ns,
        outcome.freed_at_ns,
        time.monotonic_ns(),
    ]
    assert outcome.flag_at_ns == token.cancelled_at_ns
    assert times == sorted(times)


def test_the_token_of_the_step_in_which_a_client_leaves_is_withheld() -> None:
    engine = make_engine()
    stays = submit(engine, "stays", LONG, 5)
    token = submit(engine, "leaves", SHORT)
    outputs: dict[str, list[RequestOutput]] = {}
    collect(engine.step(), outputs)
    at_layer(engine, 2, 2, lambda: token.cancel(Reason.FIN))
    collect(engine.step(), outputs)
    engine.check_integrity()
    outcome = outcome_of(outputs["leaves"])
    assert (outcome.phase, outcome.num_generated_tokens) == ("decode", 1)
    assert outcome.num_wasted_tokens == engine.stats().num_wasted_tokens == 1
    assert engine.step_log[-1].withheld == ("leaves",)
    assert engine.step_log[-1].layer_tokens == (2, 2, 2)
    collect_all(engine, outputs)
    assert tokens_of(outputs["stays"]) == dense_greedy(tiny_model(), LONG, 5)
    assert not stays.cancelled


def test_a_flag_seen_when_a_token_is_ready_silences_it_though_it_is_the_last() -> None:
    engine = make_engine()
    token = submit(engine, "a", SHORT, 2)
    submit(engine, "other", SHORT, 9)
    engine.step()
    at_layer(engine, 2, 2, lambda: token.cancel(Reason.FIN))
    outputs = {output.request_id: output for output in engine.step()}
    outcome = outputs["a"].outcome
    assert outcome is not None
    assert outcome.kind == "cancelled"
    assert outputs["a"].token_ids == ()


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_client_that_leaves_mid_prefill_is_not_computed_by_the_next_layer(layer: int) -> None:
    engine = make_engine(max_num_batched_tokens=128)
    submit(engine, "stays", LONG[:20], 8)
    token = submit(engine, "leaves", LONG)
    at_layer(engine, 1, layer, lambda: token.cancel(Reason.FIN))
    outputs: dict[str, list[RequestOutput]] = {}
    collect(engine.step(), outputs)
    engine.check_integrity()
    [record] = engine.step_log
    assert record.scheduled == {"stays": 20, "leaves": 50}
    assert record.layer_tokens == (70,) * layer + (20,) * (3 - layer)
    assert record.dropped == {"leaves": layer}
    assert len(record.freed_block_ids) == 13
    assert engine.block_owners == {"stays"}
    outcome = outcome_of(outputs["leaves"])
    assert (outcome.phase, outcome.num_wasted_tokens) == ("prefill", 0)
    assert outcome.flag_at_ns <= outcome.seen_at_ns <= outcome.dropped_at_ns <= outcome.freed_at_ns
    collect_all(engine, outputs)
    assert tokens_of(outputs["stays"]) == dense_greedy(tiny_model(), LONG[:20], 8)


def test_who_left_before_a_forward_failed_is_not_computed_when_it_is_repeated(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = make_engine(max_num_batched_tokens=128)
    submit(engine, "stays", LONG[:20], 1)
    submit(engine, "too", LONG[20:40], 1)
    token = submit(engine, "leaves", LONG)
    has_failed: list[bool] = []

    def hook(_: int, layer: int) -> None:
        if layer == 1:
            token.cancel(Reason.FIN)
        if layer == 2 and not has_failed:
            has_failed.append(True)
            raise RuntimeError("once")

    engine.layer_hook = hook
    outputs: dict[str, list[RequestOutput]] = {}
    collect(engine.step(), outputs)
    engine.check_integrity()
    [record] = engine.step_log
    assert record.dropped == {"leaves": 1}
    assert record.layer_tokens == (90, 40, *(20,) * 3, *(20,) * 3)
    assert outcome_of(outputs["leaves"]).kind == "cancelled"
    assert tokens_of(outputs["stays"]) == dense_greedy(tiny_model(), LONG[:20], 1)
    assert tokens_of(outputs["too"]) == dense_greedy(tiny_model(), LONG[20:40], 1)
    assert caplog.records == []


def test_a_forward_ends_at_once_when_all_its_rows_have_left() -> None:
    engine = make_engine()
    prefill = submit(engine, "prefill", LONG)
    at_layer(engine, 1, 1, lambda: prefill.cancel(Reason.FIN))
    [output] = engine.step()
    assert output.outcome is not None
    assert engine.step_log[-1].layer_tokens == (50,)
    assert engine.block_ledger == {}


def test_a_decode_batch_that_dies_whole_computes_no_further_layer_and_wastes_nothing() -> None:
    engine = make_engine()
    tokens = [submit(engine, name, SHORT) for name in "ab"]
    engine.step()
    at_layer(engine, 2, 2, lambda: [token.cancel(Reason.FIN) for token in tokens])
    outputs = engine.step()
    engine.check_integrity()
    assert engine.step_log[-1].layer_tokens == (2, 2)
    assert engine.step_log[-1].dropped == {"a": 2, "b": 2}
    assert [output.outcome.num_wasted_tokens for output in outputs if output.outcome] == [0, 0]


def test_blocks_of_a_dropped_row_are_apart_until_the_forward_has_returned() -> None:
    engine = make_engine(max_num_batched_tokens=128)
    submit(engine, "stays", SHORT)
    token = submit(engine, "leaves", LONG)
    seen: list[tuple[int, int, int]] = []
    times: list[int] = []

    def hook(_: int, layer: int) -> None:
        if layer == 1:
            token.cancel(Reason.FIN)
        engine.check_integrity()
        stats = engine.stats()
        seen.append((stats.num_blocks_used, stats.num_blocks_retained, stats.num_blocks_free))
        times.append(time.monotonic_ns())

    engine.layer_hook = hook
    outcome = outcome_of([output for output in engine.step() if output.request_id == "leaves"])
    # It is out of the batch before the next layer, and its blocks are free after the last.
    assert outcome.flag_at_ns <= outcome.seen_at_ns <= outcome.dropped_at_ns <= times[2]
    assert times[2] <= outcome.freed_at_ns
    assert seen == [(14, 0, 50), (14, 0, 50), (1, 13, 50)]
    stats = engine.stats()
    assert (stats.num_blocks_used, stats.num_blocks_retained, stats.num_blocks_free) == (1, 0, 63)


def test_a_client_that_leaves_between_chunks_is_not_scheduled_for_the_next() -> None:
    engine = make_engine(max_num_batched_tokens=16)
    token = submit(engine, "a", LONG)
    engine.step()
    engine.step()
    assert engine.step_log[-1].scheduled == {"a": 16}
    token.cancel(Reason.FIN)
    [output] = engine.step()
    assert output.outcome is not None
    assert (output.outcome.phase, output.outcome.num_blocks_freed) == ("prefill", 13)
    assert engine.step_log[-1].scheduled == {}


def test_a_chunk_that_was_cut_counts_nothing_as_computed() -> None:
    engine = make_engine(max_num_batched_tokens=16)
    token = submit(engine, "a", LONG)
    engine.step()
    request = engine.find("a")
    assert request is not None
    assert request.num_computed_tokens == 16
    at_layer(engine, 2, 1, lambda: token.cancel(Reason.FIN))
    engine.step()
    assert request.num_computed_tokens == 16
    assert request.outcome is not None


def test_a_preempted_client_that_leaves_gives_back_what_it_has_left() -> None:
    engine = make_engine(num_blocks=32)
    submit(engine, "old", LONG, 70)
    token = submit(engine, "young", LONG, 70)
    while not engine.stats().num_preemptions:
        engine.step()
    request = engine.find("young")
    assert request is not None
    assert request.phase == "waiting"
    token.cancel(Reason.FIN)
    outputs = run_to_end(engine)
    outcome = outcome_of(outputs["young"])
    assert (outcome.phase, outcome.num_blocks_freed) == ("waiting", 0)
    assert outcome_of(outputs["old"]).kind == "finished"


def test_a_thousand_who_leave_at_once_are_gone_in_one_step() -> None:
    engine = make_engine(max_queue=1000)
    token = CancelToken()
    for index in range(1000):
        engine.add_request(SHORT, params(), request_id=str(index), cancel=token)
    engine.step()
    token.cancel(Reason.SHUTDOWN)
    outputs = engine.step()
    engine.check_integrity()
    assert len({output.request_id for output in outputs}) == 1000
    assert engine.stats().outcomes == {("cancelled", "waiting"): 992, ("cancelled", "decode"): 8}
    assert engine.stats().num_blocks_available == 64
    assert not engine.has_work


def test_the_place_of_one_who_left_goes_to_the_next_in_the_same_step() -> None:
    engine = make_engine(max_num_seqs=1)
    token = submit(engine, "first", LONG)
    submit(engine, "next", SHORT)
    engine.step()
    token.cancel(Reason.FIN)
    engine.step()
    assert engine.step_log[-1].aborted == ("first",)
    assert engine.step_log[-1].scheduled == {"next": 3}


def test_a_cancelled_token_is_acknowledged_with_the_step_that_freed_the_blocks() -> None:
    engine = make_engine()
    early, late, stays = (submit(engine, name, SHORT, 9) for name in ("early", "late", "stays"))
    early.cancel(Reason.FIN)
    engine.abort("early")
    engine.step()
    engine.step()
    late.cancel(Reason.FIN)
    assert late.acked == 0
    engine.step()
    assert (early.acked, late.acked) == (1, 3)
    # A token that is live, or that fires when its request has ended, is owed nothing.
    engine.abort("stays")
    assert stays.acked == 0
    stays.cancel(Reason.FIN)
    run_to_end(engine)
    assert stays.acked == 0


def test_abort_by_id_returns_after_its_effect() -> None:
    engine = make_engine()
    submit(engine, "a", LONG)
    engine.step()
    result = engine.abort("a")
    assert (result.outcome, result.phase, result.num_blocks_freed) == ("cancelled", "decode", 13)
    assert result.latency_ns > 0
    assert engine.block_ledger == {}
    [output] = engine.step()
    assert output.outcome is not None
    assert output.outcome.reason is Reason.ABORTED
    assert engine.step_log[-1].freed_block_ids == tuple(range(13))


def test_abort_of_anything_else_says_what_it_found() -> None:
    engine = make_engine()
    submit(engine, "done", SHORT, 1)
    submit(engine, "left", SHORT).cancel(Reason.FIN)
    submit(engine, "1", SHORT)
    submit(engine, "10", SHORT, 9)
    engine.step()
    assert engine.abort("done").outcome == "already_finished"
    assert engine.abort("left").outcome == "already_cancelled"
    assert engine.abort("never").outcome == "not_found"
    assert engine.abort("1").outcome == "cancelled"
    assert engine.abort("1").outcome == "already_cancelled"
    assert engine.stats().num_stale_events == 3
    assert outcome_of(run_to_end(engine)["10"]).kind == "finished"


def test_an_abort_that_comes_after_the_flag_was_set_is_not_the_cause() -> None:
    engine = make_engine()
    submit(engine, "a", SHORT).cancel(Reason.FIN)
    assert engine.abort("a").outcome == "already_cancelled"
    assert outcome_of(engine.step()).reason is Reason.FIN


def test_an_abort_leaves_the_token_to_those_who_share_it() -> None:
    engine = make_engine()
    token = CancelToken()
    for name in "ab":
        engine.add_request(SHORT, params(4), request_id=name, cancel=token)
    engine.step()
    engine.abort("a")
    assert not token.cancelled
    assert outcome_of(run_to_end(engine)["b"]).kind == "finished"


def test_an_old_cancel_does_not_hit_the_next_request_of_that_id() -> None:
    engine = make_engine()
    token = submit(engine, "a", SHORT)
    engine.step()
    old = engine.find("a")
    assert old is not None
    engine.abort("a")
    engine.step()
    submit(engine, "a", SHORT, 4)
    token.cancel(Reason.FIN)
    old.mark_cancelled(Reason.ABORTED)
    assert engine.finish_abort(old, is_first=False).outcome == "already_cancelled"
    outputs = run_to_end(engine)["a"]
    assert outcome_of(outputs).kind == "finished"
    assert tokens_of(outputs) == dense_greedy(tiny_model(), SHORT, 4)


def test_a_cancel_that_comes_after_the_end_changes_nothing() -> None:
    engine = make_engine()
    token = submit(engine, "a", SHORT, 2)
    outputs = run_to_end(engine)["a"]
    token.cancel(Reason.FIN)
    assert engine.step() == []
    assert outcome_of(outputs).kind == "finished"
    assert engine.stats().outcomes == {("finished", None): 1}


def test_abort_from_within_a_step_is_refused_and_harms_nothing() -> None:
    engine = make_engine()
    submit(engine, "a", SHORT, 3)
    caught: list[RuntimeError] = []

    def hook(step: int, layer: int) -> None:
        if (step, layer) == (1, 1):
            try:
                engine.abort("a")
            except RuntimeError as error:
                caught.append(error)

    engine.layer_hook = hook
    engine.step()
    engine.check_integrity()
    assert "from within a step" in str(caught[0])
    # The mark stays: the request ends with that step, in the ordinary way.
    assert engine.stats().outcomes == {("cancelled", "prefill"): 1}
    assert engine.block_ledger == {}


def test_cancel_all_ends_waiting_and_running_alike() -> None:
    engine = make_engine(max_num_seqs=2)
    for index in range(5):
        submit(engine, str(index), SHORT)
    engine.step()
    outputs = engine.cancel_all(Reason.SHUTDOWN)
    assert [output.outcome.reason for output in outputs if output.outcome] == [Reason.SHUTDOWN] * 5
    assert not engine.has_work
    assert engine.stats().num_blocks_available == 64


def test_the_earlier_of_token_and_abort_gives_the_reason() -> None:
    engine = make_engine()
    token = submit(engine, "a", SHORT)
    request = engine.find("a")
    assert request is not None
    assert request.mark_cancelled(Reason.ABORTED)
    assert not request.mark_cancelled(Reason.SHUTDOWN)
    token.cancel(Reason.FIN)
    assert outcome_of(engine.step()).reason is Reason.ABORTED


def test_a_storm_of_leaves_changes_no_token_of_those_who_stay() -> None:
    engine = make_engine(num_blocks=48, max_num_batched_tokens=24)
    prompts = {f"stays{i}": [(i * 31 + j * 7) % 256 for j in range(4 + 9 * i)] for i in range(4)}
    for name, prompt in prompts.items():
        submit(engine, name, prompt, 16)
    outputs: dict[str, list[RequestOutput]] = {}
    leavers: list[CancelToken] = []

    def hook(step: int, layer: int) -> None:
        if (step + layer) % 3 == 0 and leavers:
            leavers.pop(0).cancel(Reason.FIN)

    engine.layer_hook = hook
    for index in range(40):
        leavers.append(submit(engine, f"leaves{index}", LONG[: 1 + index % 50]))
        collect(engine.step(), outputs)
        engine.check_integrity()
    for token in leavers:
        token.cancel(Reason.FIN)
    collect_all(engine, outputs)
    for name, prompt in prompts.items():
        assert tokens_of(outputs[name]) == dense_greedy(tiny_model(), prompt, 16), name
    assert sum(engine.stats().outcomes.values()) == 44
    assert all(outcome_of(out).num_wasted_tokens <= 1 for out in outputs.values())


def test_full_blocks_computed_before_a_leave_spare_the_next_client_their_prefill() -> None:
    engine = make_engine(max_num_batched_tokens=16)
    token = submit(engine, "leaves", LONG)
    engine.step()
    engine.step()
    at_layer(engine, 3, 1, lambda: token.cancel(Reason.FIN))
    outcome = outcome_of(engine.step())
    assert outcome.num_blocks_freed == 13
    stats = engine.stats()
    # Two chunks were computed whole; of the third, which was cut, no block can be found.
    assert (stats.num_blocks_cached, stats.num_blocks_free) == (8, 56)
    engine.layer_hook = None
    submit(engine, "again", LONG, 4)
    engine.step()
    assert engine.step_log[-1].scheduled == {"again": 16}
    outputs = run_to_end(engine)["again"]
    assert outcome_of(outputs).num_cached_tokens == 32
    assert tokens_of(outputs) == dense_greedy(tiny_model(), LONG, 4)
