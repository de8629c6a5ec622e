"""The soak and the demo, a little of each, on a real server."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.stress import demo, soak
from tests.stress.soak import RSS_SLACK, Held

HELD = Held(num_fds=20, num_threads=5, num_watched=1, num_armed=0, num_blocks=0, rss_bytes=1 << 30)


@pytest.mark.slow
def test_a_hundred_leaves_are_soaked_up(tmp_path: Path) -> None:
    assert soak.main(["--num", "100", "--json", str(tmp_path / "soak.json")]) == 0
    told = json.loads((tmp_path / "soak.json").read_text())
    assert told["holds"]
    assert told["num_left"] > 0
    assert told["failures"] == told["more"] == []
    assert told["after"]["num_blocks"] == 0


@pytest.mark.slow
def test_demo_writes_its_page(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert demo.main(["--seconds", "0.5", "--html", str(page)]) == 0
    assert "the server cancels" in page.read_text()


@pytest.mark.parametrize(
    "name", ["num_fds", "num_threads", "num_watched", "num_armed", "num_blocks"]
)
def test_one_thing_more_is_found(name: str) -> None:
    more = replace(HELD, **{name: getattr(HELD, name) + 1})
    assert more.more_than(HELD) == [name]
    assert HELD.more_than(more) == []


@pytest.mark.parametrize(("more", "found"), [(RSS_SLACK, []), (RSS_SLACK + 1, ["rss_bytes"])])
def test_memory_may_be_more_by_what_the_allocator_keeps(more: int, found: list[str]) -> None:
    assert replace(HELD, rss_bytes=HELD.rss_bytes + more).more_than(HELD) == found
