"""The cells of the matrix, and the one table of what each must give."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain, product
from typing import Any

from tests.abort.kinds import KINDS, PHASES, Kind

__all__ = [
    "SO_FAR",
    "WHO",
    "Cell",
    "Expected",
    "Observed",
    "all_cells",
    "some_cells",
]

#: Who ends a request, and how the page calls it.
WHO = {
    "fin": "client: FIN",
    "rst": "client: RST",
    "api": "abort API",
    "deadline": "deadline",
    "shutdown": "shutdown",
    "both": "FIN and abort API at once",
    "rst_deadline": "RST and deadline at once",
    "api_deadline": "abort API and deadline at once",
    "shutdown_fin": "shutdown and FIN at once",
}

#: What each of these does; of two, the other comes first in every second phase.
_CAUSES: dict[str, tuple[str, ...]] = {
    "both": ("fin", "api"),
    "rst_deadline": ("rst", "deadline"),
    "api_deadline": ("api", "deadline"),
    "shutdown_fin": ("shutdown", "fin"),
}


@dataclass(frozen=True, slots=True)
class Expected:
    """What a cell must give.

    Attributes:
        signals: which sources count one more, each by exactly one; one of these sets.
        outcomes: how many there are of each kind and phase.
        reasons: of the outcome, one of these; empty where it finished.
        answers: to the client, one of these: a status, ``499 in the stream``, or ``nothing``.
        statuses: of the log line, one of these.
        replies: of the abort API, one of these; empty where it is not asked.
    """

    signals: tuple[frozenset[str], ...]
    outcome: str
    outcomes: Mapping[tuple[str, str], int]
    reasons: frozenset[str]
    phase: str
    answers: frozenset[str]
    statuses: frozenset[int]
    replies: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Observed:
    """What a cell gave.

    Attributes:
        signals: how many more each source counted, connections that the server closed left out.
        outcomes: how many more ended so, by outcome and phase, less what the log says of others.
        lines: the log lines of the request: outcome, reason, phase and status.
        num_late: tokens that were generated after the cancel.
    """

    signals: Mapping[str, int]
    outcomes: Mapping[tuple[str, str], int]
    lines: tuple[Mapping[str, Any], ...]
    answer: str
    reply: str = ""
    num_late: int = 0

    def __str__(self) -> str:
        """The entry of the page."""
        (line,) = self.lines
        answer = self.answer.replace("nothing", "no answer")
        if line["outcome"] == "finished":
            return f"finished, {answer}"
        return f"{line['reason']}, {answer}"


#: By what ends a request: the source of signals that counts it, one of these. Where the server's
#: own read takes the error of a reset first, the watcher sees the end of the stream.
_SOURCES: dict[str, tuple[str, ...]] = {
    "fin": ("fin",),
    "rst": ("reset", "fin"),
    "api": ("aborted",),
    "deadline": ("deadline",),
    "shutdown": ("shutdown",),
}
#: What the client is answered, where it is there, and how a response of the background is found.
_STATUSES = {"api": 499, "deadline": 504, "shutdown": 503}
_FOUND = {"api": "cancelled", "deadline": "failed", "shutdown": "failed"}
_LEAVES = ("fin", "rst")

#: A stream that ends without an event for its end, as the API has none for a cancel.
SO_FAR = "its events so far"


@dataclass(frozen=True, slots=True)
class Cell:
    """One place in the matrix: what is asked, who ends it, and when."""

    kind_name: str
    who: str
    phase: str

    @property
    def kind(self) -> Kind:
        return KINDS[self.kind_name]

    @property
    def has_head(self) -> bool:
        """Whether the head of its answer is out when it ends."""
        kind = self.kind
        return kind.begins_early or (kind.is_stream and self.phase == "decode")

    @property
    def causes(self) -> tuple[str, ...]:
        """What ends it, in the order in which that is done."""
        causes = _CAUSES.get(self.who, (self.who,))
        return causes if list(PHASES).index(self.phase) % 2 == 0 else causes[::-1]

    @property
    def is_left(self) -> bool:
        """Whether its client is gone then."""
        return any(cause in _LEAVES for cause in self.causes)

    @property
    def is_told_at_once(self) -> bool:
        """Whether it ends on the spot, so that nothing else can be heard of before it is over."""
        return self.kind.work == "process" or (
            self.kind.work == "encoder" and self.phase == "queued"
        )

    @property
    def runs_on(self) -> bool:
        """Whether nothing of what is done ends it."""
        return self.phase != "finished" and not self._ends

    @property
    def num_signals(self) -> int:
        """Signals that are counted before the request is let go."""
        sizes = [len(each) for each in self.expected.signals]
        if self.kind.outlives and "deadline" in self.causes and self.phase != "finished":
            return min(sizes) - 1  # no handler is there that would look at the time
        is_held = self.who == "both" and not self.is_told_at_once
        return max(sizes) if is_held else min(sizes)

    @property
    def expected(self) -> Expected:
        causes, is_over = self.causes, self.phase == "finished"
        finishes = is_over or self.runs_on
        phase = "decode" if finishes else PHASES[self.phase]
        outcomes = Counter({("finished" if finishes else "cancelled", phase): 1})
        others = "finished" if finishes else "cancelled"
        outcomes[others, "decode" if finishes else "waiting"] += self.kind.num_prompts - 1
        reasons = {reason for cause in self._ends for reason in _SOURCES[cause]}
        replies: set[str] = set()
        if "api" in causes:
            replies = {"already_finished"} if is_over else {"cancelled"}
            if len(self._ends) > 1 and not is_over:
                replies.add("already_cancelled")
        return Expected(
            self._signals(set() if finishes else reasons),
            others,
            outcomes,
            frozenset() if finishes else frozenset(reasons),
            phase,
            frozenset(self._answers(finishes)),
            frozenset(self._logged(finishes)),
            frozenset(replies),
        )

    @property
    def _ends(self) -> tuple[str, ...]:
        """Those causes that a request heeds which has not ended."""
        outlives = self.kind.outlives
        return tuple(cause for cause in self.causes if not (outlives and cause in _LEAVES))

    def _signals(self, reasons: set[str]) -> tuple[frozenset[str], ...]:
        """The sets of sources that may count: whoever finds it over does not."""
        choices: list[tuple[tuple[str, ...], ...]] = []
        for cause in self.causes:
            alternatives: tuple[tuple[str, ...], ...] = tuple((each,) for each in _SOURCES[cause])
            # A connection's end is counted whatever runs on it; but a server that ends may close
            # it first.
            is_optional = len(self.causes) > 1 and (
                cause not in _LEAVES or "shutdown" in self.causes
            )
            if self.phase == "finished" and cause not in _LEAVES:
                alternatives = ((),)
            choices.append((*alternatives, ()) if is_optional else alternatives)
        sets = {frozenset(chain.from_iterable(choice)) for choice in product(*choices)}
        return tuple(sorted((each for each in sets if not reasons or each & reasons), key=sorted))

    def _answers(self, finishes: bool) -> set[str]:
        if self.kind.outlives and not self.kind.is_stream:
            found = {"incomplete"} if finishes else {_FOUND[cause] for cause in self._ends}
            return {f"200, then {each}" for each in found}
        if self.phase == "finished":
            return {"200"}
        answers = set()
        if self.is_left:
            answers.add("nothing")
        for cause in self._ends:
            # Whoever half-closed may still be told, where the other was first.
            if cause in _LEAVES or (self.is_left and not (self.has_head and "fin" in self.causes)):
                continue
            status = str(_STATUSES[cause])
            if self.kind.outlives and cause == "api":
                answers.add(SO_FAR)
            else:
                answers.add(f"{status} in the stream" if self.has_head else status)
        return answers

    def _logged(self, finishes: bool) -> set[int]:
        if self.kind.outlives:
            return {0}  # the line is its own, not that of the request that made it
        if finishes or self.has_head:
            return {200}
        return {_STATUSES.get(cause, 499) for cause in self._ends}

    def complaints(self, observed: Observed) -> list[str]:
        """What is not as it must be, a sentence each."""
        expected = self.expected
        found = []

        def check(name: str, got: object, wanted: object, holds: bool) -> None:
            if not holds:
                found.append(f"{self}: {name} is {got}, must be {wanted}")

        signals = [dict.fromkeys(sources, 1) for sources in expected.signals]
        check("signals", dict(observed.signals), signals, observed.signals in signals)
        check(
            "outcomes",
            dict(observed.outcomes),
            dict(expected.outcomes),
            observed.outcomes == expected.outcomes,
        )
        check("number of log lines", len(observed.lines), 1, len(observed.lines) == 1)
        for line in observed.lines:
            status, statuses = line["status"], set(expected.statuses)
            check(
                "logged outcome",
                line["outcome"],
                expected.outcome,
                line["outcome"] == expected.outcome,
            )
            check("logged status", status, statuses, status in statuses)
            if expected.reasons:
                reason, phase = line["reason"], line["phase"]
                check("logged reason", reason, set(expected.reasons), reason in expected.reasons)
                check("logged phase", phase, expected.phase, phase == expected.phase)
                # The cause itself is counted, too.
                sources = {"fin", "reset"} if reason in ("fin", "reset") else {reason}
                told = set(observed.signals)
                if reason in expected.reasons and observed.signals in signals:
                    check("signals", told, f"with {reason}", bool(sources & told))
        answer, answers = observed.answer, set(expected.answers)
        check("answer", answer, answers, answer in answers)
        check("num_late", observed.num_late, 0, observed.num_late == 0)
        replies = expected.replies or {""}
        check("reply", observed.reply, set(replies), observed.reply in replies)
        if len(replies) > 1 and self.kind.num_prompts == 1:
            # Who is told that it was him, and what the log says, are the same story. (Of several
            # prompts each may have been ended by another.)
            is_abort = any(line["reason"] == "aborted" for line in observed.lines)
            same = is_abort == (observed.reply == "cancelled")
            check("reply", observed.reply, "that of the logged reason", same)
        return found

    def __str__(self) -> str:
        return f"{self.kind_name}-{self.who}-{self.phase}"


def all_cells() -> list[Cell]:
    """The whole product, less the phases that a kind has not."""
    return [
        Cell(name, who, phase)
        for name, kind in KINDS.items()
        for who in WHO
        for phase in kind.phases
    ]


def some_cells() -> list[Cell]:
    """Each kind with each that ends it, the phases by turns; shutdowns are for the whole run."""
    chosen = []
    alone = [who for who in WHO if who not in _CAUSES and who != "shutdown"]
    pairs = [who for who in _CAUSES if who != "shutdown_fin"]
    for turn, (name, kind) in enumerate(KINDS.items()):
        for at, who in enumerate((*alone, pairs[turn % len(pairs)])):
            chosen.append(Cell(name, who, kind.phases[(turn + at) % len(kind.phases)]))
    # A shutdown of each kind of work, and of what has no client.
    return [
        *chosen,
        *(Cell(name, "shutdown", "queued") for name in ("chat_stream", "embeddings")),
        Cell("responses_background", "shutdown", "decode"),
        Cell("completions_prompts", "shutdown_fin", "prefill"),
    ]
