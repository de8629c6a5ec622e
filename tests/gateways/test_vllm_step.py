"""vLLM's engine with our looks in it: clients that leave as a layer of a step begins.

The engine runs in the venv of ``.ci/vllm``, by ``tests/support/vllm_run.py``, which has what each
scenario does; here is what must have come of it.
"""

import json
from typing import Any

import pytest

from disconnect_watch.engine import DEFAULT_MODEL
from tests.support.venvs import python_of, run_module

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    out = run_module(python_of("vllm"), "tests.support.vllm_run", DEFAULT_MODEL, timeout=300)
    result: dict[str, Any] = json.loads(out.splitlines()[-1])
    assert result["num_layers"] == 3
    return result


def test_a_prompt_that_nobody_waits_for_ends_within_a_layer(found: dict[str, Any]) -> None:
    alone = found["alone"]
    assert alone["layers"] == 2
    assert alone["reason"] == "abort"
    assert alone["held"] == 0


@pytest.mark.parametrize("scenario", ["alone", "abort_comes_within_the_step"])
def test_what_was_not_computed_is_in_no_cache(found: dict[str, Any], scenario: str) -> None:
    assert found[scenario]["layers"] == 2
    assert found[scenario]["after"] == found["long"]


def test_what_was_computed_stays_in_the_cache(found: dict[str, Any]) -> None:
    second = found["in_the_second_chunk"]
    assert second["layers"] == [3, 2]
    assert second["after"] == {"tokens": found["other"]["tokens"], "cached": 256}


def test_who_decodes_meanwhile_is_answered_the_same(found: dict[str, Any]) -> None:
    beside = found["beside_one_who_stays"]
    assert beside["layers"] == 2
    assert beside["reason"] == "abort"
    assert beside["stays"] == found["short"]["tokens"]


def test_who_found_his_beginning_in_the_step_computes_it_himself(found: dict[str, Any]) -> None:
    shared = found["with_the_same_beginning"]
    assert shared["layers"] == 2
    assert shared["stays"] == found["long"]["tokens"]


def test_a_step_is_not_given_up_where_more_would_be_lost(found: dict[str, Any]) -> None:
    little = found["too_little_to_give_up"]
    assert little["layers"] == 3
    assert little["reason"] == "abort"
    assert little["stays"] == found["long"]["tokens"]


def test_between_two_steps_nothing_is_computed_for_who_left(found: dict[str, Any]) -> None:
    assert found["between_two_steps"] == {
        "layers": 0,
        "reasons": ["abort", "abort"],
        "held": 0,
    }


def test_among_many_who_leave_no_answer_is_wrong(found: dict[str, Any]) -> None:
    assert found["at_random"] == {"wrong": 0}
