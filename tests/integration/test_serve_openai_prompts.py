"""Several prompts of one request that end before their answers are whole: all are told of, once."""

import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from disconnect_watch.token import Reason
from tests.support.net import wait_until
from tests.support.serve import Client, Serving, packaged_engine, serving_engine

ENDLESS: dict[str, Any] = {
    "model": "tiny",
    "prompt": ["The class", "A list", "x"],
    "max_tokens": 100_000,
    "ignore_eos": True,
}


@pytest.fixture
def serving(caplog: pytest.LogCaptureFixture) -> Iterator[Serving]:
    with (
        caplog.at_level(logging.INFO, "disconnect_watch.access"),
        serving_engine(packaged_engine()) as serving,
    ):
        yield serving
        wait_until(serving.is_idle)
        serving.engine.check_integrity()


def line_of(caplog: pytest.LogCaptureFixture) -> dict[str, Any]:
    """The access log's one line."""

    def lines() -> list[dict[str, Any]]:
        return [vars(each) for each in caplog.records if each.name == "disconnect_watch.access"]

    wait_until(lines)
    (line,) = lines()
    return line


def is_decoding_all(serving: Serving) -> bool:
    stats = serving.backend.stats()
    return stats.num_running == 3 and stats.num_generated_tokens > 9


@pytest.mark.parametrize("stream", [False, True])
def test_the_log_counts_all_prompts_of_a_client_that_leaves(
    serving: Serving, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    with Client(serving.port) as client:
        client.post("/v1/completions", {**ENDLESS, "stream": stream})
        wait_until(lambda: is_decoding_all(serving))
    line = line_of(caplog)
    wait_until(lambda: len(serving.outcomes) == 3)
    outcomes = [outcome for (outcome,) in serving.outcomes.values()]
    assert {(each.kind, each.reason in (Reason.FIN, Reason.RESET)) for each in outcomes} == {
        ("cancelled", True)
    }
    assert (line["outcome"], line["phase"]) == ("cancelled", "decode")
    assert line["tokens"] == sum(each.num_generated_tokens for each in outcomes)
    assert line["wasted"] == sum(each.num_wasted_tokens for each in outcomes)


def test_a_prompt_that_fails_ends_the_others_and_is_what_is_told(
    serving: Serving, caplog: pytest.LogCaptureFixture
) -> None:
    def spoil(scores: torch.Tensor) -> torch.Tensor:
        if len(scores) == 3:
            scores[1] = torch.nan
        return scores

    serving.engine._runner.logits_hook = spoil
    with Client(serving.port) as client:
        client.post("/v1/completions", ENDLESS)
        status, _, answer = client.read_response()
    assert status == 500
    assert json.loads(answer)["error"]["type"] == "server_error"
    line = line_of(caplog)
    assert (line["outcome"], line["status"]) == ("failed", 500)
    assert len(serving.outcomes) == 3, "the answer came before all had ended"
    outcomes = [outcome for (outcome,) in serving.outcomes.values()]
    assert sorted(outcome.kind for outcome in outcomes) == ["cancelled", "cancelled", "failed"]
    assert line["tokens"] == sum(outcome.num_generated_tokens for outcome in outcomes)
