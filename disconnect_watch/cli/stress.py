"""``disconnect-watch stress``."""

import asyncio
import json
import secrets
import signal
import sys
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

from disconnect_watch.cli._app import app, fail, typer

if TYPE_CHECKING:
    from disconnect_watch.stress import StressOptions
    from disconnect_watch.stress.exchange import Exchange
    from disconnect_watch.stress.report import Counts, Report
    from disconnect_watch.stress.target import Target

__all__ = ["stress"]


class WayOption(StrEnum):
    """How clients leave, see ``stress.Way``."""

    FIN = "fin"
    RST = "rst"
    HALF_CLOSE = "half_close"
    BEHIND_REQUEST = "behind_request"


@app.command()
def stress(
    target: Annotated[
        str, typer.Argument(help="URL of a generate or generate_stream, or host:port of a raw one.")
    ],
    *,
    stay: Annotated[int, typer.Option(min=0, help="Clients that stay to their end.")] = 50,
    leave: Annotated[int, typer.Option(min=0, help="Clients that leave.")] = 50,
    way: Annotated[
        list[WayOption] | None, typer.Option(help="To leave by, once for each; without it all.")
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Clients at the same time.")] = 8,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Of an earlier report, for the same clients again.")
    ] = None,
    max_delay: Annotated[
        float, typer.Option(min=0, help="Seconds that one that leaves may wait before.")
    ] = 0.1,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds that a client has.")] = 30.0,
    max_seconds: Annotated[
        float, typer.Option(min=0, help="After which no more clients begin.")
    ] = 60.0,
    settle: Annotated[
        float, typer.Option(min=0, help="Seconds for the server to be done with them all.")
    ] = 10.0,
    metrics: Annotated[
        str | None, typer.Option(help="URL of the server's metrics; without it its /metrics.")
    ] = None,
    prompt: Annotated[str, typer.Option(help="To generate from.")] = "The class",
    max_tokens: Annotated[int, typer.Option(min=1, help="For those who stay.")] = 32,
    leaver_max_tokens: Annotated[
        int, typer.Option(min=1, help="For those who leave: more than they wait for.")
    ] = 100_000,
    send: Annotated[
        str, typer.Option(help="Line to a raw server; {index} is the client's number.")
    ] = "hello {index}",
    lines: Annotated[
        int, typer.Option(min=0, help="Of a raw answer; 0 for all until the server closes.")
    ] = 1,
    expect: Annotated[
        str | None, typer.Option(help="What each line of a raw answer must be.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Report as JSON.")] = False,
) -> None:
    """Send clients to a server, some of which leave, and see that no other one is hurt.

    Progress goes to standard error, the report to standard output. The exit code is 0
    only if all of its checks hold. A server of ours is asked for its own counts too;
    nobody else may use it meanwhile.
    """
    try:
        import uvloop

        from disconnect_watch.stress import (
            StressOptions,
            TargetError,
            Way,
            parse_target,
        )
        from disconnect_watch.stress.generate import GenerateExchange
        from disconnect_watch.stress.lines import LineExchange
    except ImportError as error:
        fail(f"{error}; install it with: pip install 'disconnect-watch[server]'")

    try:
        server = parse_target(target)
        counts_at = parse_target(metrics) if metrics else server.with_path("/metrics")
        exchange: Exchange = (
            LineExchange(send=send, num_lines=lines or None, expect=expect)
            if server.path is None
            else GenerateExchange(
                server, prompt=prompt, max_tokens=max_tokens, leaver_max_tokens=leaver_max_tokens
            )
        )
    except TargetError as error:
        fail(str(error))
    options = StressOptions(
        num_stay=stay,
        num_leave=leave,
        concurrency=concurrency,
        ways=tuple(Way(option.value) for option in way) if way else tuple(Way),
        max_delay=max_delay,
        seed=secrets.randbits(32) if seed is None else seed,
        timeout=timeout,
        max_seconds=max_seconds,
        settle=settle,
        metrics=counts_at if metrics or server.path is not None else None,
    )
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            report = runner.run(_stress(server, exchange, options))
    except OSError as error:
        fail(f"cannot go to {target!r}: {error.strerror or error}")
    print(json.dumps(report.as_dict()) if as_json else report.as_text())
    if report.is_interrupted:
        raise SystemExit(130)
    if not report.holds:
        raise SystemExit(1)


async def _stress(server: "Target", exchange: "Exchange", options: "StressOptions") -> "Report":
    from disconnect_watch.stress import run_stress

    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    def interrupt() -> None:
        stop.set()
        loop.remove_signal_handler(signal.SIGINT)  # a second one ends at once

    loop.add_signal_handler(signal.SIGINT, interrupt)
    try:
        return await run_stress(
            server, exchange, options=options, stop=stop, on_progress=_print_progress
        )
    finally:
        loop.remove_signal_handler(signal.SIGINT)


def _print_progress(counts: "Counts") -> None:
    """A line that rewrites itself; where that can't be, a line for each tenth."""
    num_ended = counts.num_sent - counts.num_open
    is_last = num_ended == counts.num_planned
    if sys.stderr.isatty():
        print(f"\r{counts.equation} ", end="\n" * is_last, file=sys.stderr, flush=True)
    elif is_last or num_ended % max(1, counts.num_planned // 10) == 0:
        print(counts.equation, file=sys.stderr, flush=True)
