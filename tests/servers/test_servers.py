"""Every way to leave, from every server: what a handler of ours hears is what the table says."""

import itertools

import pytest

from tests.servers.cells import Cell, Outcome, all_cells, some_cells
from tests.servers.grpc_rows import measure_rpcs
from tests.servers.measure import measure_all
from tests.servers.report import PAGE, page
from tests.servers.stacks import STACKS
from tests.servers.ways import WAYS

SOME = some_cells()


def by_server(cells: list[Cell]) -> list[list[Cell]]:
    groups = itertools.groupby(cells, lambda cell: (cell.stack_name, cell.is_tls))
    return [list(group) for _, group in groups]


def name_of(cells: list[Cell]) -> str:
    return f"{cells[0].stack_name}-{'tls' if cells[0].is_tls else 'plain'}"


def wrong(outcomes: dict[Cell, Outcome]) -> list[str]:
    return [f"{cell}: {found}" for cell, found in outcomes.items() if not cell.accepts(found)]


@pytest.mark.slow
@pytest.mark.parametrize("cells", by_server(SOME), ids=name_of)
def test_handlers_of_a_server_hear_of_each_leave_as_the_table_says(cells: list[Cell]) -> None:
    assert not wrong(measure_all(cells))


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
@pytest.mark.parametrize("cells", by_server(all_cells()), ids=name_of)
def test_handlers_of_a_server_hear_of_it_whatever_the_answer_and_the_layers(
    cells: list[Cell],
) -> None:
    assert not wrong(measure_all(cells))


@pytest.mark.slow
def test_handlers_of_rpcs_hear_of_each_leave() -> None:
    assert not [
        f"{rpc}: {found}" for rpc, found in measure_rpcs().items() if not rpc.accepts(found)
    ]


def test_default_cells_have_each_way_from_each_server_and_each_value_of_every_axis() -> None:
    assert {(cell.stack_name, cell.mode) for cell in SOME} == {
        (name, mode)
        for name, stack in STACKS.items()
        for mode in stack.modes
        if mode != "own" and not stack.is_twin
    }
    for axis in ("way_name", "kind", "num_middlewares", "is_tls"):
        values = {getattr(cell, axis) for cell in SOME}
        assert values == {getattr(cell, axis) for cell in all_cells()}, axis


def test_a_request_begun_behind_a_leave_is_wrong_though_the_leave_was_told() -> None:
    cell = Cell("uvicorn-ours", "ours", False, 0, "fin_get", "wait")
    assert cell.accepts(Outcome("FIN", 1.0))
    assert not cell.accepts(Outcome("FIN", 1.0, num_zombies=1))
    assert not cell.accepts(Outcome("done"))
    assert not cell.accepts(Outcome("RESET", 1.0))


def test_page_says_what_most_cells_gave_and_where_it_was_otherwise() -> None:
    outcomes = {
        cell: Outcome("done" if cell.is_tls else "FIN", 2.0)
        for cell in all_cells()
        if cell.stack_name == "uvicorn" and cell.mode == "ours" and cell.way_name == "fin"
    }
    (row,) = (line for line in page(outcomes, {}).splitlines() if "| FIN 2.0" in line)
    assert "| FIN 2.0; **never** (TLS) |" in row
    outcomes[next(iter(outcomes))] = Outcome("lost")
    assert "; *lost* in 1 of 18 |" in page(outcomes, {})


def test_page_of_the_documentation_has_a_row_for_each_server_in_each_mode() -> None:
    text = PAGE.read_text()
    for stack in STACKS.values():
        for title in stack.modes.values():
            assert text.count(f"| {stack.title} | {title} |") == 4, (stack.title, title)
    assert all(way.title in text for way in WAYS.values())
