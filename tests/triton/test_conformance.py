"""Every captured request is answered as Triton did, or differently for a reason."""

import pytest

from tests.support.command import Process
from tests.triton.conformance import ON_PURPOSE, cases, replay

pytestmark = pytest.mark.timeout(240)  # a dozen processes that load numpy


@pytest.mark.slow
def test_captured_requests_are_answered_as_triton_did(server: Process) -> None:
    results = [replay(name, server) for name in cases()]
    assert [result for result in results if result.kind == "different"] == []
    # A reason without a difference would hide the next one.
    assert {result.name for result in results if result.kind == "on purpose"} == set(ON_PURPOSE)
