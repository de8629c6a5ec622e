"""A crowd on the model engine: everything that can happen has happened, and nothing is left."""

import pytest

from tests.stress.engine import crowd


@pytest.mark.slow
def test_twenty_thousand_random_operations_leave_nothing_behind() -> None:
    told = crowd(20_000, seed=1)
    assert all(
        told[what] > 0
        for what in (
            "finished",
            "cancelled",
            "failed",
            "preemptions",
            "cached tokens",
            "stale events",
            "wasted tokens",
        )
    )


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_a_million_random_operations_leave_nothing_behind() -> None:
    assert crowd(1_000_000, seed=2)["finished"] > 0
