"""The list of mutants keeps up with the code; ``make mutants`` runs them."""

import shlex
from pathlib import Path

import pytest

from tests.mutants import ROOT, Mutant, load, table

TESTS = Path(__file__).parents[1]

pytestmark = pytest.mark.skipif(
    not (ROOT / "csrc").exists(), reason="the tests run without the code that they are about"
)


@pytest.mark.parametrize("mutant", load(), ids=lambda mutant: f"{mutant.guard}-{mutant.without}")
def test_guard_and_its_test_are_where_the_list_says(mutant: Mutant) -> None:
    text = (ROOT / mutant.file).read_text()
    assert text.count(mutant.find) == 1, "the code has changed: bring tests/mutants.toml up to date"
    assert mutant.guard.rpartition(".")[2] in text
    kind, where, *_ = shlex.split(mutant.test)
    path = TESTS / "c" / f"{where}.c" if kind == "c" else ROOT / where.partition("::")[0]
    assert path.exists()


def test_readme_has_the_table() -> None:
    assert table() in (TESTS / "README.md").read_text()
