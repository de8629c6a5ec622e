"""Each kind of request, ended by each who can, in each phase: counted once, and told the truth."""

from collections import Counter
from dataclasses import replace

import pytest

from tests.abort.cells import WHO, Cell, Observed, all_cells, some_cells
from tests.abort.kinds import KINDS, PHASES
from tests.abort.measure import measure_all
from tests.abort.report import PAGE, page

SOME = some_cells()

pytestmark = pytest.mark.timeout(300)


def wrong(cells: list[Cell]) -> list[str]:
    found = measure_all(cells)
    return [line for cell, observed in found.items() for line in cell.complaints(observed)]


@pytest.mark.slow
@pytest.mark.parametrize("work", ["engine", "encoder", "process"])
def test_each_end_is_counted_once_and_told(work: str) -> None:
    assert not wrong([cell for cell in SOME if cell.kind.work == work])


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", KINDS)
def test_each_end_is_counted_once_and_told_in_every_phase(name: str) -> None:
    assert not wrong([cell for cell in all_cells() if cell.kind_name == name])


def test_default_cells_have_each_kind_with_each_end_and_all_phases() -> None:
    assert {(cell.kind_name, cell.who) for cell in SOME} >= {
        (name, who) for name in KINDS for who in ("fin", "rst", "api", "deadline")
    }
    assert {cell.who for cell in SOME} == set(WHO)
    assert {cell.who for cell in SOME if cell.kind.outlives} >= {"shutdown", "api_deadline"}
    for work in {kind.work for kind in KINDS.values()}:
        phases = {phase for kind in KINDS.values() if kind.work == work for phase in kind.phases}
        assert {cell.phase for cell in SOME if cell.kind.work == work} == phases


CELL = Cell("chat", "api", "decode")
RIGHT = Observed(
    Counter(aborted=1),
    Counter({("cancelled", "decode"): 1}),
    ({"outcome": "cancelled", "reason": "aborted", "phase": "decode", "status": 499},),
    "499",
    "cancelled",
)


def test_what_is_as_the_table_says_is_right() -> None:
    assert CELL.complaints(RIGHT) == []


@pytest.mark.parametrize(
    "change",
    [
        {"signals": Counter(aborted=2)},
        {"signals": Counter(aborted=1, fin=1)},
        {"signals": Counter()},
        {"outcomes": Counter({("cancelled", "decode"): 2})},
        {"outcomes": Counter({("cancelled", "prefill"): 1})},
        {"outcomes": Counter({("cancelled", "decode"): 1, ("finished", "decode"): 1})},
        {"lines": ()},
        {"lines": RIGHT.lines * 2},
        {"lines": ({**RIGHT.lines[0], "reason": "fin"},)},
        {"lines": ({**RIGHT.lines[0], "status": 200},)},
        {"answer": "200"},
        {"reply": "already_finished"},
        {"num_late": 1},
    ],
)
def test_what_is_otherwise_is_wrong(change: dict[str, object]) -> None:
    assert len(CELL.complaints(replace(RIGHT, **change))) == 1  # type: ignore[arg-type]


def test_of_two_at_once_the_log_and_the_abort_tell_one_story() -> None:
    cell = Cell("chat", "both", "decode")
    both = replace(RIGHT, signals=Counter(fin=1, aborted=1), answer="nothing")
    by_fin = ({**RIGHT.lines[0], "reason": "fin"},)
    assert cell.complaints(both) == []
    assert cell.complaints(replace(both, lines=by_fin, reply="already_cancelled")) == []
    assert cell.complaints(replace(both, lines=by_fin))
    assert cell.complaints(replace(both, reply="already_cancelled"))


def test_of_two_at_once_the_cause_is_counted() -> None:
    cell = Cell("chat", "api_deadline", "decode")
    by_deadline = ({**RIGHT.lines[0], "reason": "deadline", "status": 504},)
    late = replace(RIGHT, lines=by_deadline, answer="504", reply="already_cancelled")
    assert cell.complaints(RIGHT) == []
    assert cell.complaints(replace(late, signals=Counter(deadline=1))) == []
    assert cell.complaints(replace(late, signals=Counter(deadline=1, aborted=1))) == []
    assert cell.complaints(late)


def test_page_of_the_documentation_has_every_row() -> None:
    text = PAGE.read_text()
    assert all(title in text for title in WHO.values())
    for kind in KINDS.values():
        for phase in PHASES:
            row = f"| {kind.title} | {phase} | "
            assert text.count(row) == (phase in kind.phases)
    assert "| chat | decode |  |  | aborted, 499 |" in page({CELL: RIGHT})
