"""The matrix as a Markdown page, from what a run measured."""

import collections
import platform
import sys
from collections.abc import Iterable, Mapping

from tests.matrix.cells import COMBINATIONS, DETECTORS, OWNERS, STATES, Cell, Outcome
from tests.matrix.ways import KINDS, WAYS

__all__ = ["page"]

#: Of outcomes, as they are listed where several are possible.
_NAMES = ("FIN", "RESET", "OWNER_CLOSED", "blind", "silent")
_STATE_TITLES = {
    "reading": "reading",
    "paused": "paused",
    "blocked": "loop blocked",
    "gil": "GIL held",
}
_KIND_TITLES = {
    "tcp": "TCP",
    "tcp6": "TCP over IPv6",
    "tls12": "TLS 1.2",
    "tls13": "TLS 1.3",
    "unix": "AF_UNIX",
    "pipe": "pipe",
    "pipe_transport": "pipe, by a transport",
}
_DETECTOR_TITLES = {
    ("epoll", "thread"): "epoll and a thread, the default on Linux",
    ("epoll", "loop"): "epoll, driven by the owner's own loop",
    ("poll", "thread"): "poll() and a peek, for any POSIX system",
}

_HEAD = """\
# Which leave is seen where

Written by `make matrix`: every cell is what the watcher said in that run, checked against
`tests/matrix/cells.py`. {num_cells} cells; Linux {kernel}, Python {python}.

A row is what the client does, a column what it is connected by. Each is tried with the socket in
a plain thread, in asyncio and in uvloop, and with its owner reading (a background task or thread
reads on), paused, with its loop blocked, and with the GIL held by C code. One word in a cell holds
for all of them; otherwise the exceptions follow it. With `driver="loop"` there is no thread: the
owner polls, so what is to be said waits while he stands still, and only his reading and his pausing
are tried. A pipe is its write end, and to leave is to close the end that reads; asyncio and uvloop
watch it as a bare fd and as the transport of `connect_write_pipe`.

- **FIN**, **RESET**: the token was set with that reason. A number behind it: that many bytes were
  unread then, and are still there for the owner. (Where the owner reads it depends on the moment,
  and is not shown.)
- **FIN or RESET**: two sources race, and a run gives one of them, now this and now that. Where the
  owner reads (a loop's TLS layer does even if paused) he answers a FIN and takes the error of a
  reset, so that either may be told of any leave; shown is what is told where nobody reads.
- **OWNER_CLOSED**: a watch that came after the TLS layer, or a pipe's transport, had closed by
  itself said so.
- **silent**: nothing was said, as nobody left.
- **blind**: nothing was said, and the connection is counted in `stats().num_blind`.
- Empty: there is no such thing.
"""


def page(outcomes: Mapping[Cell, Outcome]) -> str:
    """The whole page."""
    head = _HEAD.format(
        num_cells=len(outcomes),
        kernel=platform.release().partition("-")[0],
        python=".".join(map(str, sys.version_info[:2])),
    )
    return "\n".join([head, *(_table(*detector, outcomes) for detector in DETECTORS)])


def _table(poller: str, driver: str, outcomes: Mapping[Cell, Outcome]) -> str:
    lines = [
        f"## {_DETECTOR_TITLES[poller, driver]}",
        "",
        "| the client's end | " + " | ".join(_KIND_TITLES[kind] for kind in KINDS) + " |",
        "|---" * (len(KINDS) + 1) + "|",
    ]
    for name, way in WAYS.items():
        entries = [_entry(name, kind, poller, driver, outcomes) for kind in KINDS]
        if any(entries):
            shown = " | ".join(entry for entry in entries)
            lines.append(f"| {way.title} | {shown} |")
    return "\n".join([*lines, ""])


def _entry(name: str, kind: str, poller: str, driver: str, outcomes: Mapping[Cell, Outcome]) -> str:
    """One cell of the table: what most gave, then who gave something else, races last."""
    givers = collections.defaultdict(list)
    for owner, state in COMBINATIONS:
        cell = Cell(name, kind, owner, state, poller, driver)
        if cell in outcomes:
            givers[_steady(cell, outcomes[cell])].append((owner, state))
    shown = _without_twins(givers)
    if not shown:
        return ""
    # First what is told without a race, then what most gave.
    (most, _), *others = sorted(
        shown.items(), key=lambda item: (" or " in item[0].name, -len(item[1]))
    )
    present = [pair for pairs in givers.values() for pair in pairs]
    parts = [str(most)]
    parts += [f"{outcome} when {_combined(pairs, present)}" for outcome, pairs in others]
    return "; ".join(parts)


def _steady(cell: Cell, outcome: Outcome) -> Outcome:
    """What the next run shows as well, though another source may win a race in it."""
    if outcome.name in cell.names and len(cell.names) > 1:
        if cell.is_read and cell.names == {"FIN", "RESET"}:
            return Outcome(cell.way.outcome)
        *others, last = sorted(cell.names, key=_NAMES.index)
        return Outcome(f"{', '.join(others)} or {last}")
    return Outcome(outcome.name) if cell.is_read else outcome


def _without_twins(
    givers: Mapping[Outcome, list[tuple[str, str]]],
) -> dict[Outcome, list[tuple[str, str]]]:
    """Who told the same reason and no number goes with those who told one."""
    merged: dict[Outcome, list[tuple[str, str]]] = {}
    for outcome in sorted(givers, key=lambda outcome: -(outcome.unread or 0)):
        twin = next((known for known in merged if known.name == outcome.name), None)
        merged.setdefault(outcome if twin is None else twin, []).extend(givers[outcome])
    return merged


def _combined(pairs: Iterable[tuple[str, str]], present: Iterable[tuple[str, str]]) -> str:
    """Pairs of owner and state in words, whole states in one."""
    given = set(pairs)
    words = []
    for state in STATES:
        owners = [owner for owner in OWNERS if (owner, state) in given]
        everybody = [owner for owner in OWNERS if (owner, state) in set(present)]
        if owners == everybody and owners:
            words.append(_STATE_TITLES[state])
        elif owners:
            words.append(f"{_STATE_TITLES[state]} ({', '.join(owners)})")
    return ", ".join(words)
