"""The page in a real browser: somebody starts an answer, leaves it, and sees what came of it."""

import base64
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.chromium import Tab, browser
from tests.support.gate import slowed
from tests.support.net import wait_until
from tests.support.serve import Serving, packaged_engine, serving_engine
from tests.support.tools import path_of

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not path_of("chromium"), reason="chromium is not here: make test-programs"),
]

#: Whoever is at a phone, and whoever is at a desk.
SIZES = {"phone": (390, 844), "desk": (1280, 900)}


@pytest.fixture
def serving() -> Iterator[Serving]:
    with serving_engine(packaged_engine()) as serving:
        yield serving
        wait_until(serving.is_idle)


@pytest.fixture(params=SIZES)
def tab(request: pytest.FixtureRequest, serving: Serving) -> Iterator[Tab]:
    with browser() as running:
        tab = running.open_tab(f"http://127.0.0.1:{serving.port}/")
        width, height = SIZES[request.param]
        tab.resize(width, height)
        tab.wait_for("document.getElementById('link').textContent === 'live'")
        yield tab


def text(tab: Tab, name: str) -> str:
    found = tab.run(f"document.getElementById('{name}').textContent")
    assert isinstance(found, str)
    return found


def test_who_starts_an_answer_and_leaves_it_sees_the_engine_stop(
    serving: Serving, tab: Tab, request: pytest.FixtureRequest
) -> None:
    tab.wait_for("document.getElementById('model').value === 'tiny'")
    # By keyboard alone: the box, then Tab to the button.
    tab.run("document.getElementById('prompt').focus()")
    tab.press("Tab")
    with slowed(serving.engine):
        tab.press("Enter")
        tab.wait_for("document.getElementById('answer').textContent.length > 20")
        tab.wait_for("document.querySelectorAll('#requests li').length === 1")
        assert "(yours)" in text(tab, "requests")
        label = tab.run("document.getElementById('blocks').getAttribute('aria-label')")
        assert int(label.split()[0]) > 0, label
        assert tab.run("document.activeElement.id") == "leave"
        tab.press("Enter")
        tab.wait_for("document.querySelectorAll('#cancels tr').length === 1")
    ((_, (outcome,)),) = serving.outcomes.items()
    milliseconds = round((outcome.freed_at_ns - outcome.flag_at_ns) / 1e6, 3)
    row = text(tab, "cancels")
    # A browser closes with what it had not read, or without.
    assert f"(yours){outcome.reason}decode" in row
    assert row.endswith(f"{milliseconds:g} ms")
    tab.wait_for("document.getElementById('told').textContent.startsWith('You left; its blocks')")
    tab.wait_for("document.getElementById('cancelled').textContent === '1'")
    tab.wait_for("document.querySelectorAll('#requests li').length === 0")
    assert int(text(tab, "spared").replace(",", "")) > 0
    keep(tab, request)


def test_the_page_fits_and_says_what_it_shows(tab: Tab) -> None:
    assert tab.run("document.documentElement.scrollWidth <= innerWidth")
    # What is clicked is large enough for a finger.
    assert tab.run(
        "[...document.querySelectorAll('main button')].every((each) => each.offsetHeight >= 44)"
    )
    names = tab.accessible_names()
    for name in ("Try it", "Requests", "KV blocks", "Cancels", "Text to go on from", "Start"):
        assert name in names
    assert any("free" in name for name in names), "the map of blocks says nothing in words"


def keep(tab: Tab, request: pytest.FixtureRequest) -> None:
    """Keep a picture where one is asked for: ``pytest --screenshots docs/img``."""
    folder = request.config.getoption("--screenshots")
    picture = base64.b64decode(tab.screenshot())
    assert picture.startswith(b"\x89PNG")
    if folder:
        Path(folder, f"live-{request.node.callspec.id}.png").write_bytes(picture)
