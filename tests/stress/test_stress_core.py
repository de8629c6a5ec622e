"""A short run of ``make stress-core``."""

import pytest

from tests.stress.owner_first import race
from tests.stress.reuse import storm
from tests.support.loops import LOOP_KINDS


@pytest.mark.slow
@pytest.mark.parametrize("loop_kind", LOOP_KINDS)
def test_no_end_is_lost_whoever_is_told_first(loop_kind: str) -> None:
    tally = race(loop_kind, 1000, seed=7)
    assert tally.is_clean, tally
    assert tally.trials == 1000
    assert 800 < tally.left < 1000


@pytest.mark.slow
def test_no_event_reaches_whoever_got_the_fd_number() -> None:
    tally = storm(2000, seed=7)
    assert tally.is_clean, tally
    assert tally.trials == 2000
    assert 400 < tally.left < 1000
