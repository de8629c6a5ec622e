"""What comes too late for a request, from whatever side: it is ignored, and it is counted.

Over a runner that computes nothing, and says what a test has it say.
"""

from collections.abc import Callable, Sequence

import pytest

from disconnect_watch.engine.config import EngineConfig
from disconnect_watch.engine.core import EngineCore
from disconnect_watch.engine.outcome import Drawn, RequestOutput, Sampled
from disconnect_watch.engine.params import SamplingParams
from disconnect_watch.engine.records import StaleEvent
from disconnect_watch.engine.request import Request
from disconnect_watch.engine.schedule import LayerCheck, ScheduledRow
from disconnect_watch.token import CancelToken, Reason
from tests.support.engine import engine_tokenizer

Say = Callable[[Sequence[ScheduledRow]], dict[str, Drawn]]


class Runner:
    """See ``schedule.Runner``."""

    def __init__(self) -> None:
        self.layer_tokens: list[int] = []
        self.acked_step = 0
        self.say: Say = lambda rows: {row.request.key: [Sampled(1)] for row in rows}

    def run(
        self, rows: Sequence[ScheduledRow], *, step: int, layer_check: LayerCheck
    ) -> dict[str, Drawn]:
        self.acked_step = step
        return self.say(rows)


def make_core() -> tuple[EngineCore, Runner]:
    runner = Runner()
    config = EngineConfig(block_size=4, max_num_seqs=4, max_num_batched_tokens=16)
    core = EngineCore(runner, engine_tokenizer(), config=config, num_blocks=16, max_model_len=32)
    return core, runner


def submit(core: EngineCore, name: str, *, n: int = 1) -> CancelToken:
    token = CancelToken()
    params = SamplingParams(max_tokens=20, ignore_eos=True, n=n)
    request = Request(name, [5, 6, 7], params=params, seed=1, cancel=token)
    request.fan_out(n)
    core.admit(request)
    return token


def stale(core: EngineCore) -> dict[StaleEvent, int]:
    return dict(core.stats().stale_events)


def ends(outputs: Sequence[RequestOutput]) -> list[tuple[str, str]]:
    return [(each.request_id, each.outcome.kind) for each in outputs if each.outcome]


@pytest.mark.parametrize(("late", "kind"), [(Sampled(9), "token"), (ValueError("no"), "error")])
def test_a_result_of_one_who_went_with_a_sibling(late: Sampled | Exception, kind: str) -> None:
    core, runner = make_core()
    submit(core, "a", n=2)
    core.step()
    core.step()
    runner.say = lambda rows: {"a": [ValueError("bad")], "a#1": [late]}
    assert ends(core.step()) == [("a", "failed")]
    assert stale(core) == {kind: 1}
    assert core.stats().outcomes == {("failed", "decode"): 1}
    core.check_integrity()


@pytest.mark.parametrize("late", [[Sampled(9)], [ValueError("no")], [Sampled(9), ValueError("no")]])
def test_a_result_of_one_who_ended_in_an_earlier_step(late: Drawn) -> None:
    core, runner = make_core()
    submit(core, "gone").cancel(Reason.FIN)
    submit(core, "stays")
    runner.say = lambda rows: {"stays": [Sampled(1)], "gone": late}
    outputs = core.step()
    assert ends(outputs) == [("gone", "cancelled")]
    assert [each.token_ids for each in outputs if each.request_id == "gone"] == [()]
    assert core.stats().num_stale_events == len(late)
    assert core.stats().num_generated_tokens == 1
    assert core.stats().num_wasted_tokens == 0


def test_an_ack_of_an_older_step_frees_nothing() -> None:
    core, runner = make_core()
    submit(core, "a")
    core.step()
    core.step()
    assert stale(core) == {}, "the same ack twice is none that is late"
    runner.acked_step = 1
    core.step()
    assert stale(core) == {"ack": 1}
    core.check_integrity()


def test_all_kinds_are_summed() -> None:
    core, runner = make_core()
    submit(core, "a")
    core.step()
    core.abort("a")
    core.abort("a")
    submit(core, "b")
    runner.say = lambda rows: {"b": [Sampled(1)], "a": [Sampled(2)]}
    core.step()
    assert stale(core) == {"abort": 1, "token": 1}
    assert core.stats().num_stale_events == 2
