"""The files that ``stress`` writes, and those that it compares."""

import json
from pathlib import Path
from typing import NoReturn

from disconnect_watch.cli._app import fail
from disconnect_watch.stress.compare import compare
from disconnect_watch.stress.html import as_html
from disconnect_watch.stress.junit import as_junit
from disconnect_watch.stress.report import Report

__all__ = ["compare_files", "write"]


def write(report: Report, json_file: Path | None, html: Path | None, junit: Path | None) -> None:
    """Write a report where it is wanted; fails the command where it cannot."""
    wanted: dict[Path, str] = {}
    if json_file is not None:
        wanted[json_file] = json.dumps(report.as_dict(), indent=1) + "\n"
    if html is not None:
        wanted[html] = as_html(report)
    if junit is not None:
        wanted[junit] = as_junit(report)
    for path, content in wanted.items():
        try:
            path.write_text(content)
        except OSError as error:
            fail(f"cannot write the report to {str(path)!r}: {error.strerror}")


def compare_files(first: Path, second: Path, *, as_json: bool) -> NoReturn:
    """Print what is different, and end with 0 only if the second report is no worse."""
    try:
        comparison = compare(json.loads(first.read_text()), json.loads(second.read_text()))
    except OSError as error:
        fail(f"cannot compare: {error.filename}: {error.strerror}")
    except ValueError as error:
        fail(str(error))
    print(json.dumps(comparison.as_dict()) if as_json else comparison.as_text())
    raise SystemExit(0 if comparison.holds else 1)
