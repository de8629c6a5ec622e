"""Each way to end a request, in each state that it can be in: gone, silent, acked, and harmless.

The table: where the request is when it is hit, and what hits it. A neighbour runs through all of
it, and must get the tokens that he would get alone.
"""

from collections.abc import Callable
from typing import Any

import pytest

from disconnect_watch.engine import Engine, Outcome, RequestOutput, SamplingParams
from disconnect_watch.engine.request import Request
from disconnect_watch.engine.runner import ModelRunner
from disconnect_watch.token import CancelToken, Reason
from tests.support.engine import (
    collect,
    dense_greedy,
    make_engine,
    run_to_end,
    tiny_model,
    tokens_of,
)

NEIGHBOUR = [(31 * index + 5) % 256 for index in range(9)]
PROMPT = [(13 * index + 3) % 256 for index in range(50)]


class Scene:
    """An engine, its clock, and the request that is to be hit."""

    def __init__(self, **config: Any) -> None:
        self.engine = make_engine(**config)
        self.now_ns = 1_000_000_000
        self.engine.clock = lambda: self.now_ns
        self.token = CancelToken()
        self.outputs: dict[str, list[RequestOutput]] = {}
        self.outcomes: list[tuple[str, Outcome]] = []
        self.engine.on_outcome = lambda name, outcome: self.outcomes.append((name, outcome))

    def submit(self, *, num_tokens: int = 20, n: int = 1) -> Request:
        self.request = self.engine.add_request(
            PROMPT,
            SamplingParams(max_tokens=num_tokens, ignore_eos=True, n=n),
            request_id="hit",
            cancel=self.token,
            time_limit=1.0,
        )
        return self.request

    def submit_neighbour(self, num_tokens: int = 30) -> None:
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
        self.engine.add_request(NEIGHBOUR, params, request_id="neighbour")

    def step(self, num_steps: int = 1) -> None:
        for _ in range(num_steps):
            collect(self.engine.step(), self.outputs)
            self.engine.check_integrity()


def queued() -> Scene:
    scene = Scene(max_num_seqs=1)
    scene.submit_neighbour()
    scene.submit()
    scene.step(2)
    assert scene.request.status == "waiting"
    return scene


def never_seen_by_a_step() -> Scene:
    scene = Scene()
    scene.submit_neighbour()
    scene.submit()
    return scene


def waiting_for_blocks() -> Scene:
    scene = Scene(num_blocks=14, max_model_len=56)
    scene.submit_neighbour()
    scene.submit(num_tokens=5)
    scene.step(2)
    assert (scene.request.status, scene.engine.stats().num_running) == ("waiting", 1)
    return scene


def between_chunks() -> Scene:
    scene = Scene(max_num_batched_tokens=16)
    scene.submit_neighbour()
    scene.submit()
    scene.step(2)
    assert (scene.request.phase, 0 < scene.request.num_computed_tokens < 50) == ("prefill", True)
    return scene


def in_decode() -> Scene:
    scene = Scene()
    scene.submit_neighbour()
    scene.submit()
    scene.step(4)
    assert scene.request.phase == "decode"
    return scene


def preempted() -> Scene:
    scene = Scene(num_blocks=19, max_model_len=76)
    scene.submit_neighbour(60)
    scene.submit()
    for _ in range(40):
        scene.step()
        if scene.engine.stats().num_preemptions:
            break
    assert scene.request.status == "waiting"
    assert scene.request.num_generated_tokens > 0
    return scene


def one_answer_ended_and_one_waiting() -> Scene:
    scene = Scene(max_num_seqs=2)
    scene.submit_neighbour()
    scene.submit(num_tokens=2, n=3)
    scene.step(3)
    assert [s.status for s in scene.request.siblings] == ["ended", "running", "waiting"]
    return scene


def all_answers_queued() -> Scene:
    scene = Scene(max_num_seqs=1)
    scene.submit_neighbour()
    scene.submit(n=3)
    scene.step(2)
    assert [s.status for s in scene.request.siblings] == ["waiting"] * 3
    return scene


def answers_behind_the_first_that_reads_the_prompt() -> Scene:
    scene = Scene(max_num_batched_tokens=16)
    scene.submit_neighbour()
    scene.submit(n=3)
    scene.step(2)
    assert [s.phase for s in scene.request.siblings] == ["prefill", "waiting", "waiting"]
    return scene


def all_answers_in_decode() -> Scene:
    scene = Scene()
    scene.submit_neighbour()
    scene.submit(n=3)
    scene.step(5)
    assert [s.phase for s in scene.request.siblings] == ["decode"] * 3
    return scene


def one_answer_preempted() -> Scene:
    scene = Scene(num_blocks=26, max_model_len=76)
    scene.submit_neighbour(60)
    scene.submit(num_tokens=24, n=2)
    for _ in range(60):
        scene.step()
        if scene.engine.stats().num_preemptions:
            break
    assert sorted(s.status for s in scene.request.siblings) == ["running", "waiting"]
    assert all(s.num_generated_tokens for s in scene.request.siblings)
    return scene


def by_token(scene: Scene) -> Reason:
    scene.token.cancel(Reason.RESET)
    return Reason.RESET


def by_id(scene: Scene) -> Reason:
    result = scene.engine.abort("hit")
    assert result.outcome == "cancelled"
    assert result.latency_ns > 0
    # Acked: the effect is there before any step.
    assert not {s.key for s in scene.request.siblings} & scene.engine.block_owners
    return Reason.ABORTED


def by_mark(scene: Scene) -> Reason:
    assert scene.request.mark_cancelled(Reason.OWNER_CLOSED)
    return Reason.OWNER_CLOSED


def by_deadline(scene: Scene) -> Reason:
    scene.now_ns += 1_000_000_000
    return Reason.DEADLINE


STATES = [
    queued,
    never_seen_by_a_step,
    waiting_for_blocks,
    between_chunks,
    in_decode,
    preempted,
    one_answer_ended_and_one_waiting,
    all_answers_queued,
    answers_behind_the_first_that_reads_the_prompt,
    all_answers_in_decode,
    one_answer_preempted,
]
CAUSES = [by_token, by_id, by_mark, by_deadline]


@pytest.mark.parametrize("cause", CAUSES)
@pytest.mark.parametrize("state", STATES)
def test_a_request_that_is_hit_is_gone_and_nobody_else(
    state: Callable[[], Scene], cause: Callable[[Scene], Reason]
) -> None:
    scene = state()
    num_told = len(scene.outputs.get("hit", []))
    reason = cause(scene)
    scene.step()
    assert not {s.key for s in scene.request.siblings} & scene.engine.block_owners
    [last] = scene.outputs["hit"][num_told:]
    assert (last.token_ids, last.text_delta) == ((), "")
    outcome = last.outcome
    assert outcome is not None
    assert (outcome.kind, outcome.reason) == ("cancelled", reason)
    assert [told for told in scene.outcomes if told[0] == "hit"] == [("hit", outcome)]
    # Whatever comes now comes too late, and is counted.
    num_stale = scene.engine.stats().num_stale_events
    scene.token.cancel(Reason.FIN)
    scene.request.mark_cancelled(Reason.ABORTED)
    assert scene.engine.abort("hit").outcome == "already_cancelled"
    assert scene.engine.finish_abort(scene.request, is_first=False).outcome == "already_cancelled"
    assert scene.engine.stats().num_stale_events == num_stale + 2
    scene.outputs["neighbour"] = scene.outputs.get("neighbour", [])
    for name, outputs in run_to_end(scene.engine).items():
        scene.outputs[name] += outputs
    tokens = tokens_of(scene.outputs["neighbour"])
    assert tokens == dense_greedy(tiny_model(), NEIGHBOUR, len(tokens))
    assert scene.outputs["neighbour"][-1].outcome is not None
    assert len(scene.outcomes) == 2
    stats = scene.engine.stats()
    assert stats.num_blocks_available == stats.num_blocks


@pytest.mark.parametrize("cause", [by_token, by_mark, by_deadline])
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_request_that_is_hit_in_its_last_step_has_not_finished(
    cause: Callable[[Scene], Reason], layer: int
) -> None:
    scene = Scene()
    scene.submit_neighbour()
    scene.submit(num_tokens=3)
    scene.step(2)
    reasons: list[Reason] = []
    scene.engine.layer_hook = lambda _, at: reasons.append(cause(scene)) if at == layer else None
    scene.step()
    outcome = scene.request.outcome
    assert outcome is not None
    assert (outcome.kind, outcome.reason) == ("cancelled", reasons[0])
    assert (outcome.num_generated_tokens, outcome.num_wasted_tokens) == (2, 1)


@pytest.mark.parametrize("cause", [by_token, by_mark, by_deadline])
def test_a_request_that_has_finished_stays_finished(cause: Callable[[Scene], Reason]) -> None:
    scene = Scene()
    scene.submit(num_tokens=2)
    scene.step(2)
    cause(scene)
    assert scene.engine.step() == []
    assert scene.engine.abort("hit").outcome == "already_finished"
    assert scene.engine.stats().outcomes == {("finished", None): 1}


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("cause", [by_token, by_mark, by_deadline])
def test_what_has_finished_keeps_its_blocks_apart_whatever_comes_until_its_step_is_acknowledged(
    monkeypatch: pytest.MonkeyPatch, cause: Callable[[Scene], Reason], n: int
) -> None:
    """As with a device, which is at work behind the host."""
    scene = Scene()
    acked = 0
    monkeypatch.setattr(ModelRunner, "acked_step", property(lambda runner: acked))
    scene.submit_neighbour()
    scene.submit(num_tokens=2, n=n)
    scene.step(4)
    assert scene.outputs["hit"][-1].outcome is not None
    num_retained = scene.engine.stats().num_blocks_retained
    assert num_retained >= len(PROMPT) // 4
    cause(scene)
    for _ in range(2):
        assert scene.engine.abort("hit").outcome == "already_finished"
        scene.step()
        assert scene.engine.stats().num_blocks_retained == num_retained
    assert [told for told in scene.outcomes if told[0] == "hit"][1:] == []
    acked = 4
    scene.step()
    assert scene.engine.stats().num_blocks_retained == 0
    acked = 1000
    run_to_end(scene.engine)
    stats = scene.engine.stats()
    assert stats.num_blocks_available == stats.num_blocks


def test_all_that_is_known_ends_at_a_shutdown_whatever_it_does() -> None:
    scene = Scene(max_num_seqs=3, max_num_batched_tokens=16)
    scene.submit_neighbour()
    scene.submit(n=4)
    scene.step(2)
    outputs = scene.engine.cancel_all(Reason.SHUTDOWN)
    reasons = {output.request_id: output.outcome for output in outputs}
    assert [outcome and outcome.reason for outcome in reasons.values()] == [Reason.SHUTDOWN] * 2
    assert scene.engine.cancel_all(Reason.SHUTDOWN) == []
    assert not scene.engine.has_work
    stats = scene.engine.stats()
    assert stats.num_blocks_available == stats.num_blocks


def test_an_id_that_was_never_heard_of_is_no_error() -> None:
    engine: Engine = make_engine()
    assert engine.abort("nobody").outcome == "not_found"
    assert engine.stats().num_stale_events == 0
