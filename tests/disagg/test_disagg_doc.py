"""``docs/disaggregated.md`` runs, and names tests that are there."""

import re
from pathlib import Path

from tests.support.documents import DOCS, run_blocks

PAGE = "disaggregated.md"


def test_the_page_runs_as_written() -> None:
    assert run_blocks(PAGE)["returned"] == [[3, 1, 4]]


def test_the_tests_that_the_page_names_are_there() -> None:
    named = re.findall(r"`(tests/[\w/]+\.\w+)`", (DOCS / PAGE).read_text())
    assert len(named) > 6
    assert all((Path(__file__).parents[2] / name).exists() for name in named)
