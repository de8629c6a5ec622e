"""The pages quote results files; what they show is what the files hold."""

from pathlib import Path

import pytest

from bench.tables import PAGES, TABLES, rewritten


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.parent.name + "/" + page.name))
def test_pages_show_what_the_results_hold(page: Path) -> None:
    assert page.read_text() == rewritten(page), "run: python -m bench.tables"


def test_every_table_is_on_a_page() -> None:
    pages = "".join(page.read_text() for page in PAGES)
    assert [name for name in TABLES if f"<!-- measured: {name} -->" not in pages] == []


def test_a_changed_number_is_found(tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text("<!-- measured: scaling -->\n| forged |\n<!-- /measured -->\n")
    assert "forged" not in rewritten(page)


def test_a_mark_that_names_no_table_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text("<!-- measured: nothing -->\n<!-- /measured -->\n")
    with pytest.raises(KeyError, match="nothing"):
        rewritten(page)
