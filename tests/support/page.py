"""A page of the documentation, one part of which a command writes."""

from pathlib import Path

__all__ = ["DOCS", "rewrite"]

DOCS = Path(__file__).parents[2] / "docs"
_START, _END = "<!-- measured -->\n", "<!-- /measured -->\n"


def rewrite(page: Path, measured: str) -> None:
    """Put the measured part between its marks.

    Raises:
        ValueError: the page lacks a mark.
    """
    text = page.read_text()
    start, end = text.index(_START) + len(_START), text.index(_END)
    page.write_text(f"{text[:start]}{measured}{text[end:]}")
