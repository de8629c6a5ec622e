"""A client leaves a real proxy, and the server behind it stops, or cannot know."""

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import disconnect_watch as dw
from tests.proxies.cells import Cell, all_cells
from tests.proxies.measure import Outcome, measure
from tests.proxies.programs import FRONTS, PROGRAMS, behind, path_of
from tests.proxies.report import PAGE, tables
from tests.proxies.visitors import H1
from tests.support.loops import LoopRunner
from tests.support.net import until
from tests.support.upstream import Upstream, upstream


@pytest.fixture(scope="module")
def server() -> Iterator[Upstream]:
    with upstream() as server:
        yield server


@pytest.fixture(scope="module", params=PROGRAMS)
def proxy(
    request: pytest.FixtureRequest, server: Upstream, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, int]]:
    """The ports of one program's fronts."""
    name = str(request.param)
    if path_of(name) is None:
        pytest.skip(f"{name} is not here: make test-programs")
    with behind(name, server.port, tmp_path_factory.mktemp(name)) as ports:
        yield ports


@pytest.mark.parametrize(
    ("proxy", "cell"),
    [(FRONTS[cell.front].program, cell) for cell in all_cells()],
    ids=str,
    indirect=["proxy"],
)
def test_server_behind_a_proxy_hears_of_the_leave_where_the_table_says(
    proxy: dict[str, int], cell: Cell, server: Upstream
) -> None:
    outcome = measure(cell, proxy[cell.front], server)
    assert cell.accepts(outcome.reason), outcome


@pytest.mark.parametrize("key", ["nginx-streaming", "haproxy-abortonclose", "caddy"])
def test_handler_of_start_server_behind_a_proxy_is_cancelled(
    key: str, run: LoopRunner, tmp_path: Path
) -> None:
    program = FRONTS[key].program
    if path_of(program) is None:
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
