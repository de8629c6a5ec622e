"""Pages of a browser that ask by fetch and by EventSource."""

import contextlib
import json
from collections.abc import Callable, Iterator

from tests.clients.chromium import Browser, Tab, browser
from tests.clients.visit import ENDED, Visit, case

#: What a page does to have a first piece of an answer, and goes on to read; or just to ask.
ASKS = {
    "fetch, no answer yet": """
        const controller = new AbortController();
        fetch(URL, {signal: controller.signal}).catch(() => {});
        window.stop_asking = () => controller.abort();
    """,
    "fetch": """
        const controller = new AbortController();
        const response = await fetch(URL, {signal: controller.signal});
        const reader = response.body.getReader();
        await reader.read();
        (async () => { while (!(await reader.read()).done); })().catch(() => {});
        window.stop_asking = () => controller.abort();
    """,
    "EventSource": """
        const source = new EventSource(URL);
        await new Promise((resolve) => { source.onmessage = resolve; });
        window.stop_asking = () => source.close();
    """,
}


@contextlib.contextmanager
def asking(visit: Visit, ask: str) -> Iterator[tuple[Browser, Tab]]:
    """A browser with a tab that reads a stream."""
    with browser() as running:
        tab = running.open_tab(f"{visit.base}/page")
        script = ASKS[ask].replace("URL", json.dumps(visit.url))
        tab.run(f"(async () => {{ {script} }})()")
        visit.call()
        yield running, tab


def _enter(ask: str, name: str, title: str, leave: Callable[[Visit, Browser, Tab], None]) -> None:
    def act(visit: Visit) -> None:
        with asking(visit, ask) as (running, tab):
            leave(visit, running, tab)
            visit.is_noticed(*ENDED)

    act.__name__ = f"{ask.lower().replace(',', '').replace(' ', '_')}_{name}"
    api, _, is_unanswered = ask.partition(", ")
    answer = "wait" if is_unanswered else "stream"
    case(f"Chromium, {api}", title, answer=answer, needs=("chromium",))(act)


for _ask in ASKS:
    _stop = "`source.close()`" if _ask == "EventSource" else "`controller.abort()`"
    _enter(_ask, "tab_closed", "the tab is closed", lambda _visit, _browser, tab: tab.close())
    _enter(
        _ask,
        "navigated",
        "the tab goes to another page",
        lambda visit, _browser, tab: tab.go_to(f"{visit.base}/page"),
    )
    _enter(_ask, "stopped", _stop, lambda _visit, _browser, tab: tab.run("stop_asking()"))
    _enter(_ask, "killed", "the browser is killed", lambda _visit, running, _tab: running.kill())
