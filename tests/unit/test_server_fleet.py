"""The parts of a fleet, each by itself; ``test_serve_frontends`` has the processes."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from disconnect_watch.server.fleet import supervisor
from disconnect_watch.server.fleet.channel import Channel, ChannelError
from disconnect_watch.server.fleet.hub import Hub
from disconnect_watch.server.fleet.links import Links
from disconnect_watch.server.fleet.merge import MetricSum
from disconnect_watch.server.frontend import ABORT_BURST
from disconnect_watch.server.openai.responses.sqlite_store import SqliteStore
from disconnect_watch.server.openai.responses.store import Entry, StoreLimits


def rendered(count: int) -> str:
    """What a process that has counted so far says."""
    registry = CollectorRegistry()
    Counter("requests", "with a space", ["path"], registry=registry).labels("a b").inc(count)
    Gauge("busy", "now", registry=registry).set(count)
    histogram = Histogram("seconds", "long", buckets=(1.0, 2.0), registry=registry)
    for _ in range(count):
        histogram.observe(1.5)
    others = f'# HELP nv x\n# TYPE nv counter\nnv{{a="b"}} {count}\n'
    return generate_latest(registry).decode() + others


def values_of(text: bytes) -> dict[str, str]:
    lines = [line for line in text.decode().splitlines() if not line.startswith("#")]
    return {series: value for series, _, value in (line.rpartition(" ") for line in lines)}


def test_a_sum_has_each_series_once() -> None:
    total = MetricSum()
    total.add(rendered(1))
    total.add(rendered(2))
    found = values_of(total.render())
    assert found['requests_total{path="a b"}'] == "3.0"
    assert found["busy"] == "3.0"
    assert found['seconds_bucket{le="1.0"}'] == "0.0"
    assert found['seconds_bucket{le="2.0"}'] == found["seconds_count"] == "3.0"
    assert found["seconds_sum"] == "4.5"
    assert found['nv{a="b"}'] == "3"
    assert total.render().count(b"# TYPE requests_total counter") == 1


def test_when_counting_began_is_not_added_up() -> None:
    total = MetricSum()
    for began in (7.0, 5.0):
        total.add(f"# HELP a_created x\n# TYPE a_created gauge\na_created {began}\n")
    assert values_of(total.render()) == {"a_created": "5.0"}


def test_of_what_has_ended_only_what_it_counted_stays() -> None:
    total = MetricSum()
    total.add(rendered(2), only_counted=True)
    found = values_of(total.render())
    assert found['requests_total{path="a b"}'] == "2.0"
    assert "busy" not in found


def run(main: Callable[[], Awaitable[None]]) -> None:
    with asyncio.Runner() as runner:
        runner.run(main())  # type: ignore[arg-type]


def child(pid: int, text: str = "") -> Any:
    async def ask(name: str, *_: Any) -> Any:
        if not text:
            raise ChannelError("gone")
        return text

    return SimpleNamespace(
        pid=pid, index=pid, channel=SimpleNamespace(ask=ask), has_ended=asyncio.Event()
    )


def test_counters_do_not_fall_when_a_process_ends() -> None:
    async def main() -> None:
        children = [child(1, rendered(2)), child(2, rendered(3)), child(3)]
        hub = Hub(lambda: children, SqliteStore())
        for expected in ("5.0", "5.0"):
            found = values_of(await hub.answer(children[0], "metrics", []))
            assert found['requests_total{path="a b"}'] == expected
            if len(children) == 3:
                assert found["busy"] == "5.0"
                hub.forget(children.pop(0))
        assert found["busy"] == "3.0"
        await hub.close()

    run(main)


def test_cancels_are_limited_for_all_together() -> None:
    async def main() -> None:
        hub = Hub(list, SqliteStore())
        assert await hub.answer(child(1), "take", ["me", int(ABORT_BURST), 1.0]) is None
        refused = await hub.answer(child(2), "take", ["me", int(ABORT_BURST), 1.0])
        assert refused is not None
        assert "cancels are too many now" in refused[0]
        assert await hub.answer(child(2), "take", ["another", 1, 1.0]) is None
        await hub.close()

    run(main)


def test_a_response_is_abandoned_when_the_one_who_makes_it_has_ended() -> None:
    async def main() -> None:
        maker, other = child(1), child(2)
        hub = Hub(lambda: [maker, other], SqliteStore(limits=StoreLimits(max_count=1)))

        async def use(method: str, *arguments: Any) -> Any:
            return await hub.answer(maker, "store", [method, list(arguments)])

        entry = Entry("resp_1", "me", 1.0, None, b"{}")
        assert await use("create", asdict(entry)) == ["", None]
        assert await use("get", "resp_1") == ["", asdict(entry)]
        assert await use("running") == ["", ["resp_1"]]
        assert await use("stats") == ["", {"num_responses": 1, "num_bytes": 2}]
        assert (await use("create", {**asdict(entry), "response_id": "resp_2"}))[0] == (
            "StoreFullError"
        )
        hub.forget(other)
        assert await use("is_abandoned", "resp_1") == ["", False]
        hub.forget(maker)
        assert await use("is_abandoned", "resp_1") == ["", True]
        assert await use("finish", {**asdict(entry), "ended_at": 2.0}) == ["", True]
        assert await use("delete", "resp_1") == ["", True]
        await hub.close()

    run(main)


def test_a_channel_answers_and_tells_when_nobody_can() -> None:
    async def main() -> None:
        async def answer(name: str, body: list[Any]) -> Any:
            if name == "fail":
                raise RuntimeError("as it is")
            return [name, body]

        lost = asyncio.Event()
        ours, theirs = socket.socketpair()
        one = await Channel.open(ours, answer, lambda: None)
        other = await Channel.open(theirs, answer, lost.set)
        assert await one.ask("what", 1, b"x") == ["what", [1, b"x"]]
        with pytest.raises(ChannelError, match="RuntimeError: as it is"):
            await other.ask("fail")
        one.close()
        await lost.wait()
        with pytest.raises(ChannelError, match="gone"):
            await other.ask("what")
        other.close()

    run(main)


def test_who_waits_for_an_answer_hears_that_the_other_is_gone() -> None:
    async def main() -> None:
        asked = asyncio.Event()

        async def never(name: str, body: list[Any]) -> Any:
            asked.set()
            await asyncio.Event().wait()

        ours, theirs = socket.socketpair()
        one = await Channel.open(ours, never, lambda: None)
        other = await Channel.open(theirs, never, lambda: None)
        waits = asyncio.create_task(one.ask("what"))
        await asked.wait()
        other.close()
        with pytest.raises(ChannelError, match="is gone"):
            await waits

    run(main)


@pytest.mark.parametrize("is_drained_first", [False, True])
def test_flags_wait_for_the_engine_in_whichever_order_the_news_comes(
    is_drained_first: bool,
) -> None:
    # Symptom: slots of a killed frontend were never taken back, when the engine was the faster.
    links = Links()
    links.made(1)
    links.made(2)
    assert links.are_quiet()
    if is_drained_first:
        links.drained(1)
        links.orphaned(1)
    else:
        links.orphaned(1)
        assert not links.are_quiet()
        links.drained(1)
    assert links.are_quiet()
    links.orphaned(2)
    assert not links.are_quiet()
    links.engine_ended()
    assert links.are_quiet()


def test_a_process_that_cannot_be_started_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    class Started:
        """The child of a system that has no room for a process at first."""

        pid, is_ready = 1, False

        def __init__(self, *_: object, index: int, **__: object) -> None:
            tried.append(index)
            if len(tried) == 1:
                raise OSError("no room for a process")
            self.index = index

        async def open(self, _: object) -> None:
            pass

    async def run() -> None:
        monkeypatch.setattr(supervisor, "Child", Started)
        monkeypatch.setattr(supervisor, "FIRST_DELAY", 0.0)
        nothing = cast("Any", SimpleNamespace())
        parent = supervisor.Supervisor(nothing, {}, SqliteStore(), lambda: None)
        parent._born[0] = 0.0
        await parent._start_again(0)
        assert list(parent._children) == [0]
        parent._children.clear()
        await parent._hub.close()

    asyncio.run(run())
    assert tried == [0, 0]
