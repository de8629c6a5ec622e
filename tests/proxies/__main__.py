"""Measure every leave through every proxy that is here, and print the tables.

Fails where one is not as ``tests/proxies/cells.py`` has it.
"""

import argparse
import collections
import sys
import tempfile
from pathlib import Path

from tests.proxies.cells import Cell, all_cells
from tests.proxies.measure import Outcome, measure
from tests.proxies.programs import PROGRAMS, behind, version_of
from tests.proxies.report import PAGE, tables
from tests.support.page import rewrite
from tests.support.tools import path_of
from tests.support.upstream import upstream


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.proxies", description=__doc__)
    parser.add_argument("--runs", type=int, default=5, help="how often each is measured")
    parser.add_argument(
        "--patience", type=float, default=0.5, help="seconds until silence counts as never"
    )
    parser.add_argument("--write", action="store_true", help="into docs/proxies.md, too")
    arguments = parser.parse_args()
    present = [name for name in PROGRAMS if path_of(name)]
    outcomes: dict[Cell, list[Outcome]] = collections.defaultdict(list)
    for name in present:
        with (
            upstream() as server,
            tempfile.TemporaryDirectory() as directory,
            behind(name, server.port, Path(directory)) as ports,
        ):
            for cell in all_cells() * arguments.runs:
                if cell.front in ports:
                    port = ports[cell.front]
                    outcomes[cell].append(measure(cell, port, server, patience=arguments.patience))
    versions = ", ".join(f"{name} {version_of(name)}" for name in present)
    text = f"Median of {arguments.runs} runs over loopback; {versions}.\n\n{tables(outcomes)}"
    print(text)
    wrong = [
        (cell, outcome)
        for cell, found in outcomes.items()
        for outcome in found
        if not cell.accepts(outcome.reason)
    ]
    for cell, outcome in wrong:
        print(f"{cell}: {outcome}", file=sys.stderr)
    if arguments.write and not wrong:
        rewrite(PAGE, text)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
