"""Every way to leave, over every kind of connection, whatever its owner is doing."""

from collections.abc import Iterator

import pytest

from tests.matrix.cells import Cell, Outcome, all_cells, covering_cells, pairs_of
from tests.matrix.leaver import Leaver
from tests.matrix.measure import measure
from tests.matrix.report import page

COVERING = covering_cells()
REST = sorted(set(all_cells()) - set(COVERING), key=str)


@pytest.fixture(scope="module")
def leaver() -> Iterator[Leaver]:
    with Leaver() as leaver:
        yield leaver


@pytest.mark.parametrize(
    "cell",
    [*COVERING, *(pytest.param(cell, marks=pytest.mark.exhaustive) for cell in REST)],
    ids=str,
)
def test_cell_gives_what_the_table_says(cell: Cell, leaver: Leaver) -> None:
    outcome = measure(cell, leaver)
    assert cell.accepts(outcome), f"{outcome}, not {sorted(cell.names)}"


def test_default_cells_cover_every_pair_of_values() -> None:
    missing = set[object]().union(*map(pairs_of, REST)) - set[object]().union(
        *map(pairs_of, COVERING)
    )
    assert not missing, missing


def test_page_says_once_what_all_gave_and_names_who_did_not() -> None:
    cells = [cell for cell in all_cells() if cell.way_name == "fin_get" and cell.kind == "tcp"]
    outcomes = {
        cell: Outcome("FIN" if cell.state == "reading" or cell.poller == "epoll" else "blind")
        for cell in cells
    }
    odd = Cell("fin_get", "tcp", "uvloop", "gil", "epoll")
    outcomes[odd] = Outcome("silent")
    rows = [line for line in page(outcomes).splitlines() if line.startswith("| FIN behind a pip")]
    assert "| FIN; silent when GIL held (uvloop) |" in rows[0]
    assert "| FIN |" in rows[1]
    assert "| blind; FIN when reading |" in rows[2]


@pytest.mark.parametrize("told", ["FIN", "RESET"])
def test_page_does_not_depend_on_who_won_a_race(told: str) -> None:
    cells = [cell for cell in all_cells() if cell.way_name == "fin" and cell.kind == "tcp"]
    assert cells[0].names == {"FIN", "RESET"}
    outcomes = {cell: Outcome("FIN") for cell in cells}
    assert page(outcomes | {cells[0]: Outcome(told)}) == page(outcomes)
