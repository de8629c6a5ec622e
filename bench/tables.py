"""Writes the tables of README.md, bench/README.md and docs/ from the results files they quote.

Each stands between ``<!-- measured: NAME -->`` and ``<!-- /measured -->`` and is made anew by
``python -m bench.tables``; a test compares, so that no page says what no file shows.
"""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

__all__ = ["PAGES", "TABLES", "rewritten"]

REPOSITORY = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"
PAGES = tuple(
    REPOSITORY / page
    for page in (
        "README.md",
        "bench/README.md",
        "docs/adapters/vllm.md",
        "docs/disaggregated.md",
        "docs/engine.md",
        "docs/gateways.md",
        "docs/models.md",
        "docs/scale.md",
    )
)
MARKED = re.compile(r"(<!-- measured: (\w+) -->\n).*?(<!-- /measured -->)", re.DOTALL)


#: A model that went on for so long without its client was not cancelled: it works for 1.2 s,
#: and its client leaves at its beginning.
NEVER_MS = 1000.0


class Results:
    """One results file, its rows and ratios by name."""

    def __init__(self, name: str) -> None:
        found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
        self._rows: dict[str, dict[str, float]] = {row["name"]: row for row in found["rows"]}
        self._ratios = {(r["name"], r["baseline"]): r for r in found["ratios"]}

    def has(self, row: str) -> bool:
        """Whether it was measured: a peer may have been absent."""
        return row in self._rows

    def of(self, row: str, percentile: str = "median") -> str:
        """One number of a row."""
        return _number(self._rows[row][percentile])

    def median(self, row: str) -> float:
        """The median as a number."""
        return self._rows[row]["median"]

    def share_noticed(self, server: str, way: str) -> float:
        """The share of leaves by one way that a server noticed."""
        noticed = f"{server}: noticed, {way}"
        timed = f"{server}: leave to end of work, {way}"
        return self._rows[timed]["count"] / self._rows[noticed]["count"] if self.has(timed) else 0.0

    def servers(self, suffix: str) -> list[str]:
        """What stands before ``suffix`` in the names of rows, in their order."""
        return [name.removesuffix(suffix) for name in self._rows if name.endswith(suffix)]

    def span(self, row: str) -> str:
        """The median with its interval."""
        row_ = self._rows[row]
        return f"{_number(row_['median'])} [{_number(row_['low'])}, {_number(row_['high'])}]"

    def ratio(self, name: str, baseline: str) -> str:
        """How the first compares with the second, with the interval."""
        ratio = self._ratios[name, baseline]
        return f"{ratio['ratio']:.2f} x [{ratio['low']:.2f}, {ratio['high']:.2f}]"


def _number(value: float) -> str:
    """Three digits, no exponent; a count as such."""
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:#.3g}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(
        "|" + "".join(f" {cell} |" if cell else " |" for cell in line) + "\n" for line in lines
    )


def _headline() -> str:
    latency = Results("latency")
    flag = "close to flag, {}"
    rows = [
        [
            f"the flag is stored, {said}",
            f"{latency.of(flag.format(condition))} µs",
            latency.ratio(flag.format(condition), f"close to bare loop, {condition}"),
        ]
        for condition, said in (
            ("idle", "loop idle"),
            ("loop blocked", "loop blocked"),
            ("GIL held", "GIL held by C code"),
        )
    ]
    rows.append(["a callback on the loop", f"{latency.of('close to callback, idle')} µs", ""])
    rows.append(
        [
            "the engine, decoding, has freed the blocks",
            f"{latency.of('engine at work: close to blocks free, idle')} µs",
            f"a step takes {latency.of('engine at work: one step')} µs",
        ]
    )
    return _table(
        ["client's `close()` until", "median", "beside a bare C epoll loop in the same run"], rows
    )


def _cost() -> str:
    cost, adapters = Results("watch_cost"), Results("adapters")
    alone = "CPU a request, httptools"
    return _table(
        ["what it costs", "median [95 %]", "beside it in the same run"],
        [
            [
                "arm and disarm a watch",
                f"{cost.of('arm+disarm')} ns through Python, {cost.of('arm+disarm in C')} ns in C",
                f"{cost.of('system calls of 10000 arm+disarm through Python')} system calls",
            ],
            *(
                [
                    f"`async with dw.watch(writer)`, {loop}",
                    f"{cost.span(f'watch, {loop}: more than empty')} µs",
                    "`asyncio.timeout`: "
                    f"{cost.span(f'asyncio.timeout(60), {loop}: more than empty')} µs",
                ]
                for loop in ("uvloop", "asyncio")
            ),
            ["a connection", f"{cost.of('memory of a connection in C')} bytes in C", ""],
            *(
                [
                    said,
                    f"{adapters.span(f'{alone}, {way}: added')} µs",
                    f"{adapters.ratio(f'{alone}, {way}', alone)} uvicorn's `{{}}`",
                ]
                for said, way in (
                    ("our protocol under uvicorn", "watched"),
                    ("`CancelOnDisconnect` under uvicorn", "CancelOnDisconnect"),
                    ("the usual listener task", "two tasks"),
                )
            ),
        ],
    )


def _latency() -> str:
    results = Results("latency")
    rows = []
    for condition, said in (
        ("idle", "idle"),
        ("loop blocked", "loop blocked for 4 ms"),
        ("GIL busy", "GIL busy"),
        ("GIL held", "GIL held for 4 ms"),
    ):
        bare, flag = f"close to bare loop, {condition}", f"close to flag, {condition}"
        rows.append(
            [
                said,
                *(results.of(bare, p) for p in ("median", "p99")),
                *(results.of(flag, p) for p in ("median", "p99")),
                results.ratio(flag, bare),
                results.of(f"close to callback, {condition}"),
            ]
        )
    return _table(
        ["", "bare loop p50", "p99", "flag p50", "p99", "flag / bare, p50", "callback p50"], rows
    )


def _latency_engine() -> str:
    results = Results("latency")
    rows = []
    for condition in ("idle", "loop blocked", "GIL busy", "GIL held"):
        of = "engine at work: close to {}, " + condition
        free = of.format("blocks free")
        rows.append(
            [
                condition,
                results.of(of.format("flag")),
                results.of(of.format("dropped")),
                results.of(free),
                results.of(free, "p99"),
            ]
        )
    return _table(["", "flag p50", "dropped p50", "blocks free p50", "p99"], rows)


def _watch_cost() -> str:
    results = Results("watch_cost")

    def served(kind: str, way: str) -> list[str]:
        cpu, calls = f"CPU a request, {kind}", f"instructions a request, {kind}"
        name = {"bare": "bare HTTP server", "http": "HTTP server with parser and task"}[kind]
        return [
            f"{name}, {way}",
            f"CPU {results.ratio(f'{cpu}, {way}', cpu)}; "
            f"{results.of(f'{calls}, {way}')} instead of {results.of(calls)} instructions",
        ]

    return _table(
        ["", ""],
        [
            [
                "arm + disarm",
                f"{results.of('arm+disarm')} ns through Python (an empty loop's "
                f"{results.of('empty loop')} included), {results.of('arm+disarm in C')} ns in C, "
                f"{results.of('system calls of 10000 arm+disarm through Python')} system calls "
                "in 10,000",
            ],
            [
                "attach + detach",
                f"{results.of('attach+detach')} ns through Python, "
                f"{results.of('attach+detach in C')} in C (bare `epoll_ctl` ADD + DEL: "
                f"{results.of('epoll add+del in C')})",
            ],
            [
                "`token.cancelled`; `CancelToken()`",
                f"{results.of('token.cancelled')} ns; {results.of('CancelToken()')} ns",
            ],
            [
                "memory of a connection in C",
                f"{results.of('memory of a connection in C')} bytes",
            ],
            *(
                [
                    f"`async with dw.watch(writer)`, more than an empty block, {loop}",
                    f"{results.span(f'watch, {loop}: more than empty')} µs; `asyncio.timeout(60)`: "
                    f"{results.span(f'asyncio.timeout(60), {loop}: more than empty')} µs",
                ]
                for loop in ("uvloop", "asyncio")
            ),
            served("bare", "armed"),
            served("bare", "armed with a new token"),
            served("http", "armed with a new token"),
            served("http", "watch"),
        ],
    )


def _adapters() -> str:
    results = Results("adapters")

    def cell(parser: str, way: str) -> str:
        alone, calls = f"CPU a request, {parser}", f"instructions a request, {parser}"
        if not results.has(f"{alone}, {way}: added"):
            return ""
        return (
            f"{results.span(f'{alone}, {way}: added')} µs; "
            f"{results.of(f'{calls}, {way}: added')} instructions; "
            f"{results.ratio(f'{alone}, {way}', alone)}"
        )

    parsers = ("httptools", "h11")
    header = [
        f"{parser} ({results.of(f'CPU a request, {parser}')} µs, "
        f"{results.of(f'instructions a request, {parser}')} instructions)"
        for parser in parsers
    ]
    return _table(
        ["", *header],
        [
            [said, *(cell(parser, way) for parser in parsers)]
            for said, way in (
                ("our protocol", "watched"),
                ("`CancelOnDisconnect`", "CancelOnDisconnect"),
                ("both", "watched, CancelOnDisconnect"),
                ("a listener beside the handler, two tasks", "two tasks"),
            )
        ],
    )


def _baselines() -> str:
    results = Results("baselines")
    rows = []
    for who in (
        "our flag",
        "our callback",
        "receive() with our protocol",
        "bare C loop",
        "Python epoll thread",
        "receive() listener",
        "is_disconnected() every 10 ms",
        "is_disconnected() every 100 ms",
    ):
        plain, behind = f"{who}, plain close", f"{who}, close behind a pipelined request"
        heard = results.of(behind) if results.has(behind) else "never within 500 ms"
        rows.append([who, results.of(plain), results.of(plain, "p99"), heard])
    return _table(["", "plain close p50", "p99", "behind a pipelined request p50"], rows)


def _scaling() -> str:
    results = Results("scaling")
    rows = []
    for count in (10, 100, 1_000, 10_000, 18_000):
        bare, flag = f"close to bare loop, {count} attached", f"close to flag, {count} attached"
        rows.append(
            [
                f"{count:,}",
                results.of(bare),
                results.of(flag),
                results.of(flag, "p99"),
                results.ratio(flag, bare),
            ]
        )
    return _table(["attached", "bare loop p50", "flag p50", "p99", "flag / bare, p50"], rows)


def _worker() -> str:
    results = Results("worker")
    sides = ("server", "worker", "both")
    return _table(
        ["CPU, µs", "server", "worker", "both"],
        [
            [what, *(results.of(f"{what}, {side}") for side in sides)]
            for what in (
                "a request of FP32[1,16]",
                "a chunk of a stream of 20",
                "a request of 16 MiB",
            )
        ]
        + [["a copy of 16 MiB", "", "", results.of("a copy of 16 MiB")]],
    )


def _scale() -> str:
    results = Results("scale")
    one, two = "one process", "2 frontends"
    rows = [
        [
            f"{what}, µs of CPU",
            results.of(f"{what}, {one}, frontend"),
            results.of(f"{what}, {two}, frontend"),
            results.of(f"{what}, {two}, engine"),
        ]
        for what in ("a request of one token", "a token of a stream")
    ]
    connection = "memory of an idle connection"
    rows += [
        [
            "memory of the process, MiB",
            results.of(f"memory of a frontend, {one}"),
            results.of(f"memory of a frontend, {two}"),
            results.of(f"memory of the engine, {two}"),
        ],
        [
            f"{connection}, KiB",
            *(results.of(f"{connection}, {of}") for of in (one, two)),
            "",
        ],
    ]
    return _table(["", "one process, engine and all", "each of 2 frontends", "their engine"], rows)


def _flag_check() -> str:
    results = Results("flag_check")
    rows = []
    for count in (1, 8, 32):
        of = f"{count} that decode, 256 that wait"
        rows.append(
            [
                str(count),
                results.of(f"a step, {of}"),
                results.of(f"a look at all flags, {of}"),
                results.of(f"a glance at those of the running, {of}"),
                f"{results.span(f'flag checks of a step, {of}')} %",
            ]
        )
    return _table(
        ["rows", "a step, µs", "all flags, µs", "those of the running, µs", "checks of a step"],
        rows,
    )


def _gateways() -> str:
    results = Results("gateways")
    rows = []
    for row in (
        "infer",
        "generate",
        "generate_stream of one response",
        "generate_stream before its first chunk",
        "generate_stream between two chunks",
        "infer in a queue",
    ):
        action, _, when = row.partition(" ")
        of = f"work after the close, {row}, {{}}"
        rows.append(
            [
                f"`{action}` {when}".strip(),
                results.of(of.format("direct")),
                results.of(of.format("gateway")),
                results.of(of.format("gateway"), "p90"),
            ]
        )
    return _table(
        ["milliseconds", "Triton's HTTP port", "through the gateway", "of these the p90"], rows
    )


def _pd() -> str:
    results = Results("pd")
    ways = (
        ("the proxy watches its client, the node the proxy", "ours"),
        ("the abort endpoint of the node, called at once", "abort endpoint only"),
        ("a lease of 5 s", "lease only"),
        ("nothing; until the benchmark stopped to look", "none"),
    )
    return _table(
        ["what lets go of the blocks", "block-seconds stranded, a request", "each block, ms"],
        [
            [said, results.span(f"stranded, {way}"), results.span(f"stranded, {way}, a block")]
            for said, way in ways
        ],
    )


def _gateways_cost() -> str:
    results = Results("gateways")

    def compared(what: str, name: str, unit: str) -> list[str]:
        direct, gateway = f"{name}, direct", f"{name}, gateway"
        return [
            what,
            f"{results.of(direct)} {unit}",
            f"{results.of(gateway)} {unit}",
            results.ratio(gateway, direct),
        ]

    def spent(what: str, name: str) -> list[str]:
        return [what, "", f"{results.of(f'CPU of the gateway, {name}')} µs", ""]

    return _table(
        ["", "Triton's HTTP port", "through the gateway", ""],
        [
            compared("`infer` of FP32[1,16], one after another", "infer", "µs"),
            compared("32 streams, a chunk every 20 ms", "chunks, paced", "chunks/s"),
            compared("8 streams, chunks without a pause", "chunks, unpaced", "chunks/s"),
            spent("CPU of the gateway: an `infer`", "infer"),
            spent("a chunk of those every 20 ms", "a chunk, paced"),
            spent("a chunk without a pause", "a chunk, unpaced"),
        ],
    )


def _vllm_prompt() -> str:
    results = Results("vllm_prompt")
    left = "after its client left"
    return _table(
        ["a prompt of 12,000 tokens in one step, 24 layers", ""],
        [
            ["whole", f"{results.of('a prompt of 12,000 tokens, whole')} s"],
            ["from its client's leaving to the end of the step", f"{results.of(left)} s"],
            ["of these the p90", f"{results.of(left, 'p90')} s"],
            ["layers that were begun for it", results.of("layers that were begun for it")],
        ],
    )


def _vllm() -> str:
    results = Results("vllm")

    def row(what: str, name: str) -> list[str]:
        return [what, *(results.of(f"{name}, {server}") for server in ("stock", "with the plugin"))]

    close, hidden = "a close", "a pipelined request, then a close"
    tokens, idle = "tokens of who stays", "until nothing runs"
    return _table(
        ["", "vLLM alone", "with the plugin"],
        [
            row("ms until nothing runs for who left by a close", f"{idle}, {close}"),
            row("the same, behind a pipelined request", f"{idle}, {hidden}"),
            row("tokens a second of 8 who stay, as 72 have left so", f"{tokens}, {hidden}"),
        ],
    )


def _serving() -> str:
    results = Results("engine")
    rows = []
    for share in (10, 50, 90):
        for policy in ("cancel off", "cancel between steps", "cancel in steps, too", "oracle"):
            of = f"{policy}, {share} % leave"
            throughput = f"live throughput, {of}"
            if policy == "oracle":
                rows.append([f"{share} %", policy, results.of(throughput), "", "", ""])
                continue
            rows.append(
                [
                    f"{share} %",
                    policy,
                    results.of(throughput),
                    results.ratio(throughput, f"live throughput, oracle, {share} % leave"),
                    results.of(f"tokens after a leave, {of}: mean"),
                    results.of(f"block-seconds after a leave, {of}: mean"),
                ]
            )
    return _table(
        [
            "leave",
            "",
            "live tokens/s",
            "beside the oracle",
            "wasted tokens a leave",
            "block-seconds a leave",
        ],
        rows,
    )


def _prefill() -> str:
    results = Results("engine")
    idle = "first token on an idle engine"
    after = "first token after a prefill of 8,000 tokens was cancelled"
    since_leave = "first token of who came when the other left"
    return _table(
        ["", "ms", "beside an idle engine"],
        [
            [
                "flag to the end of a prefill of 8,000 tokens",
                results.of("flag to the end of a prefill of 8,000 tokens"),
                "",
            ],
            [after, results.of(after), results.ratio(after, idle)],
            [since_leave, results.of(since_leave), ""],
            [idle, results.of(idle), ""],
        ],
    )


def _decode() -> str:
    results = Results("engine")
    ours = "decode, 32 at once, our engine"
    rows = [["ours", results.of(ours), ""]]
    for who in ("transformers.generate", "vLLM, float32", "vLLM, bfloat16"):
        other = f"decode, 32 at once, {who}"
        rows.append([who, results.of(other), results.ratio(ours, other)])
    return _table(["decode, 32 rows", "tokens/s", "ours beside it"], rows)


def _invariant() -> str:
    results = Results("invariant")
    rows = []
    for what in (
        "a step of 1",
        "a step of 32",
        "a prompt of 128",
        "a prompt of 512",
        "a prompt of 2048",
        "a prompt of 4000",
    ):
        fixed = f"{what}, batch-invariant"
        rows.append([what, results.of(what), results.of(fixed), results.ratio(fixed, what)])
    return _table(["", "ms", "batch-invariant, ms", ""], rows)


#: What stands between the marks, by the name in them.
def _frontend() -> str:
    results = Results("frontend")
    bare = "uvicorn's {}"

    def row(said: str, of: str) -> list[str]:
        ours, theirs = f"ours: {of}", f"Triton: {of}"
        has_peer = results.has(theirs)
        return [
            said,
            results.span(ours),
            results.of(theirs) if has_peer else "",
            f"{results.ratio(ours, theirs if has_peer else bare)} "
            + ("Triton's" if has_peer else "uvicorn's `{}`"),
        ]

    return _table(
        ["microseconds of CPU", "ours [95 %]", "Triton", "beside it"],
        [
            ["uvicorn, which answers `{}` to the same request", results.span(bare), "", ""],
            row("infer of FP32[1,16] in JSON, model in the server", "infer, in the server"),
            row(
                "the same, with its line in the log",
                "infer, in the server, with its line in the log",
            ),
            row("the same, Python model in a worker process", "infer, in a worker process"),
            row("a chunk of a stream of 20, in the server", "a chunk of a stream, in the server"),
            row(
                "the same, Python model in a worker process",
                "a chunk of a stream, in a worker process",
            ),
        ],
    )


def _frontend_copies() -> str:
    results = Results("frontend")
    return _table(
        ["16 MiB of a binary tensor, there and back", "copies of each byte"],
        [
            [said, results.of(f"copies of each byte, {of}")]
            for said, of in (
                ("model in the server", "16 MiB there and back, in the server"),
                ("model in a worker process", "through a worker process"),
            )
        ],
    )


def _frontend_leaves() -> str:
    results = Results("frontend")

    def cell(server: str, way: str, how: str) -> str:
        of = f"{server}, leave to end: {way}, {how}"
        if not results.has(of):
            return ""
        is_heard = results.median(of) < NEVER_MS
        return f"{results.of(of)} ms" if is_heard else "never, it ran to its end"

    def queued(server: str) -> str:
        of = f"{server}, run all the same: queued, FIN"
        if not results.has(of):
            return ""
        return "is run all the same" if results.median(of) else "never runs"

    rows = [
        [f"{way}, {how}", cell("ours", way, how), cell("Triton", way, how)]
        for way in (
            "infer",
            "generate",
            "generate_stream, chunks flowing",
            "generate_stream, before its first chunk",
        )
        for how in ("FIN", "reset")
    ]
    rows.append(["infer, waiting behind another, FIN", queued("ours"), queued("Triton")])
    return _table(["the client leaves; until its model stops", "ours", "Triton"], rows)


def _side_by_side() -> str:
    results = Results("side_by_side")

    def cell(name: str, way: str) -> str:
        share = results.share_noticed(name, way)
        if not share:
            return "never"
        soon = f"{results.of(f'{name}: leave to end of work, {way}')} ms"
        return soon if share == 1 else f"{100 * share:.0f} %, {soon}"

    def row(name: str) -> list[str]:
        quiet, among = f"{name}: answers, nobody leaves", f"{name}: answers, half leave"
        kept = results.median(among) / results.median(quiet)
        return [
            name,
            *(cell(name, way) for way in ("fin", "rst", "behind_request", "behind_body")),
            f"{results.median(f'{name}: work done for who left'):.0f} %",
            f"{100 * kept:.0f} %",
        ]

    return _table(
        [
            "until the work ends",
            "FIN",
            "reset",
            "FIN behind a pipelined request",
            "FIN behind an unread body",
            "work done for who left",
            "answers kept while half leave",
        ],
        [row(name) for name in results.servers(": answers, nobody leaves")],
    )


TABLES: dict[str, Callable[[], str]] = {
    "side_by_side": _side_by_side,
    "frontend": _frontend,
    "frontend_copies": _frontend_copies,
    "frontend_leaves": _frontend_leaves,
    "gateways": _gateways,
    "gateways_cost": _gateways_cost,
    "headline": _headline,
    "pd": _pd,
    "cost": _cost,
    "latency": _latency,
    "latency_engine": _latency_engine,
    "watch_cost": _watch_cost,
    "adapters": _adapters,
    "baselines": _baselines,
    "scale": _scale,
    "scaling": _scaling,
    "worker": _worker,
    "flag_check": _flag_check,
    "invariant": _invariant,
    "serving": _serving,
    "vllm": _vllm,
    "vllm_prompt": _vllm_prompt,
    "prefill": _prefill,
    "decode": _decode,
}


def rewritten(page: Path) -> str:
    """The page with each of its tables made anew from the results.

    Raises:
        KeyError: a mark names no table, or a table a row that was not measured.
    """
    return MARKED.sub(lambda m: m[1] + "\n" + TABLES[m[2]]() + "\n" + m[3], page.read_text())


def main() -> None:
    for page in PAGES:
        page.write_text(rewritten(page))
        print(f"written: {page.relative_to(REPOSITORY)}")


if __name__ == "__main__":
    main()
