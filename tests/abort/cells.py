"""The cells of the matrix, and the one table of what each must give."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "KINDS",
    "PHASES",
    "WHO",
    "Cell",
    "Expected",
    "Kind",
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
}

#: What a request is doing when that happens: the page's word, and the one in metrics and log.
PHASES = {"queued": "waiting", "prefill": "prefill", "decode": "decode", "finished": "decode"}

_ALL = tuple(PHASES)
_ENDLESS = {"max_tokens": 100_000, "ignore_eos": True}
_ENDLESS_RESPONSE = {"max_output_tokens": 100_000, "ignore_eos": True}
_CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "The class"}]}


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of endpoint.

    Attributes:
        work: what does it: the engine, the encoder or a model in a process of its own.
        body: of a request that ends by a cancel alone, where the engine works on it.
        phases: those that there are.
        begins_early: whether a stream's head comes when the request is queued.
    """

    title: str
    path: str
    work: str = "engine"
    body: Mapping[str, Any] = field(default_factory=dict)
    phases: tuple[str, ...] = _ALL
    is_stream: bool = False
    begins_early: bool = False


#: A further endpoint is a further entry.
KINDS = {
    "infer": Kind(
        "infer", "/v2/models/held/infer", "process", phases=("queued", "decode", "finished")
    ),
    "generate": Kind(
        "generate", "/v2/models/tiny/generate", body={"text_input": "The class", **_ENDLESS}
    ),
    "generate_stream": Kind(
        "generate_stream",
        "/v2/models/tiny/generate_stream",
        body={"text_input": "The class", **_ENDLESS},
        is_stream=True,
    ),
    "completions": Kind(
        "completions",
        "/v1/completions",
        body={"model": "tiny", "prompt": "The class", **_ENDLESS},
    ),
    "completions_stream": Kind(
        "completions, stream",
        "/v1/completions",
        body={"model": "tiny", "prompt": "The class", "stream": True, **_ENDLESS},
        is_stream=True,
        begins_early=True,
    ),
    "chat": Kind("chat", "/v1/chat/completions", body={**_CHAT, **_ENDLESS}),
    "chat_stream": Kind(
        "chat, stream",
        "/v1/chat/completions",
        body={**_CHAT, "stream": True, **_ENDLESS},
        is_stream=True,
        begins_early=True,
    ),
    "responses": Kind(
        "responses",
        "/v1/responses",
        body={"model": "tiny", "input": "The class", **_ENDLESS_RESPONSE},
    ),
    "responses_stream": Kind(
        "responses, stream",
        "/v1/responses",
        body={"model": "tiny", "input": "The class", "stream": True, **_ENDLESS_RESPONSE},
        is_stream=True,
        begins_early=True,
    ),
    "embeddings": Kind(
        "embeddings",
        "/v1/embeddings",
        "encoder",
        {"model": "bert", "input": ["one two three", "two"]},
        phases=("queued", "prefill", "finished"),
    ),
}


@dataclass(frozen=True, slots=True)
class Expected:
    """What a cell must give.

    Attributes:
        signals: which sources count one more, each by exactly one; one of these sets.
        reasons: of the outcome, one of these; empty where it finished.
        answers: to the client, one of these: a status, ``499 in the stream``, or ``nothing``.
        status: of the log line.
        replies: of the abort API, one of these; empty where it is not asked.
    """

    signals: tuple[frozenset[str], ...]
    outcome: str
    reasons: frozenset[str]
    phase: str
    answers: frozenset[str]
    status: int
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


#: By who ends it: the sources that count, the reasons that may come of it, the status.
_ENDS: dict[str, tuple[tuple[set[str], ...], set[str], int | None]] = {
    "fin": (({"fin"},), {"fin"}, None),
    # Where the server's own read takes the error first, the watcher sees the end of the stream.
    "rst": (({"reset"}, {"fin"}), {"reset", "fin"}, None),
    "api": (({"aborted"},), {"aborted"}, 499),
    "deadline": (({"deadline"},), {"deadline"}, 504),
    "shutdown": (({"shutdown"},), {"shutdown"}, 503),
    # Two signals, and whichever came first is the reason; a cancel that finds the request over
    # is none.
    "both": (({"fin", "aborted"}, {"fin"}), {"fin", "aborted"}, None),
}


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
    def is_left(self) -> bool:
        """Whether its client is gone then."""
        return self.who in ("fin", "rst", "both")

    @property
    def is_told_at_once(self) -> bool:
        """Whether it ends on the spot, so that nothing else can be heard of before it is over."""
        return self.kind.work == "process" or (
            self.kind.work == "encoder" and self.phase == "queued"
        )

    @property
    def expected(self) -> Expected:
        signals, reasons, status = _ENDS[self.who]
        asks = self.who in ("api", "both")
        if self.phase == "finished":
            # Only a connection can still end; nothing else is heard of, and nothing changes.
            return Expected(
                tuple(frozenset(each & {"fin", "reset"}) for each in signals),
                "finished",
                frozenset(),
                "decode",
                frozenset({"200"}),
                200,
                frozenset({"already_finished"}) if asks else frozenset(),
            )
        if status is None:
            answers, logged = {"nothing"}, 200 if self.has_head else 499
            if self.who == "both" and self.has_head:
                # Where the abort was first, the client that half-closed may still be told.
                answers.add("499 in the stream")
        elif self.has_head:
            answers, logged = {f"{status} in the stream"}, 200
        else:
            answers, logged = {str(status)}, status
        replies = {"api": {"cancelled"}, "both": {"cancelled", "already_cancelled"}}
        return Expected(
            tuple(map(frozenset, signals)),
            "cancelled",
            frozenset(reasons),
            PHASES[self.phase],
            frozenset(answers),
            logged,
            frozenset(replies.get(self.who, ())),
        )

    def complaints(self, observed: Observed) -> list[str]:
        """What is not as it must be, a sentence each."""
        expected = self.expected
        found = []

        def check(name: str, got: object, wanted: object, holds: bool) -> None:
            if not holds:
                found.append(f"{self}: {name} is {got}, must be {wanted}")

        signals = [dict.fromkeys(sources, 1) for sources in expected.signals]
        check("signals", dict(observed.signals), signals, observed.signals in signals)
        outcomes = {(expected.outcome, expected.phase): 1}
        check("outcomes", dict(observed.outcomes), outcomes, observed.outcomes == outcomes)
        check("number of log lines", len(observed.lines), 1, len(observed.lines) == 1)
        for line in observed.lines:
            check(
                "logged outcome",
                line["outcome"],
                expected.outcome,
                line["outcome"] == expected.outcome,
            )
            check(
                "logged status", line["status"], expected.status, line["status"] == expected.status
            )
            if expected.reasons:
                reason, phase = line["reason"], line["phase"]
                check("logged reason", reason, set(expected.reasons), reason in expected.reasons)
                check("logged phase", phase, expected.phase, phase == expected.phase)
        answer, answers = observed.answer, set(expected.answers)
        check("answer", answer, answers, answer in answers)
        check("num_late", observed.num_late, 0, observed.num_late == 0)
        replies = expected.replies or {""}
        check("reply", observed.reply, set(replies), observed.reply in replies)
        if self.who == "both" and self.phase != "finished":
            # Who is told that it was him, and what the log says, are the same story.
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
    for turn, (name, kind) in enumerate(KINDS.items()):
        for at, who in enumerate(who for who in WHO if who != "shutdown"):
            chosen.append(Cell(name, who, kind.phases[(turn + at) % len(kind.phases)]))
    # One shutdown of each kind of work.
    return [*chosen, *(Cell(name, "shutdown", "queued") for name in ("chat_stream", "embeddings"))]
