"""The dw_* metrics: there from the start, read at the scrape, right."""

import re
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from disconnect_watch.engine import EngineStats, Outcome, SamplingParams
from disconnect_watch.server import Frontend, Metrics, create_metrics_app
from disconnect_watch.server.access import RequestRecord
from disconnect_watch.server.frontend import FrontendStats
from disconnect_watch.server.generation import Generation
from disconnect_watch.token import CancelToken, Reason
from disconnect_watch.watcher import Watcher, WatcherStats
from tests.support.backends import ScriptedBackend
from tests.support.serve import metrics_of, request_app

NAMES = {
    "dw_connections",
    "dw_watches_armed",
    "dw_signals",
    "dw_requests_total",
    "dw_requests",
    "dw_detect_seconds",
    "dw_cancel_to_drop_seconds",
    "dw_cancel_to_free_seconds",
    "dw_kv_blocks",
    "dw_tokens",
    "dw_stale_events",
    "dw_blind_connections",
    "dw_unacked_cancels",
    "dw_overdue_cancels",
    "dw_late_cancels",
}


@pytest.fixture
def watcher_stats() -> WatcherStats:
    with Watcher(driver="loop") as watcher:
        return watcher.stats()


def samples(metrics: Metrics) -> dict[str, float]:
    """Every sample by its name and labels as the text format writes them."""
    found = {}
    for line in metrics.render().decode().splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            found[name] = float(value)
    return found


def test_every_combination_of_labels_is_there_as_zero_from_the_start() -> None:
    found = samples(metrics_of(Frontend(ScriptedBackend())))
    for outcome, phases in {
        "finished": ["decode"],
        "cancelled": ["waiting", "prefill", "decode"],
        "failed": ["waiting", "prefill", "decode"],
    }.items():
        for phase in phases:
            assert found[f'dw_requests_total{{outcome="{outcome}",phase="{phase}"}}'] == 0.0
    for reason in Reason:
        assert found[f'dw_signals_total{{source="{reason}"}}'] == 0.0
    for kind in ("prompt", "generated", "wasted"):
        assert found[f'dw_tokens_total{{kind="{kind}"}}'] == 0.0
    for state in ("used", "cached", "free", "retained"):
        assert f'dw_kv_blocks{{state="{state}"}}' in found
    for state in ("waiting", "running"):
        assert found[f'dw_requests{{state="{state}"}}'] == 0.0
    for name in ("dw_connections", "dw_watches_armed", "dw_blind_connections"):
        assert found[name] == 0.0
    assert found["dw_stale_events_total"] == found["dw_unacked_cancels"] == 0.0
    for name in ("dw_detect_seconds", "dw_cancel_to_drop_seconds", "dw_cancel_to_free_seconds"):
        assert found[f"{name}_count"] == 0.0


def test_the_text_is_valid_and_names_each_metric_with_its_help() -> None:
    text = metrics_of(Frontend(ScriptedBackend())).render().decode()
    names = set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE))
    # A counter's type line carries its _total in this format.
    assert {name.removesuffix("_total") for name in names} - {
        f"{name}_created" for name in NAMES
    } == {name.removesuffix("_total") for name in NAMES}
    assert all(family.documentation for family in text_string_to_metric_families(text))
    assert "first look" in text


def test_counters_are_the_engines_own(watcher_stats: WatcherStats) -> None:
    stats: EngineStats = replace(
        ScriptedBackend().stats(),
        num_waiting=3,
        num_running=2,
        num_blocks_used=5,
        num_blocks_free=1,
        num_blocks_retained=2,
        num_prompt_tokens=70,
        num_generated_tokens=30,
        num_wasted_tokens=1,
        stale_events={"abort": 1, "token": 2},
        outcomes={("finished", None): 4, ("cancelled", "decode"): 2, ("failed", "prefill"): 1},
    )
    watched = replace(
        watcher_stats,
        num_connections=9,
        num_armed=5,
        num_blind=1,
        num_stale_events=6,
        num_signals={**watcher_stats.num_signals, Reason.RESET: 8},
    )
    found = samples(
        Metrics(
            engine=lambda: stats,
            watcher=lambda: watched,
            frontend=lambda: FrontendStats(0, 7, False, 2, 5),
        )
    )
    assert found['dw_requests_total{outcome="finished",phase="decode"}'] == 4
    assert found['dw_requests_total{outcome="cancelled",phase="decode"}'] == 2
    assert found['dw_requests_total{outcome="cancelled",phase="waiting"}'] == 0
    assert found['dw_requests_total{outcome="failed",phase="prefill"}'] == 1
    assert found['dw_requests{state="waiting"}'] == 3
    assert found['dw_requests{state="running"}'] == 2
    assert found['dw_kv_blocks{state="used"}'] == 5
    assert found['dw_kv_blocks{state="free"}'] == 1
    assert found['dw_kv_blocks{state="retained"}'] == 2
    assert found['dw_tokens_total{kind="prompt"}'] == 70
    assert found['dw_tokens_total{kind="generated"}'] == 30
    assert found['dw_tokens_total{kind="wasted"}'] == 1
    assert found["dw_connections"] == 9
    assert found["dw_watches_armed"] == 5
    assert found["dw_blind_connections"] == 1
    assert found["dw_stale_events_total"] == 6 + 3
    assert found['dw_signals_total{source="reset"}'] == 8
    assert found["dw_unacked_cancels"] == 7
    assert (found["dw_overdue_cancels"], found["dw_late_cancels_total"]) == (2, 5)


def test_outcomes_and_signals_of_all_kinds_of_work_are_summed(watcher_stats: WatcherStats) -> None:
    stats = replace(ScriptedBackend().stats(), outcomes={("cancelled", "waiting"): 2})
    watched = replace(
        watcher_stats, num_signals={**watcher_stats.num_signals, Reason.FIN: 4, Reason.DEADLINE: 1}
    )
    for engine, num in ((lambda: stats, 5), (None, 3)):
        found = samples(
            Metrics(
                engine=engine,
                watcher=lambda: watched,
                frontend=lambda: FrontendStats(0, 0, False),
                outcomes=lambda: {("cancelled", "waiting"): 3, ("finished", None): 1},
                signals=lambda: {Reason.DEADLINE: 2, Reason.ABORTED: 1},
            )
        )
        assert found['dw_requests_total{outcome="cancelled",phase="waiting"}'] == num
        assert found['dw_requests_total{outcome="finished",phase="decode"}'] == 1
        sources = {source: found[f'dw_signals_total{{source="{source}"}}'] for source in Reason}
        assert {source: count for source, count in sources.items() if count} == {
            Reason.FIN: 4,
            Reason.DEADLINE: 3,
            Reason.ABORTED: 1,
        }


def test_a_cancelled_request_is_timed_once_in_each_histogram() -> None:
    metrics = metrics_of(Frontend(ScriptedBackend()))
    metrics.observe(
        "r",
        Outcome(
            "cancelled",
            reason=Reason.FIN,
            phase="decode",
            flag_at_ns=1_000_000_000,
            seen_at_ns=1_002_000_000,
            dropped_at_ns=1_030_000_000,
            freed_at_ns=1_040_000_000,
        ),
    )
    found = samples(metrics)
    assert found["dw_detect_seconds_sum"] == pytest.approx(0.002)
    assert found["dw_cancel_to_drop_seconds_sum"] == pytest.approx(0.03)
    assert found["dw_cancel_to_free_seconds_sum"] == pytest.approx(0.04)
    assert found["dw_detect_seconds_count"] == 1
    assert found['dw_detect_seconds_bucket{le="0.001"}'] == 0
    assert found['dw_detect_seconds_bucket{le="0.0025"}'] == 1


@pytest.mark.parametrize("kind", ["finished", "failed"])
def test_a_request_that_was_not_cancelled_is_not_timed(kind: str) -> None:
    metrics = metrics_of(Frontend(ScriptedBackend()))
    metrics.observe("r", Outcome(kind))  # type: ignore[arg-type]
    assert samples(metrics)["dw_detect_seconds_count"] == 0


def test_two_applications_do_not_mix() -> None:
    one, other = (metrics_of(Frontend(ScriptedBackend())) for _ in range(2))
    one.observe("r", Outcome("cancelled", flag_at_ns=1, seen_at_ns=2))
    assert samples(other)["dw_detect_seconds_count"] == 0


@pytest.mark.asyncio
async def test_a_cancel_without_an_outcome_yet_is_unacked() -> None:
    backend = ScriptedBackend("a", "b")
    frontend = Frontend(backend)
    metrics = metrics_of(frontend)
    assert samples(metrics)["dw_unacked_cancels"] == 0
    record = RequestRecord(CancelToken())
    generation = Generation(prompt="x", params=SamplingParams())
    with await frontend.submit(backend, generation, record):
        assert samples(metrics)["dw_unacked_cancels"] == 0
        record.token.cancel()
        assert samples(metrics)["dw_unacked_cancels"] == 1
    assert samples(metrics)["dw_unacked_cancels"] == 0


@pytest.mark.asyncio
async def test_metrics_are_on_the_main_port_too() -> None:
    response = await request_app(ScriptedBackend(), "GET", "/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert b"dw_requests_total" in response.content


def test_the_metrics_port_has_an_application_of_its_own() -> None:
    assert create_metrics_app(metrics_of(Frontend(ScriptedBackend()))) is not None
