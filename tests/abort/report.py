"""What a run measured, as the page ``docs/abort-matrix.md``."""

import platform
import sys
from collections.abc import Mapping
from importlib.metadata import version

from tests.abort.cells import WHO, Cell, Observed
from tests.abort.kinds import KINDS, PHASES
from tests.support.page import DOCS

__all__ = ["PAGE", "page"]

PAGE = DOCS / "abort-matrix.md"

_HEAD = """\
# What becomes of a request that is ended

Written by `make abort-matrix`: every cell is from that run, on a real server over loopback, and was
checked against the table in `tests/abort/cells.py`. {num_cells} cells; Linux {kernel},
Python {python}, uvicorn {uvicorn}, torch {torch}.

A request is held in a phase, somebody ends it, and it is let go. A cell says which reason its
outcome has, and what its client is told. In every cell

- each who asked for the end is counted once in `dw_signals_total`, and nobody else is;
- one outcome is counted in `dw_requests_total`, under the phase of the row, and one more of each
  further prompt, which waits while the first is worked on;
- the access log has one line for it, with the same outcome, reason and phase;
- no token is generated behind the signal, and a stream that was cut short has no `[DONE]`;
- the abort API answers after the effect: `cancelled` where it was the cause, `already_cancelled`
  where somebody was before it, `already_finished` behind the end;
- at the end all gauges are zero and all KV blocks are free.

`infer` is a model in a process of its own, which has no prefill; embeddings have no decode. A
response of the background is answered at once, and the cell says how it is found then; or it is
followed as a stream, which for a cancel has no event: then the client has `its events so far`.
Where two ask at once, the reason is that of the first, whichever it is, and the other is counted
unless it finds the request over; and a reset that the server's own read meets before the watcher
does is told as `fin`.

"""


def page(found: Mapping[Cell, Observed]) -> str:
    """The whole page."""
    head = _HEAD.format(
        num_cells=len(found),
        kernel=platform.release().partition("-")[0],
        python=".".join(map(str, sys.version_info[:2])),
        uvicorn=version("uvicorn"),
        torch=version("torch").partition("+")[0],
    )
    lines = [
        f"| endpoint | phase | {' | '.join(WHO.values())} |",
        "|---" * (len(WHO) + 2) + "|",
    ]
    for name, kind in KINDS.items():
        for phase in PHASES:
            if phase in kind.phases:
                entries = [_entry(found.get(Cell(name, who, phase))) for who in WHO]
                lines.append(f"| {kind.title} | {phase} | {' | '.join(entries)} |")
    return head + "\n".join(lines) + "\n"


def _entry(observed: Observed | None) -> str:
    return "" if observed is None else str(observed)
