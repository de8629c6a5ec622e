"""Requests that are given a time: cancelled when it is over, whatever they are doing."""

import math
from dataclasses import replace
from typing import Any

import pytest

from disconnect_watch.engine import Engine, Outcome, RequestOutput, SamplingParams
from disconnect_watch.engine.cancel_scan import MAX_OLD_DEADLINES
from disconnect_watch.token import CancelToken, Reason
from tests.support.engine import make_engine, run_to_end

LONG = [(13 * index + 3) % 256 for index in range(50)]
PARAMS = SamplingParams(max_tokens=60, ignore_eos=True)


class FakeClock:
    """Nanoseconds that pass when told to."""

    def __init__(self) -> None:
        self.now_ns = 5_000_000_000

    def __call__(self) -> int:
        return self.now_ns

    def advance(self, seconds: float) -> None:
        self.now_ns += int(seconds * 1e9)


def make(**config: Any) -> tuple[Engine, FakeClock]:
    engine = make_engine(**config)
    clock = engine.clock = FakeClock()
    return engine, clock


def outcome_of(outputs: list[RequestOutput]) -> Outcome:
    outcome = outputs[-1].outcome
    assert outcome is not None
    return outcome


def test_a_request_runs_until_its_time_is_over_and_no_longer() -> None:
    engine, clock = make()
    engine.add_request(LONG, PARAMS, request_id="a", time_limit=2.0)
    engine.step()
    clock.advance(1.999)
    assert len(engine.step()) == 1
    clock.advance(0.001)
    outcome = outcome_of(engine.step())
    assert (outcome.kind, outcome.reason, outcome.phase) == ("cancelled", Reason.DEADLINE, "decode")
    assert outcome.num_generated_tokens == 2
    assert engine.block_owners == set()
    engine.check_integrity()


def test_who_waits_past_his_time_never_takes_a_place() -> None:
    engine, clock = make(max_num_seqs=1)
    engine.add_request(LONG, PARAMS, request_id="runs")
    engine.add_request(LONG, PARAMS, request_id="waits", time_limit=1.0)
    engine.add_request(LONG, PARAMS, request_id="late", time_limit=0)
    engine.step()
    assert [record.aborted for record in engine.step_log] == [("late",)]
    clock.advance(1)
    outputs = {output.request_id: output for output in engine.step()}
    waits = outputs["waits"].outcome
    assert waits is not None
    assert (waits.reason, waits.phase, waits.num_blocks_freed) == (Reason.DEADLINE, "waiting", 0)
    assert engine.step_log[-1].scheduled == {"runs": 1}


def test_a_prefill_stops_at_the_layer_at_which_its_time_is_over() -> None:
    engine, clock = make()
    engine.add_request(LONG, PARAMS, request_id="a", time_limit=1.0)
    engine.layer_hook = lambda _, layer: clock.advance(2 if layer == 1 else 0)
    outcome = outcome_of(engine.step())
    assert (outcome.reason, outcome.phase) == (Reason.DEADLINE, "prefill")
    assert engine.step_log[-1].layer_tokens == (50,)


def test_whoever_leaves_first_gives_the_reason() -> None:
    engine, clock = make()
    token = CancelToken()
    engine.add_request(LONG, PARAMS, request_id="left", cancel=token, time_limit=1.0)
    engine.add_request(LONG, PARAMS, request_id="aborted", time_limit=1.0)
    engine.step()
    token.cancel(Reason.FIN)
    assert engine.abort("aborted").outcome == "cancelled"
    clock.advance(1)
    outcomes = {output.request_id: output.outcome for output in engine.step()}
    assert outcomes["aborted"] is not None
    assert outcomes["aborted"].reason is Reason.ABORTED
    assert outcomes["left"] is not None
    assert outcomes["left"].reason is Reason.FIN


def test_an_abort_of_who_is_out_of_time_finds_it_cancelled() -> None:
    engine, clock = make()
    engine.add_request(LONG, PARAMS, request_id="a", time_limit=1.0)
    engine.step()
    clock.advance(1)
    outcome_of(engine.step())
    assert engine.abort("a").outcome == "already_cancelled"
    assert run_to_end(engine) == {}


def test_deadlines_of_those_who_end_long_before_are_not_kept() -> None:
    engine, clock = make()
    short = SamplingParams(max_tokens=1, ignore_eos=True)
    engine.add_request(LONG, PARAMS, request_id="stays", time_limit=2.0)
    for index in range(210):
        engine.add_request([1], short, request_id=str(index), time_limit=3600.0)
        if index % 7 == 6:
            engine.step()
    assert len(engine._scan._deadlines) < 100
    clock.advance(2)
    outcomes = {output.request_id: output.outcome for output in engine.step()}
    assert outcomes["stays"] is not None
    assert outcomes["stays"].reason is Reason.DEADLINE


def test_the_deadline_of_answers_outlives_the_first_of_them() -> None:
    """Symptom: a request whose first answer had ended ran on when its time was over."""
    engine, clock = make()
    answers = SamplingParams(n=2, max_tokens=60, temperature=1.0, seed=7, ignore_eos=True)
    engine.add_request(LONG, answers, request_id="alone")
    first_output = run_to_end(engine)["alone"][0]
    assert first_output.index == 0
    stops = replace(answers, stop_token_ids=first_output.token_ids)
    first = engine.add_request(LONG, stops, request_id="stays", time_limit=2.0)
    while first.status != "ended":
        engine.step()
    # So many deadlines of others pass away that room is made among them.
    short = SamplingParams(max_tokens=1, ignore_eos=True)
    for index in range(MAX_OLD_DEADLINES + 3):
        engine.add_request([1], short, request_id=str(index), time_limit=3600.0)
    while engine.stats().num_waiting + engine.stats().num_running > 1:
        engine.step()
    assert len(engine._scan._deadlines) < MAX_OLD_DEADLINES
    assert first.outcome is None
    clock.advance(2)
    [output] = engine.step()
    assert output.outcome is not None
    assert output.outcome.reason is Reason.DEADLINE


@pytest.mark.parametrize("time_limit", [-1, math.nan, math.inf])
def test_a_time_that_is_none_is_refused(time_limit: float) -> None:
    with pytest.raises(ValueError, match="it must be in"):
        make_engine().add_request(LONG, PARAMS, request_id="a", time_limit=time_limit)


@pytest.mark.parametrize("priority", ["high", 1.5, True, 2**63, -(2**63) - 1])
def test_a_priority_that_is_none_is_refused(priority: Any) -> None:
    with pytest.raises(ValueError, match=r"priority is .*, it must be (an integer|in)"):
        make_engine().add_request(LONG, PARAMS, request_id="a", priority=priority)
