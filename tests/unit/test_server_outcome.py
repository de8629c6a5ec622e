"""What becomes of a request that did not finish, and of one that is several."""

import dataclasses

import pytest

from disconnect_watch.engine import Outcome
from disconnect_watch.server.errors import CancelledByPeer, FailedError
from disconnect_watch.server.outcome import error_of, joined
from disconnect_watch.token import Reason

FINISHED = Outcome("finished", finish_reason="stop", num_prompt_tokens=3, num_generated_tokens=5)
CANCELLED = Outcome(
    "cancelled",
    reason=Reason.FIN,
    phase="prefill",
    num_prompt_tokens=2,
    num_wasted_tokens=1,
    num_blocks_freed=4,
    flag_at_ns=10,
    freed_at_ns=30,
)
FAILED = Outcome("failed", phase="decode", error="it broke")


@pytest.mark.parametrize("turned", [False, True])
def test_several_have_finished_when_all_have(turned: bool) -> None:
    pair = (CANCELLED, FINISHED) if turned else (FINISHED, CANCELLED)
    outcome = joined(*pair)
    assert (outcome.kind, outcome.reason, outcome.phase) == ("cancelled", Reason.FIN, "prefill")
    assert (outcome.num_prompt_tokens, outcome.num_generated_tokens) == (5, 5)
    assert (outcome.num_blocks_freed, outcome.num_wasted_tokens) == (4, 1)
    assert (outcome.flag_at_ns, outcome.freed_at_ns) == (10, 30)
    assert joined(outcome, FAILED).error == "it broke"


def test_the_phase_of_several_is_that_of_the_furthest() -> None:
    later = dataclasses.replace(CANCELLED, phase="decode", freed_at_ns=50)
    assert joined(CANCELLED, later).phase == joined(later, CANCELLED).phase == "decode"
    assert joined(CANCELLED, later).freed_at_ns == 50


def test_who_left_is_told_from_what_failed() -> None:
    assert isinstance(error_of(CANCELLED), CancelledByPeer)
    assert isinstance(error_of(FAILED), FailedError)
