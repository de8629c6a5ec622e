"""What ``docs/engine.md`` and ``docs/abort.md`` promise is held by the tests that they name."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/engine.md").read_text()
ABORT = (ROOT / "docs/abort.md").read_text()
NAMED = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", PAGE + ABORT)


@pytest.mark.parametrize(("file", "name"), NAMED)
def test_a_test_that_the_page_names_is_there(file: str, name: str) -> None:
    tree = ast.parse((ROOT / file).read_text())
    assert not name or name in {
        node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def test_the_page_of_aborts_names_a_test_for_each_promise() -> None:
    table = ABORT.partition("## What is promised")[2].partition("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ")]
    assert len(rows) > 12
    assert all("`tests/" in line for line in rows[1:])


def test_the_page_names_a_test_for_each_promise() -> None:
    table = [line for line in PAGE.split("\n## ")[0].splitlines() if "|" in line]
    assert len(table) > 15
    assert all("`tests/" in line for line in table[2:])
