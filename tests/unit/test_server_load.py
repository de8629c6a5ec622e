"""``endpoint-load-metrics``: how full an engine is, for who asks."""

import json

import pytest

from tests.support.backends import ScriptedBackend
from tests.support.serve import post_json

ACTIONS = ("generate", "generate_stream")


async def header_of(action: str, asked: str | None) -> str | None:
    headers = {} if asked is None else {"endpoint-load-metrics-format": asked}
    answer = await post_json(
        ScriptedBackend("a"),
        f"/v2/models/script/{action}",
        {"text_input": "x"},
        headers=headers,
    )
    assert answer.status_code == 200
    found: str | None = answer.headers.get("endpoint-load-metrics")
    return found


@pytest.mark.asyncio
@pytest.mark.parametrize("action", ACTIONS)
async def test_who_asks_is_told_in_the_form_that_was_asked_for(action: str) -> None:
    text = await header_of(action, "TEXT")
    assert text == (
        "TEXT named_metrics.kv_cache_utilization=0.0, named_metrics.num_requests_waiting=0"
    )
    word, _, document = (await header_of(action, "json") or "").partition(" ")
    assert word == "JSON"
    assert json.loads(document) == {
        "named_metrics": {"kv_cache_utilization": 0.0, "num_requests_waiting": 0}
    }


@pytest.mark.asyncio
@pytest.mark.parametrize("asked", [None, "", "xml"])
async def test_nobody_else_is(asked: str | None) -> None:
    for action in ACTIONS:
        assert await header_of(action, asked) is None
