"""The cells of the matrix, and what each must give."""

import itertools
from dataclasses import dataclass

from tests.matrix.ways import KINDS, PIPE_KINDS, TCP_KINDS, TLS_KINDS, WAYS, Way

__all__ = [
    "COMBINATIONS",
    "DETECTORS",
    "OWNERS",
    "STATES",
    "Cell",
    "Outcome",
    "all_cells",
    "covering_cells",
    "pairs_of",
]

OWNERS = ("thread", "asyncio", "uvloop")
STATES = ("reading", "paused", "blocked", "gil")
#: Who owns the socket, and what it is doing. A thread has no loop that could be blocked.
COMBINATIONS = tuple(
    pair for pair in itertools.product(OWNERS, STATES) if pair != ("thread", "blocked")
)
#: Who looks, and who waits in it: the poller and the driver of the watcher.
DETECTORS = (("epoll", "thread"), ("epoll", "loop"), ("poll", "thread"))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a watcher said.

    Attributes:
        name: the reason, or "silent", or "blind": nothing said, and counted as blind.
        unread: bytes behind the FIN; None where not told.
    """

    name: str
    unread: int | None = None

    def __str__(self) -> str:
        return self.name if not self.unread else f"{self.name}, {self.unread} unread"


@dataclass(frozen=True, slots=True)
class Cell:
    """One place in the matrix: a way to leave, and where and when."""

    way_name: str
    kind: str
    owner: str
    state: str
    poller: str
    driver: str = "thread"

    @property
    def way(self) -> Way:
        return WAYS[self.way_name]

    @property
    def is_tls(self) -> bool:
        return self.kind in TLS_KINDS

    @property
    def is_pipe(self) -> bool:
        return self.kind in PIPE_KINDS

    @property
    def is_read(self) -> bool:
        """Whether the owner reads while it waits: a loop's TLS layer does even if paused."""
        return self.state == "reading" or self._is_read_by_tls

    @property
    def _is_read_by_tls(self) -> bool:
        return self.is_tls and self.owner != "thread" and self.state == "paused"

    @property
    def names(self) -> frozenset[str]:
        """The outcome must have one of these; more than one where two sources race."""
        way = self.way
        is_read_by_loop = self.is_read and self.owner != "thread"
        if self._is_hidden():
            return frozenset({"blind"})
        if self.kind == "pipe_transport" and way.when in ("attach", "request"):
            return frozenset({"RESET", "OWNER_CLOSED"})  # it closes by itself
        if self.is_pipe and way.outcome != "silent":
            return frozenset({"RESET"})  # nobody reads it any more: there is no half of that
        if way.server == "shut_rd" and self.kind == "unix":
            return frozenset({"FIN"})  # looks like the client's SHUT_WR to all but the owner
        if way.act == "close_notify" and is_read_by_loop and self.state == "reading":
            return frozenset({"FIN"})  # the loop's TLS layer ends the connection, and says so
        if way.when in ("attach", "request") and self.is_tls and self.owner != "thread":
            # The TLS layer may have closed the transport before the watch came.
            return frozenset({"FIN", "RESET", "OWNER_CLOSED"})
        if way.act == "fin_300k" and self._is_read_by_tls and self.poller == "poll":
            return frozenset({"FIN", "RESET", "blind"})  # by the room in the TLS layer
        if way.server == "fill" and way.outcome == "RESET" and self.driver == "loop":
            # Of what one turn of the loop brings the owner's write may come first, and
            # takes the error of the reset.
            return frozenset({"FIN", "RESET"})
        if self.is_read and way.outcome != "silent":
            # The owner answers a FIN or takes the error of a reset, as it may, and the
            # watcher sees what is left.
            return frozenset({"FIN", "RESET"})
        return frozenset(way.outcome.split(" or "))

    def _is_hidden(self) -> bool:
        way = self.way
        if way.is_window_full:
            return self.state != "reading"  # a paused TLS layer stops reading in the end
        if self.is_read:
            return False
        # A peek stops at the first unread byte; of a reset poll() tells by itself, and
        # so it does of a Unix socket's close, which shuts both directions.
        is_peek_stopped = self.poller == "poll" and way.unread > 0 and way.outcome != "RESET"
        return is_peek_stopped and (self.kind in TCP_KINDS or way.outcome == "silent")

    def accepts(self, outcome: Outcome) -> bool:
        """Whether ``outcome`` is what the cell must give."""
        if outcome.name not in self.names:
            return False
        if outcome.name != "FIN" or self.is_read or self.way.outcome != "FIN":
            return True
        if self.way.when in ("attach", "request") and self.is_tls:
            return True
        unread = outcome.unread or 0
        # TLS adds to what the client counts.
        return unread >= self.way.unread if self.is_tls else unread == self.way.unread

    @property
    def is_told(self) -> bool:
        """Whether anything is to be said at all; else it takes a while to say nothing."""
        return not self.names & {"blind", "silent"}

    def __str__(self) -> str:
        return "-".join(_values(self))


def _values(cell: Cell) -> tuple[str, ...]:
    # A thread of its own is the common driver and goes without saying.
    detector = cell.poller if cell.driver == "thread" else f"{cell.poller}_{cell.driver}"
    return cell.way_name, cell.kind, cell.owner, cell.state, detector


def _combinations(kind: str, driver: str) -> list[tuple[str, str]]:
    combinations = []
    for owner, state in COMBINATIONS:
        # Nothing is ever read from the write end of a pipe, and a thread has no transport.
        is_none = kind in PIPE_KINDS and state == "reading"
        is_none |= kind == "pipe_transport" and owner == "thread"
        # Who stands still polls nothing: what there is to say waits for him.
        is_none |= driver == "loop" and state in ("blocked", "gil")
        if not is_none:
            combinations.append((owner, state))
    return combinations


def all_cells() -> list[Cell]:
    """The whole product, less what cannot be."""
    return [
        Cell(name, kind, owner, state, poller, driver)
        for name, way in WAYS.items()
        for kind in KINDS
        if kind in way.kinds
        for poller, driver in DETECTORS
        for owner, state in _combinations(kind, driver)
    ]


def pairs_of(cell: Cell) -> set[object]:
    """Every two of the values that make the cell."""
    return set(itertools.combinations(enumerate(_values(cell)), 2))


def covering_cells() -> list[Cell]:
    """A part of it that holds each pair of values, and each way with each kind and detector."""
    cells = all_cells()
    groups = itertools.groupby(
        cells, lambda cell: (cell.way_name, cell.kind, cell.poller, cell.driver)
    )
    chosen = []
    for turn, (_, group) in enumerate(groups):
        members = list(group)
        chosen.append(members[turn % len(members)])
    covered = set[object]().union(*map(pairs_of, chosen))
    for cell in cells:
        if not pairs_of(cell) <= covered:
            covered |= pairs_of(cell)
            chosen.append(cell)
    return chosen
