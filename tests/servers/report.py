"""What a run measured, as the page ``docs/servers.md``."""

import collections
import platform
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from statistics import median
from textwrap import fill

from tests.servers.cells import EXEMPTIONS, Cell, Outcome
from tests.servers.grpc_rows import ACTS, KINDS, MODES, Rpc
from tests.servers.measure import NUM_AT_ONCE
from tests.servers.stacks import STACKS
from tests.servers.ways import WAYS
from tests.support.page import DOCS

__all__ = ["PAGE", "page"]

PAGE = DOCS / "servers.md"
_PACKAGES = [
    "uvicorn",
    "starlette",
    "hypercorn",
    "granian",
    "gunicorn",
    "fastapi",
    "quart",
    "litestar",
    "blacksheep",
    "aiohttp",
    "sanic",
    "tornado",
    "grpcio",
]

_TABLES = {
    "A client leaves": [
        "fin",
        "rst",
        "half_close",
        "half_close_rst",
        "close_notify",
        "unread",
        "full_send",
    ],
    "It leaves behind a further request": ["fin_get", "rst_get", "fin_40", "rst_40"],
    "It leaves behind bytes that nobody reads": ["fin_crlf", "rst_crlf", "fin_body", "rst_body"],
    "It leaves no request": ["mid_head", "between", "last_byte"],
}

_HEAD = """\
# Which leave each server's handler hears of

Written by `make matrix-servers`: every cell is from that run, and those of ours were checked
against `tests/servers/cells.py`. {num_cells} cells; Linux {kernel}, Python {python};
{versions}.

A client asks for one second of work and leaves. Each way to leave is tried over plain TCP and over
TLS, behind 0, 1 and 3 `BaseHTTPMiddleware`s where the application is a bare one, with nothing of
the answer sent, with half of a body of known length sent, and inside a stream. A row is a server
and what tells its handler: first the server without us, in the best way that it has itself, then
ours.

- A number: milliseconds from the client's act to the handler, median. With {num_at_once} clients at
  a time on two cores it says that the handler was told, not how soon it could be. Before it, for
  ours, the token's reason in most cells (OWNER_CLOSED: the server had closed the connection first).
- **never**: the handler worked to its end. Where not all cells agree it says in which, or in how
  many. *lost*: neither told nor at its end after six seconds.
- †: a request that lay behind was begun after its client had left.
- ok: nobody was told, as nothing was left. *cut*: the handler was cut off all the same.
- Empty: there is no such thing.
"""


def page(outcomes: Mapping[Cell, Outcome], rpcs: Mapping[Rpc, Outcome]) -> str:
    """The whole page."""
    head = _HEAD.format(
        num_at_once=NUM_AT_ONCE,
        num_cells=len(outcomes),
        kernel=platform.release().partition("-")[0],
        python=".".join(map(str, sys.version_info[:2])),
        versions=fill(", ".join(f"{name} {version(name)}" for name in _PACKAGES), 100),
    )
    tables = (_table(title, names, outcomes) for title, names in _TABLES.items())
    return "\n".join([head, *tables, _table_of_rpcs(rpcs), _exemptions()])


def _table(title: str, ways: Sequence[str], outcomes: Mapping[Cell, Outcome]) -> str:
    by_row = collections.defaultdict[tuple[str, str], dict[str, dict[Cell, Outcome]]](dict)
    for cell, outcome in outcomes.items():
        row = by_row[cell.stack_name, cell.mode]
        row.setdefault(cell.way_name, {})[cell] = outcome
    lines = [
        f"## {title}",
        "",
        "| server | by | " + " | ".join(WAYS[name].title for name in ways) + " |",
        "|---" * (len(ways) + 2) + "|",
    ]
    for (stack_name, mode), found in by_row.items():
        stack = STACKS[stack_name]
        entries = [_entry(found.get(name, {})) for name in ways]
        lines.append(f"| {stack.title} | {stack.modes[mode]} | {' | '.join(entries)} |")
    return "\n".join([*lines, ""])


def _table_of_rpcs(rpcs: Mapping[Rpc, Outcome]) -> str:
    lines = [
        "## Its RPC is left",
        "",
        "With grpc.aio. A deadline is the client's; milliseconds are counted from its end.",
        "",
        "| handler | by | " + " | ".join(ACTS.values()) + " |",
        "|---" * (len(ACTS) + 2) + "|",
    ]
    for kind, title in KINDS.items():
        for mode, by in MODES.items():
            outcomes = [rpcs.get(Rpc(mode, kind, act)) for act in ACTS]
            entries = [_entry_of_rpc(mode, outcome) for outcome in outcomes]
            lines.append(f"| {title} | {by} | {' | '.join(entries)} |")
    return "\n".join([*lines, ""])


def _entry_of_rpc(mode: str, outcome: Outcome | None) -> str:
    if outcome is None:
        return ""
    return _told([outcome], is_ours=mode != "own") if outcome.is_told else "**never**"


def _entry(found: Mapping[Cell, Outcome]) -> str:
    """What most cells gave, then where it was otherwise."""
    groups: dict[str, list[Cell]] = {}
    for cell, outcome in found.items():
        groups.setdefault(_word(cell, outcome), []).append(cell)
    ranked = sorted(groups.items(), key=lambda item: -len(item[1]))
    parts: list[str] = []
    for word, cells in ranked:
        if word == "told":
            word = _told([found[cell] for cell in cells], is_ours=cells[0].is_ours)
        where = _where(cells, found) if len(ranked) > 1 and parts else ""
        parts.append(f"{word}{where}")
    mark = " †" if any(outcome.num_zombies for outcome in found.values()) else ""
    return "; ".join(parts) + mark


def _word(cell: Cell, outcome: Outcome) -> str:
    if not cell.way.is_leave:
        return "ok" if outcome.name in ("quiet", "done") else "*cut*"
    if outcome.is_told:
        return "told"
    return "*lost*" if outcome.name == "lost" else "**never**"


def _told(outcomes: Sequence[Outcome], *, is_ours: bool) -> str:
    ms = f"{median(outcome.ms for outcome in outcomes):.1f}"
    reasons = [outcome.name for outcome in outcomes]
    reason = max(reasons, key=reasons.count)
    return f"{reason} {ms}" if is_ours and reason != "noticed" else ms


def _where(cells: Sequence[Cell], found: Mapping[Cell, Outcome]) -> str:
    """In which cells: by the one axis that tells them from the rest, and in how many."""
    rules = {
        "plain": lambda cell: not cell.is_tls,
        "TLS": lambda cell: cell.is_tls,
        "unanswered": lambda cell: cell.kind == "wait",
        "half answered": lambda cell: cell.kind == "half",
        "streams": lambda cell: cell.kind == "stream",
        "behind middleware": lambda cell: cell.num_middlewares > 0,
        "without middleware": lambda cell: cell.num_middlewares == 0,
    }
    for words, rule in rules.items():
        if set(filter(rule, found)) == set(cells):
            return f" ({words})"
    return f" in {len(cells)} of {len(found)}"


def _exemptions() -> str:
    lines = ["## Where ours gives something else, and why", ""]
    lines += [f"- {each.what}: {each.why}." for each in EXEMPTIONS]
    return "\n".join([*lines, ""])
