"""The comparison's parts: what it counts, that it runs, and that its picture is of its results."""

import asyncio
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from bench import side_by_side, sides_plot
from bench._sides_measure import LEAVES, Looker, load, ready
from bench._sides_peers import LEAVE_STEPS, PEERS, STAY_STEPS, Peer
from bench._sides_work import PLACES, Work
from tests.support.net import PATIENCE
from tests.unit.test_bench import assert_schema

SVG = "{http://www.w3.org/2000/svg}"


def peer(name: str) -> Peer:
    (found,) = (peer for peer in PEERS if peer.name == name)
    return found


def test_only_so_many_take_their_steps_at_a_time() -> None:
    async def main() -> None:
        work = Work()
        over = asyncio.Event()

        async def is_over() -> bool:
            await over.wait()
            return True

        tasks = [asyncio.create_task(work.run(5, is_over)) for _ in range(PLACES)]
        await asyncio.sleep(0)
        waits = asyncio.create_task(work.run(1))
        await asyncio.sleep(0)
        assert work.counts() == {"running": PLACES + 1, "steps": 0}
        over.set()
        assert await asyncio.gather(*tasks) == [False] * PLACES
        assert await waits
        assert work.counts() == {"running": 0, "steps": 1}

    asyncio.run(main())


def test_cancelled_work_gives_its_place_back() -> None:
    async def main() -> None:
        work = Work()
        tasks = [asyncio.create_task(work.run(10**9)) for _ in range(PLACES)]
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert work.num_running == 0
        assert await work.run(1)

    asyncio.run(main())


@pytest.mark.slow
def test_work_is_done_for_who_left_where_nobody_looks_and_only_there() -> None:
    async def main(peer: Peer, *, until_all_is_done: bool) -> float:
        with peer.serve() as served:
            assert (served.stay_units, served.leave_units) == (STAY_STEPS, LEAVE_STEPS)
            await ready(served)
            found = await load(served, num_stay=2, num_leave=4, seed=1, leaves=LEAVES[:1])
            assert found.num_failed == 0
            looker = Looker(served)
            async with asyncio.timeout(PATIENCE):
                num_units = -1.0
                while until_all_is_done and num_units < 2 * STAY_STEPS + 4 * LEAVE_STEPS:
                    num_units = (await looker.counts()).num_units
                    await asyncio.sleep(0.01)
            looker.close()
        return found.wasted

    asyncio.run(main(peer("FastAPI on uvicorn, nobody looks"), until_all_is_done=True))
    assert asyncio.run(main(peer("FastAPI on uvicorn, ours"), until_all_is_done=False)) < 1.0


@pytest.mark.slow
def test_comparison_runs_and_leaves_out_what_is_not_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = Peer("none", peer("aiohttp, ours").serve, why_not=lambda: "it is not made")
    config = side_by_side.Config(num_leaves=1, num_rounds=1, num_stay=2, num_leave=2)
    report = side_by_side.run(config, (peer("aiohttp, ours"), missing))
    assert_schema(report.to_json())
    names = {row.name for row in report.rows}
    assert {f"aiohttp, ours: noticed, {way}" for way in LEAVES} <= names
    assert "aiohttp, ours: answers, half leave" in names
    assert report.notes[-1] == "none: not measured, it is not made"
    report.write(tmp_path / "results.json")
    results = json.loads((tmp_path / "results.json").read_text())
    assert sides_plot.names_of(results) == ["aiohttp, ours"]
    image = ElementTree.fromstring(sides_plot.draw(results))
    assert len(list(image.iter(f"{SVG}rect"))) == 1


def test_picture_is_of_the_results() -> None:
    results = json.loads(sides_plot.RESULTS.read_text())
    assert sides_plot.IMAGE.read_text() == sides_plot.draw(results)
    assert {peer.name for peer in PEERS} >= set(sides_plot.names_of(results))


def test_plot_command_writes_the_picture(tmp_path: Path) -> None:
    sides_plot.main(["--out", str(tmp_path / "img" / "plot.svg")])
    assert (tmp_path / "img" / "plot.svg").read_text() == sides_plot.IMAGE.read_text()
