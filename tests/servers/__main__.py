"""Measure every leave from every server, print the page, and fail where ours is not as it must."""

import argparse
import itertools
import sys

from tests.servers.cells import Cell, Outcome, all_cells
from tests.servers.grpc_rows import measure_rpcs
from tests.servers.measure import measure_all
from tests.servers.report import PAGE, page
from tests.servers.stacks import STACKS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.servers", description=__doc__)
    parser.add_argument("--only", action="append", choices=STACKS, help="a server; may be repeated")
    parser.add_argument("--write", action="store_true", help="docs/servers.md, too")
    arguments = parser.parse_args()
    chosen = arguments.only or list(STACKS)
    cells = [cell for cell in all_cells() if cell.stack_name in chosen]
    outcomes: dict[Cell, Outcome] = {}
    for _, group in itertools.groupby(cells, lambda cell: (cell.stack_name, cell.is_tls)):
        outcomes |= measure_all(list(group))
    rpcs = {} if arguments.only else measure_rpcs()
    text = page(outcomes, rpcs)
    print(text)
    wrong = [
        *(f"{cell}: {found}" for cell, found in outcomes.items() if not cell.accepts(found)),
        *(f"{rpc}: {found}" for rpc, found in rpcs.items() if not rpc.accepts(found)),
    ]
    for line in wrong:
        print(line, file=sys.stderr)
    if arguments.write and not wrong:
        PAGE.write_text(text)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
