"""The cells of the matrix, and what each of ours must give."""

from dataclasses import dataclass

from tests.servers.stacks import STACKS, Stack
from tests.servers.ways import WAYS, Way
from tests.servers.work import LONG_WORK, WORK, WORK_BEHIND, named

__all__ = ["EXEMPTIONS", "Cell", "Outcome", "all_cells", "some_cells"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of the handler of a request whose client left, or left nothing.

    Attributes:
        name: the reason of its token; "noticed" where it was cut off without one; "done" where it
            worked to its end; "lost" where it did neither; "quiet" where none ran or was told,
            and "false" where one was, of no leave.
        ms: from the client's act to the handler, where it was cut off.
        num_zombies: requests that were begun behind it.
    """

    name: str
    ms: float = 0.0
    num_zombies: int = 0

    @property
    def is_told(self) -> bool:
        """Whether the handler was cut off."""
        return self.name not in ("done", "lost", "quiet", "false")

    def __str__(self) -> str:
        ms = f" {self.ms:.1f} ms" if self.is_told else ""
        return f"{self.name}{ms}{f', {self.num_zombies} behind' if self.num_zombies else ''}"


@dataclass(frozen=True, slots=True)
class Cell:
    """One place in the matrix: who leaves, how, and from what."""

    stack_name: str
    mode: str
    is_tls: bool
    num_middlewares: int
    way_name: str
    kind: str

    @property
    def stack(self) -> Stack:
        return STACKS[self.stack_name]

    @property
    def way(self) -> Way:
        return WAYS[self.way_name]

    @property
    def is_ours(self) -> bool:
        return self.mode != "own"

    @property
    def exemption(self) -> "Exemption | None":
        """Why this one of ours is otherwise than the others."""
        found = (each for each in EXEMPTIONS if self.is_ours and each.holds_of(self))
        return next(found, None)

    @property
    def names(self) -> frozenset[str]:
        """The outcome must have one of these, where it is ours."""
        if self.exemption is not None:
            return self.exemption.names
        if not self.way.is_leave:
            return frozenset({"quiet", "done"})
        # Who closes first says it: the owner may read the end, or the error, before the watcher
        # sees it, and under TLS answers it by an alert that meets a closed socket.
        names = {"FIN", "RESET", "OWNER_CLOSED"}
        if "rst" not in self.way_name and self.way.reads and not self.is_tls:
            names.remove("RESET")
        return frozenset(names)

    @property
    def request_name(self) -> str:
        """The name of its request, whose work ends by the leave alone where that must be heard."""
        if self.is_ours and not self.names & {"quiet", "done"}:
            return named(str(self), LONG_WORK)
        return named(str(self), WORK_BEHIND if self.kind == "last" else WORK)

    def accepts(self, outcome: Outcome) -> bool:
        """Whether it is as it must be; of the servers without us everything is."""
        if not self.is_ours:
            return True
        return outcome.name in self.names and not outcome.num_zombies

    def __str__(self) -> str:
        tls = "tls" if self.is_tls else "plain"
        return "-".join(
            (self.stack_name, self.mode, tls, str(self.num_middlewares), self.way_name, self.kind)
        )


@dataclass(frozen=True, slots=True)
class Exemption:
    """Cells of ours that give something else.

    Attributes:
        what: the cells, in words.
        why: for the page.
        stacks: their names.
        ways: their names.
        names: of what they may give.
        modes: empty for all of ours.
    """

    what: str
    why: str
    stacks: tuple[str, ...]
    ways: tuple[str, ...]
    names: frozenset[str]
    modes: tuple[str, ...] = ()

    def holds_of(self, cell: Cell) -> bool:
        return (
            cell.stack_name in self.stacks
            and cell.way_name in self.ways
            and (not self.modes or cell.mode in self.modes)
        )


_TOLD = frozenset({"FIN", "RESET", "OWNER_CLOSED"})
_OF_UVICORN = tuple(name for name, stack in STACKS.items() if "uvicorn" in stack.server)
_OURS_OF_UVICORN = ("uvicorn-ours", "uvicorn-h11-ours", "gunicorn-ours")

EXEMPTIONS: tuple[Exemption, ...] = (
    Exemption(
        "uvicorn in all its forms, granian, asyncio streams, FIN behind 256 KiB of unread body",
        "the server stops reading, uvicorn at 64 KiB, and a FIN behind more than the kernel's "
        "receive window holds then cannot arrive; read the body, or open the window by `unblind` "
        "where there is that option (without us `receive()` sees it since it takes the body away)",
        (*_OF_UVICORN, *_OURS_OF_UVICORN, "granian", "streams"),
        ("fin_body",),
        _TOLD | {"done", "noticed"},
    ),
    Exemption(
        "`dw.start_server`, every leave",
        "its handler is cancelled, without a token; who wants one asks by `dw.watch`",
        ("streams",),
        tuple(name for name, way in WAYS.items() if way.is_leave),
        frozenset({"noticed"}),
        modes=("ours",),
    ),
    Exemption(
        "`dw.start_server`, FIN right after the last byte",
        "its handler is one of a connection and knows no last byte; it works for nobody",
        ("streams",),
        ("last_byte",),
        frozenset({"noticed"}),
        modes=("ours",),
    ),
    Exemption(
        "Sanic, FIN right after the last byte",
        "Sanic itself cancels all that runs on a connection at its end; the token is not set",
        ("sanic",),
        ("last_byte",),
        frozenset({"noticed"}),
    ),
)


def all_cells() -> list[Cell]:
    """The whole product, less what cannot be."""
    return [
        Cell(stack_name, mode, is_tls, num_middlewares, way_name, kind)
        for stack_name, stack in STACKS.items()
        for is_tls in ((False, True) if stack.has_tls else (False,))
        for mode in stack.modes
        for num_middlewares in stack.nums_middlewares
        for way_name, way in WAYS.items()
        if is_tls or not way.is_tls_only
        for kind in way.kinds
        if kind in stack.kinds
    ]


def some_cells() -> list[Cell]:
    """A part of ours: every way from every server in every mode, the other axes by turns."""
    chosen = []
    cells = all_cells()
    stacks = [(name, stack) for name, stack in STACKS.items() if not stack.is_twin]
    for turn, (stack_name, stack) in enumerate(stacks):
        is_tls = stack.has_tls and turn % 2 == 0
        groups: dict[tuple[str, str], list[Cell]] = {}
        for cell in cells:
            if cell.stack_name == stack_name and cell.is_tls is is_tls and cell.is_ours:
                groups.setdefault((cell.mode, cell.way_name), []).append(cell)
        chosen += [group[(turn + at) % len(group)] for at, group in enumerate(groups.values())]
    return chosen
