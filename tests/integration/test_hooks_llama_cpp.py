"""llama.cpp in the venv of ``.ci/llama-cpp``, asked by a client that leaves within a prompt."""

import json
from typing import Any

import pytest

from tests.support.venvs import python_of, run_module


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("gguf")
    out = run_module(python_of("llama-cpp"), "tests.support.llama_cpp_run", directory, timeout=200)
    result: dict[str, Any] = json.loads(out.splitlines()[-1])
    return result


def test_a_prompt_ends_within_a_layer(found: dict[str, Any]) -> None:
    assert found["leaves"] == "aborted"
    assert found["tokens_of_who_leaves"] == 0
    # One look a node of the graph; one more by the block itself, and one as it raises.
    assert found["looks_of_who_leaves"] < 25 < found["looks_of_who_stays"]


def test_a_client_that_stays_gets_what_it_did(found: dict[str, Any]) -> None:
    assert found["stays"] == found["plain"]


def test_the_next_request_is_whole(found: dict[str, Any]) -> None:
    assert found["after"] == found["plain"]


def test_nothing_is_begun_for_a_client_that_has_left(found: dict[str, Any]) -> None:
    assert found["gone_before"] == "aborted"


def test_another_failure_is_told_though_the_client_has_left(found: dict[str, Any]) -> None:
    assert found["other_error"] == "RuntimeError: llama_decode returned 1"


def test_the_page_runs_as_written(found: dict[str, Any]) -> None:
    assert found["answer_of_the_page"] == "text_completion"
