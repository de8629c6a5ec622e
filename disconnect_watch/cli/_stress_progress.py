"""How a run of ``stress`` goes, on standard error: a live table, or a line now and then."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from disconnect_watch.stress.client import Outcome
from disconnect_watch.stress.report import percentiles_ms

if TYPE_CHECKING:
    from disconnect_watch.stress.tally import Counts

__all__ = ["progress"]

#: Seconds from one drawing to the next.
_PERIOD = 0.1
#: Over which what the table says of the moment is taken.
_NUM_LAST = 500


@contextlib.contextmanager
def progress(max_seconds: float) -> Iterator[Callable[["Counts"], None]]:
    """Show what the counts say, each time they are given.

    Args:
        max_seconds: after which no client begins, for the bar.
    """
    if sys.stderr.isatty():
        # Drawn here alone: no thread of its own, which a loop's signals would meet.
        with Live(console=Console(stderr=True), auto_refresh=False) as live:
            shown = _Table(live, max_seconds)
            yield shown.show
            shown.draw()
    else:
        yield _print


def _print(counts: "Counts") -> None:
    """A line for each tenth."""
    is_last = counts.num_ended == counts.num_planned
    if is_last or counts.num_ended % max(1, counts.num_planned // 10) == 0:
        print(counts.equation, file=sys.stderr, flush=True)


class _Table:
    def __init__(self, live: Live, max_seconds: float) -> None:
        self._live = live
        self._max_seconds = max_seconds
        self._began = self._drawn = time.monotonic()
        self._counts: Counts | None = None

    def show(self, counts: "Counts") -> None:
        """Draw it, unless it was drawn just now."""
        self._counts = counts
        if time.monotonic() >= self._drawn + _PERIOD:
            self.draw()

    def draw(self) -> None:
        """Draw it."""
        counts, self._drawn = self._counts, time.monotonic()
        if counts is None:
            return
        seconds = self._drawn - self._began
        share = max(
            counts.num_ended / max(1, counts.num_planned),
            min(1.0, seconds / self._max_seconds) if self._max_seconds else 0.0,
        )
        table = Table(box=None, pad_edge=False)
        for name in ("begun", *Outcome, "open", "a second", "answer p50", "p99"):
            table.add_column(str(name), justify="right")
        waited = percentiles_ms(counts.latencies.whole[-_NUM_LAST:], (50.0, 99.0))
        table.add_row(
            f"{counts.num_sent:,}",
            *(f"{counts.outcomes[outcome]:,}" for outcome in Outcome),
            f"{counts.num_open:,}",
            f"{counts.num_ended / seconds:,.0f}" if seconds else "",
            *(f"{value:,.1f} ms" for value in waited.values()),
        )
        bar = ProgressBar(total=1.0, completed=share, width=60)
        self._live.update(Group(bar, table), refresh=True)
