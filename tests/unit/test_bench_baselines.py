"""The benchmarks beside other ways of noticing, at every scale, and their picture."""

import asyncio
import json
import resource
import socket
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from bench import baselines, plot, scaling
from bench._epoll_thread import EpollThread
from bench._leaver import Leaver
from bench._uvicorn_ways import LISTEN, Endpoint, Way, poll_every, serve
from bench.baselines import PIPELINED, PLAIN, UVICORN_WAYS, WAYS
from tests.unit.test_bench import RESULTS_DIR, assert_schema

SVG = "{http://www.w3.org/2000/svg}"


def test_python_epoll_thread_says_when_it_woke() -> None:
    async def watch(thread: EpollThread) -> tuple[int, int]:
        ours, theirs = socket.socketpair()
        with ours:
            woken = thread.add(ours.fileno())
            theirs.send(b"x")
            sent_ns = time.monotonic_ns()
            theirs.close()
            woken_ns = await asyncio.wait_for(woken, 40)
            thread.remove(ours.fileno())
        return sent_ns, woken_ns

    with EpollThread() as thread:
        sent_ns, woken_ns = asyncio.run(watch(thread))
        thread.close()
    assert sent_ns < woken_ns < time.monotonic_ns()


async def leave(endpoint: Endpoint, leaver: Leaver, way: Way, *, num_requests: int) -> int | None:
    """Whether and when ``way`` notices a client that leaves behind so many requests."""
    endpoint.expect(way)
    leaver.connect_to(endpoint.port)
    leaver.request()
    await endpoint.begun()
    for _ in range(num_requests - 1):
        leaver.request()
    leaver.order_close(delay=0.001, settle=0)
    # A way that notices has the time of the test's limit; one that does not, a moment.
    noticed_ns = await endpoint.noticed_ns(10 if num_requests == 1 else 0.1)
    leaver.closed_ns()
    await endpoint.end()
    return noticed_ns


@pytest.mark.parametrize("way", [LISTEN, poll_every(0.001)], ids=["receive", "poll"])
def test_way_under_uvicorn_notices_a_plain_close_and_none_behind_a_request(way: Way) -> None:
    async def main(leaver: Leaver) -> list[int | None]:
        async with serve(is_watched=False) as endpoint:
            return [await leave(endpoint, leaver, way, num_requests=n) for n in (1, 2, 1)]

    with Leaver() as leaver:
        first, behind, again = asyncio.run(main(leaver))
    assert first is not None
    assert behind is None
    assert again is not None


def test_receive_under_our_protocol_notices_a_close_behind_a_request() -> None:
    async def main(leaver: Leaver) -> int | None:
        async with serve(is_watched=True) as endpoint:
            endpoint.expect(LISTEN)
            leaver.connect_to(endpoint.port)
            leaver.request()
            await endpoint.begun()
            leaver.request()
            leaver.order_close(delay=0.001, settle=0)
            noticed_ns = await endpoint.noticed_ns(10)
            leaver.closed_ns()
            return noticed_ns

    with Leaver() as leaver:
        assert asyncio.run(main(leaver)) is not None


@pytest.mark.slow
def test_baselines_run_and_say_who_never_notices(tmp_path: Path) -> None:
    path = tmp_path / "baselines.json"
    baselines.run(baselines.Config(2, 1, give_up=0.25)).write(path)
    results = json.loads(path.read_text())
    assert_schema(results)
    rows = {row["name"]: row for row in results["rows"]}
    for who in WAYS:
        assert rows[f"noticed: {who}, {PLAIN}"]["median"] == 100
        assert rows[f"{who}, {PLAIN}"]["curve"]
        is_blind = who in UVICORN_WAYS
        assert rows[f"noticed: {who}, {PIPELINED}"]["median"] == (0 if is_blind else 100)
        assert (f"{who}, {PIPELINED}" in rows) == (not is_blind)
    assert f"receive() listener, {PIPELINED}: noticed 0 of 1 within 250 ms" in results["notes"]
    assert_draws(results)


@pytest.mark.slow
def test_scaling_runs_and_request_bytes_wake_nobody(tmp_path: Path) -> None:
    path = tmp_path / "scaling.json"
    scaling.run(scaling.Config((5, 40), num_rounds=2, num_leaves=2, num_bursts=3)).write(path)
    results = json.loads(path.read_text())
    assert_schema(results)
    rows = {row["name"]: row for row in results["rows"]}
    for level in (5, 40):
        assert rows[f"close to flag, {level} attached"]["count"] == 4
        wakeups = rows[f"wake-ups by {level * 3} requests"]
        assert (wakeups["median"], wakeups["p75"]) == (0, 0)


def test_scaling_leaves_out_what_the_limit_of_open_files_forbids(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 300))
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: None)
    report = scaling.run(scaling.Config((5, 1000), num_rounds=1, num_leaves=1, num_bursts=1))
    assert report.notes == ["1000 connections were left out: the limit is 300 open files"]
    assert not [row for row in report.rows if "1000" in row.name]


def assert_draws(results: dict[str, Any]) -> None:
    image = plot.draw(results)
    assert len(image) < 60_000
    assert "nan" not in image
    root = ElementTree.fromstring(image)
    texts = [text.text for text in root.iter(f"{SVG}text")]
    for who in WAYS:
        assert texts.count(who) == 1
    lines = [line.get("points", "") for line in root.iter(f"{SVG}polyline")]
    assert len(lines) == 3 * len(WAYS)  # two panels and the legend
    for line in lines:
        points = [tuple(map(float, point.split(","))) for point in line.split()]
        assert points == sorted(points, key=lambda point: (point[0], -point[1]))


def test_picture_is_that_of_the_committed_results() -> None:
    results = json.loads((RESULTS_DIR / "baselines.json").read_text())
    assert_draws(results)
    assert plot.IMAGE.read_text() == plot.draw(results)


def test_picture_rises_to_the_share_that_noticed_and_stays_down_where_nobody_did() -> None:
    results = json.loads((RESULTS_DIR / "baselines.json").read_text())
    lines = list(ElementTree.fromstring(plot.draw(results)).iter(f"{SVG}polyline"))
    ends = [line.get("points", "").split(",")[-1] for line in lines[: 2 * len(WAYS)]]
    top, floor = f"{plot.PANEL_TOP:g}", f"{plot.PANEL_TOP + plot.PANEL_HEIGHT:g}"
    behind = [floor if who in UVICORN_WAYS else top for who in WAYS]
    assert ends == [top] * len(WAYS) + behind


def test_plot_command_writes_the_picture(tmp_path: Path) -> None:
    plot.main(["--out", str(tmp_path / "img" / "latency.svg")])
    assert (tmp_path / "img" / "latency.svg").read_text() == plot.IMAGE.read_text()
