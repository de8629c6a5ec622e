"""A client leaves a real proxy, and the server behind it stops, or cannot know."""

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest

import disconnect_watch as dw
from tests.proxies.cells import Cell, all_cells
from tests.proxies.measure import Outcome, measure
from tests.proxies.programs import FRONTS, behind
from tests.proxies.report import PAGE, tables
from tests.proxies.visitors import H1
from tests.support.loops import LoopRunner
from tests.support.net import until
from tests.support.tools import path_of
from tests.support.upstream import Upstream


@pytest.mark.parametrize(
    "cell",
    [
        # With half a body sent it is as with nothing sent, in all cells but one.
        pytest.param(cell, marks=pytest.mark.exhaustive if cell.answer == "half" else ())
        for cell in all_cells()
    ],
    ids=str,
)
def test_server_behind_a_proxy_hears_of_the_leave_where_the_table_says(
    cell: Cell, server: Upstream, port_of: Callable[[str], int]
) -> None:
    outcome = measure(cell, port_of(cell.front), server)
    assert cell.accepts(outcome.reason), outcome


@pytest.mark.parametrize("key", ["nginx-streaming", "haproxy-abortonclose", "caddy"])
def test_handler_of_start_server_behind_a_proxy_is_cancelled(
    key: str, run: LoopRunner, tmp_path: Path
) -> None:
    program = FRONTS[key].program
    if not path_of(program):
        pytest.skip(f"{program} is not here: make test-programs")
    ended: list[str] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        ended.append("begun")
        try:
            await asyncio.sleep(40)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    async def main() -> None:
        server = await dw.start_server(handle, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        with behind(program, port, tmp_path) as ports, contextlib.closing(H1(ports[key])) as leaves:
            leaves.ask("/")
            await until(lambda: ended == ["begun"])
            leaves.leave("fin")
            await until(lambda: ended == ["begun", "cancelled"])
        server.close()
        await server.wait_closed()

    run(main)


def test_tables_say_what_most_runs_gave() -> None:
    most = [Outcome("FIN", 2.0), Outcome("FIN", 4.0), Outcome("FIN", 3.0)]
    outcomes = {cell: list(most) for cell in all_cells()}
    outcomes[Cell("caddy", "wait", "pipelined")] = [Outcome("")] * 3
    outcomes[Cell("caddy", "wait", "rst")][0] = Outcome("")
    (row, *_) = (line for line in tables(outcomes).splitlines() if "| Caddy, defaults" in line)
    assert row.split(" | ")[1:5] == [
        "FIN, 3.0 ms",
        "FIN, 3.5 ms; never in 1 of 3",
        "FIN, 3.0 ms",
        "**never**",
    ]


def test_page_of_the_documentation_has_a_row_for_each_front() -> None:
    text = PAGE.read_text()
    for front in FRONTS.values():
        assert text.count(f"| {front.title} |") == 3, front.title
