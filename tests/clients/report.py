"""What a run gave, as the table of ``docs/clients.md``."""

import subprocess
from collections.abc import Mapping, Sequence
from importlib.metadata import version

from tests.clients.visit import Case
from tests.support.page import DOCS
from tests.support.tools import path_of

__all__ = ["PAGE", "table", "versions"]

PAGE = DOCS / "clients.md"

_PACKAGES = ("requests", "urllib3", "httpx", "aiohttp", "openai", "tritonclient")
_PROGRAMS = ("curl", "node", "chromium")
_WHILE = {"wait": "nothing sent yet", "stream": "amid a stream"}


def table(news: Mapping[Case, Sequence[str]]) -> str:
    """A row for each case."""
    lines = ["| client | how it leaves | while | the server's token |", "|---|---|---|---|"]
    for case, told in news.items():
        heard = "; ".join(told).replace(":; ", ": ")
        state = _WHILE[case.answer] + (", over TLS" if case.scheme == "https" else "")
        lines.append(f"| {case.client} | {case.title} | {state} | {heard} |")
    return "\n".join([*lines, ""])


def versions() -> str:
    """Of all the clients that are here, in one line."""
    packages = [f"{name} {version(name)}" for name in _PACKAGES]
    programs = [f"{name} {_version_of(name)}" for name in _PROGRAMS if path_of(name)]
    return ", ".join(packages + programs)


def _version_of(name: str) -> str:
    done = subprocess.run([path_of(name), "--version"], capture_output=True, text=True, check=True)
    words = done.stdout.split()
    return next(word.lstrip("v") for word in words if word.lstrip("v")[:1].isdigit())
