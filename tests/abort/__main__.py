"""End each kind of request in each phase by each who can, and print what became of it."""

import argparse
import sys

from tests.abort.cells import all_cells
from tests.abort.kinds import KINDS
from tests.abort.measure import measure_all
from tests.abort.report import PAGE, page


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.abort", description=__doc__)
    parser.add_argument("--only", action="append", choices=KINDS, help="a kind; may be repeated")
    parser.add_argument("--write", action="store_true", help="docs/abort-matrix.md, too")
    arguments = parser.parse_args()
    chosen = arguments.only or list(KINDS)
    found = measure_all([cell for cell in all_cells() if cell.kind_name in chosen])
    text = page(found)
    print(text)
    wrong = [line for cell, observed in found.items() for line in cell.complaints(observed)]
    for line in wrong:
        print(line, file=sys.stderr)
    if arguments.write and not wrong and not arguments.only:
        PAGE.write_text(text)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
