"""The Python blocks of a page of documentation, run as written."""

import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[2] / "docs"


def blocks_of(page: str) -> list[str]:
    """The sources of a page's Python blocks; ``page`` is below ``docs/``."""
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


def run_blocks(page: str) -> dict[str, Any]:
    """Run all blocks of a page, each in turn, as one module. Returns its names."""
    names: dict[str, Any] = {"__name__": f"docs.{page}"}
    for source in blocks_of(page):
        exec(compile(source, page, "exec"), names)
    return names
