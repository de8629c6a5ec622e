"""The stress tool's reports: JUnit, the page, and two of them side by side."""

import json
import re
from html.parser import HTMLParser
from typing import Any
from xml.etree import ElementTree

import pytest

from disconnect_watch.stress import Check, Point, Report, Way
from disconnect_watch.stress.client import Ending, Outcome, Times
from disconnect_watch.stress.compare import compare
from disconnect_watch.stress.effect import Effect
from disconnect_watch.stress.html import as_html
from disconnect_watch.stress.junit import as_junit
from disconnect_watch.stress.ledger import ServerCounts
from disconnect_watch.stress.plan import ClientPlan, Leave
from disconnect_watch.stress.report import percentiles_ms
from disconnect_watch.stress.tally import Counts

LEAVE = Leave(Way.RST, Point.WAITING, fraction=0, delay=0, num_pieces=1)


def report(
    *, failed: int = 0, whole: float = 0.02, target: str = "http://a/<b>", **more: Any
) -> Report:
    """Of some clients over two seconds."""
    counts = Counts(20)
    for index in range(8):
        times = Times(0.001, whole / 2, whole * (1 + index % 2))
        counts.add(ClientPlan(index, None), Ending(Outcome.ANSWERED, times=times), at=index % 2)
    counts.add(ClientPlan(8, LEAVE), Ending(Outcome.LEFT, is_request_complete=True), at=1.5)
    for index in range(failed):
        counts.add(ClientPlan(index, None), Ending(Outcome.FAILED, "status <503>"), at=1)
    counts.num_sent = counts.num_ended
    checks = (
        Check("every client is accounted for", True, counts.equation),
        Check("every answer is right", not failed, f"{failed} wrong & missing"),
    )
    return Report(
        **{
            "target": target,
            "seed": 5,
            "seconds": 2.0,
            "is_interrupted": False,
            "is_server_checked": False,
            "counts": counts,
            "checks": checks,
            **more,
        }
    )


def test_percentiles_are_values_that_were_measured() -> None:
    assert percentiles_ms([0.003, 0.001, 0.002], (0.0, 50.0, 99.9, 100.0)) == {
        "p0": 1.0, "p50": 2.0, "p99.9": 3.0, "p100": 3.0,
    }  # fmt: skip
    assert percentiles_ms([]) == {}


def test_report_has_what_the_plots_and_comparisons_need() -> None:
    told = json.loads(json.dumps(report(failed=2).as_dict()))
    assert [second["answered"] for second in told["by_second"]] == [4, 4]
    assert sum(second["failed"] for second in told["by_second"]) == 2
    assert told["latency_ms"]["whole"]["p50"] in (20.0, 40.0)
    assert told["latency_ms"]["first"]["p50"] == 10.0
    assert len(told["curve_ms"]["whole"]) == len(told["curve_ms"]["percentiles"])
    assert told["points"] == {"waiting": 1}
    assert told["cancels"] is None


@pytest.mark.parametrize(("holds", "cancels"), [(True, True), (False, False)])
def test_verdict_is_that_of_the_servers_checks(holds: bool, cancels: bool) -> None:
    checks = (Check("nothing is left behind in the server", holds, "running 0"),)
    told = report(is_server_checked=True, checks=checks)
    assert told.cancels is cancels
    assert ("works on" in told.verdict) is not cancels


def test_tokens_are_those_of_the_run() -> None:
    before, after = ServerCounts(num_tokens=10), ServerCounts(num_tokens=35)
    assert report(before=before, after=after).num_tokens == 25
    assert report(before=ServerCounts(), after=after).num_tokens is None


def test_junit_has_a_case_for_each_check_and_a_failure_for_each_that_does_not_hold() -> None:
    suite = ElementTree.fromstring(as_junit(report(failed=2)))
    assert (suite.get("tests"), suite.get("failures")) == ("2", "1")
    cases = suite.findall("testcase")
    assert [case.get("name") for case in cases] == [
        "every client is accounted for", "every answer is right",
    ]  # fmt: skip
    (failure,) = suite.findall("testcase/failure")
    assert failure.get("message") == "2 wrong & missing"


class _Page(HTMLParser):
    """Which elements there are, and whether each is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.counts: dict[str, int] = {}
        self.sources: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1
        self.sources += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_page_is_whole_has_its_plots_and_loads_nothing() -> None:
    text = as_html(report(failed=1, effect=Effect(0.001, 0.004, 0.0011, 8)))
    page = _Page(text)
    assert page.open == []
    assert page.counts["svg"] == 5  # by second, the curve, ways, points, the effect
    assert page.counts["polyline"] == 5
    assert page.sources == []
    assert "url(" not in text
    assert set(re.findall(r"https?://[^\s\"'<&]+", text)) <= {
        "http://a/",
        "http://www.w3.org/2000/svg",
    }
    assert "http://a/&lt;b&gt;" in text
    assert "<b>" not in text
    assert "status &lt;503&gt;" in text
    assert "the server cancels" in text


def test_page_of_a_run_without_an_answer_has_no_curve() -> None:
    page = _Page(as_html(report(counts=Counts(1))))
    assert "svg" not in page.counts


def test_second_report_that_lost_a_check_is_worse() -> None:
    first, second = report().as_dict(), report(failed=2, whole=0.04).as_dict()
    comparison = compare(first, second)
    assert comparison.lost == ("every answer is right",)
    assert not comparison.holds
    rows = {row[0]: row[1:] for row in comparison.rows}
    assert rows["failed"] == ("0", "2", "")
    assert rows["to the first piece, ms, p50"] == ("10", "20", "2.00")
    assert "FAIL every answer is right: held in the first" in comparison.as_text()
    assert comparison.as_dict()["lost"] == ["every answer is right"]
    assert compare(second, first).holds
    assert compare(second, second).holds


@pytest.mark.parametrize("other", [{}, [], {"target": "x"}])
def test_what_is_no_report_is_not_compared(other: Any) -> None:
    with pytest.raises(ValueError, match="not a report of stress"):
        compare(report().as_dict(), other)
