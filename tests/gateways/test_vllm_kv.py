"""vLLM as a prefill and a decode node: each way in which its blocks are let go of frees them.

The engine runs in the venv of ``.ci/vllm``, by ``tests/support/vllm_kv_run.py``, and so does a
decode node of ours; leases are as long as an hour, so that nothing is freed by luck.
"""

import json
from typing import Any

import pytest

from disconnect_watch.engine import DEFAULT_MODEL
from tests.support.venvs import python_of, run_module

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    out = run_module(python_of("vllm"), "tests.support.vllm_kv_run", DEFAULT_MODEL, timeout=300)
    result: dict[str, Any] = json.loads(out.splitlines()[-1])
    return result


def test_a_decode_node_pulls_the_very_bytes_and_they_are_freed(found: dict[str, Any]) -> None:
    # 200 tokens in blocks of 32.
    assert found["pulled"] == {"held": 7, "is_equal": True, "left": 0}


def test_a_release_in_band_frees_once(found: dict[str, Any]) -> None:
    assert found["released"] == {
        "outcomes": ["released", "already_released"],
        "left": 0,
        "pull": "unknown",
    }


def test_a_release_that_comes_before_the_request_frees_at_its_end(found: dict[str, Any]) -> None:
    assert found["early"] == {"left": 0}


def test_a_lease_that_runs_out_frees(found: dict[str, Any]) -> None:
    assert found["lapses"] == {"left": 0}


def test_what_is_aborted_or_not_for_others_is_not_retained(found: dict[str, Any]) -> None:
    assert found["others"] == {"left": 0, "params": None}


def test_who_decodes_by_a_ticket_answers_as_one_node_would(found: dict[str, Any]) -> None:
    decode = found["decode"]
    assert decode["is_same"]
    # 12 tokens of an answer, and all of the prompt or, of what was loaded, its last token.
    assert decode["computed"]["alone"] == 211
    assert decode["computed"]["second"] == 12
    assert decode["in_band"] == 3


def test_who_leaves_before_or_under_its_load_lets_go_in_band(found: dict[str, Any]) -> None:
    assert found["decode"]["left"] == 0
    assert found["released_by"] == {"in_band": 5, "abort": 1, "lease": 1}
