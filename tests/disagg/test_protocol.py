"""Every state of the protocol, for two requests, whatever goes wrong at every step."""

import itertools

import pytest

from tests.disagg.explorer import explore
from tests.disagg.words import Faults

pytestmark = pytest.mark.slow

NAMES = ("crash", "lose", "twice", "lapse")


def test_nothing_is_stranded_whatever_goes_wrong_with_one_request() -> None:
    seen = explore(1, Faults(crash=1, lose=1, twice=1, leave=1, lapse=1))
    # What explores little finds little: a step that is not possible any more shows here.
    assert seen.num_states > 5000
    assert seen.num_steps > 4 * seen.num_states


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_stranded_whatever_goes_wrong_with_two_requests(name: str) -> None:
    # A client leaves, and something else goes wrong, each at every step.
    seen = explore(2, Faults(leave=1, **{name: 1}))
    assert seen.num_states > 1500


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("names", list(itertools.combinations(NAMES, 2)), ids="-".join)
def test_nothing_is_stranded_when_two_things_go_wrong(names: tuple[str, str]) -> None:
    explore(2, Faults(leave=2, **dict.fromkeys(names, 1)))
