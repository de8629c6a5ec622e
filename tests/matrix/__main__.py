"""Measure the whole matrix, print it as Markdown, and fail where it is not as it must be."""

import argparse
import sys
from pathlib import Path

from tests.matrix.cells import all_cells
from tests.matrix.leaver import Leaver
from tests.matrix.measure import measure
from tests.matrix.report import page


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description=__doc__)
    parser.add_argument("--write", type=Path, help="write the page here, too")
    arguments = parser.parse_args()
    cells = all_cells()
    outcomes = {}
    with Leaver() as leaver:
        for cell in cells:
            try:
                outcomes[cell] = measure(cell, leaver)
            except Exception as error:
                error.add_note(f"in {cell}")
                raise
    text = page(outcomes)
    print(text)
    wrong = [cell for cell in cells if not cell.accepts(outcomes[cell])]
    for cell in wrong:
        print(f"{cell}: {outcomes[cell]}, not {sorted(cell.names)}", file=sys.stderr)
    if not wrong and arguments.write is not None:
        arguments.write.write_text(text)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
