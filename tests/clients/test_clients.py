"""Real clients leave, and the server stops, or cannot know yet."""

from collections.abc import Iterator

import pytest

from tests.clients.report import PAGE, table
from tests.clients.run import ALL_CASES, run_case, what_lacks
from tests.clients.visit import Case
from tests.support.upstream import Upstream, upstream


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, Upstream]]:
    """By scheme."""
    with upstream() as plain, upstream(tls=True) as tls:
        yield {"http": plain, "https": tls}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=pytest.mark.browser if "chromium" in case.needs else ())
        for case in ALL_CASES
    ],
    ids=str,
)
def test_server_hears_of_the_client_that_leaves(case: Case, servers: dict[str, Upstream]) -> None:
    if lacking := what_lacks(case):
        pytest.skip(f"{lacking} is not here: make test-programs")
    run_case(case, servers[case.scheme])


def test_table_says_what_came_first_and_what_then() -> None:
    case = next(case for case in ALL_CASES if str(case) == "urllib3_retries")
    news = ["FIN", "then the retry:", "RESET"]
    assert table({case: news}).splitlines()[-1].endswith("| FIN; then the retry: RESET |")


def test_page_of_the_documentation_has_a_row_for_each_case() -> None:
    text = PAGE.read_text()
    for case in ALL_CASES:
        assert f"| {case.client} | {case.title} |" in text
