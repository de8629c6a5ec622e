"""``disconnect-watch stress``."""

import asyncio
import json
import secrets
import signal
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from disconnect_watch.cli._app import app, fail, typer

if TYPE_CHECKING:
    from disconnect_watch.stress import Report, StressOptions
    from disconnect_watch.stress.exchange import Exchange
    from disconnect_watch.stress.target import Target

__all__ = ["stress"]

#: Clients at the same time, where the user says nothing; of an open loop the most.
_CONCURRENCY = 8
_MOST_AT_ONCE = 1000


class ProfileOption(StrEnum):
    """What is spoken, see ``stress.Profile``."""

    TRITON = "triton"
    OPENAI = "openai"
    HTTP = "http"
    TCP = "tcp"


class WayOption(StrEnum):
    """How clients leave, see ``testing.Way``."""

    FIN = "fin"
    RST = "rst"
    HALF_CLOSE = "half_close"
    HALF_CLOSE_FIN = "half_close_fin"
    KILLED = "killed"
    CLOSE_NOTIFY = "close_notify"
    VANISH = "vanish"
    BEHIND_BODY = "behind_body"
    BEHIND_REQUEST = "behind_request"


class PointOption(StrEnum):
    """Where in their exchange clients leave, see ``stress.Point``."""

    CONNECTED = "connected"
    IN_REQUEST = "in_request"
    AT_ONCE = "at_once"
    WAITING = "waiting"
    STREAMING = "streaming"
    STALLED = "stalled"
    AROUND = "around"


_LOAD, _ASKED, _JUDGED, _TOLD = "Clients", "What they ask", "How it is judged", "Reports"


@app.command()
def stress(
    target: Annotated[
        str | None,
        typer.Argument(help="URL of a generate, generate_stream, infer or completions; of any page "
                            "with --profile http; host:port of a raw server."),
    ] = None,
    *,
    stay: Annotated[
        int, typer.Option(min=0, rich_help_panel=_LOAD, help="Clients that stay.")
    ] = 50,
    leave: Annotated[
        int, typer.Option(min=0, rich_help_panel=_LOAD, help="Clients that leave.")
    ] = 50,
    way: Annotated[
        list[WayOption] | None,
        typer.Option(rich_help_panel=_LOAD, help="To leave by, once for each; without it all that "
                     "every server can be asked to notice."),
    ] = None,
    point: Annotated[
        list[PointOption] | None,
        typer.Option(rich_help_panel=_LOAD, help="To leave at, once for each; without it all but "
                     "around."),
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(min=1, rich_help_panel=_LOAD, help="Clients at the same time; 8, or 1000 at "
                     "most with a rate."),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(min=0.001, rich_help_panel=_LOAD, help="Clients a second, as they come, "
                     "whatever became of those before: an open loop."),
    ] = None,
    keep_alive: Annotated[
        float,
        typer.Option(min=0, max=1, rich_help_panel=_LOAD, help="Share of clients that use an open "
                     "connection again."),
    ] = 0.0,
    slow: Annotated[
        float,
        typer.Option(min=0, max=1, rich_help_panel=_LOAD, help="Share of those who stay that read "
                     "slowly."),
    ] = 0.0,
    max_delay: Annotated[
        float,
        typer.Option(min=0, rich_help_panel=_LOAD, help="Seconds that one may wait before it "
                     "leaves."),
    ] = 0.1,
    timeout: Annotated[
        float, typer.Option(min=0.001, rich_help_panel=_LOAD, help="Seconds that a client has.")
    ] = 30.0,
    max_seconds: Annotated[
        float, typer.Option(min=0, rich_help_panel=_LOAD, help="After which no more clients begin.")
    ] = 60.0,
    seed: Annotated[
        int | None,
        typer.Option(min=0, rich_help_panel=_LOAD, help="Of an earlier report, for the same "
                     "clients again."),
    ] = None,
    profile: Annotated[
        ProfileOption | None,
        typer.Option(rich_help_panel=_ASKED, help="What is spoken; without it as the URL says."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(rich_help_panel=_ASKED, help="openai, and triton without a path.")
    ] = None,
    stream: Annotated[
        bool, typer.Option(rich_help_panel=_ASKED, help="openai, and triton without a path.")
    ] = True,
    prompt: Annotated[
        str, typer.Option(rich_help_panel=_ASKED, help="To generate from.")
    ] = "The class",
    max_tokens: Annotated[
        int, typer.Option(min=1, rich_help_panel=_ASKED, help="For those who stay.")
    ] = 32,
    leaver_max_tokens: Annotated[
        int,
        typer.Option(min=1, rich_help_panel=_ASKED, help="For those who leave: more than they wait "
                     "for."),
    ] = 100_000,
    method: Annotated[str, typer.Option(rich_help_panel=_ASKED, help="http.")] = "GET",
    header: Annotated[
        list[str] | None,
        typer.Option(rich_help_panel=_ASKED, help="'Name: value', once for each; all but tcp."),
    ] = None,
    body: Annotated[
        str | None,
        typer.Option(rich_help_panel=_ASKED, help="http and infer; {index} is the client's number "
                     "in http."),
    ] = None,
    leaver_body: Annotated[
        str | None,
        typer.Option(rich_help_panel=_ASKED, help="Of those who leave, for more than they wait "
                     "for."),
    ] = None,
    status: Annotated[
        int, typer.Option(rich_help_panel=_ASKED, help="http: that an answer must have.")
    ] = 200,
    send: Annotated[
        str, typer.Option(rich_help_panel=_ASKED, help="tcp: a line; {index} is the client's "
                          "number.")
    ] = "hello {index}",
    lines: Annotated[
        int,
        typer.Option(min=0, rich_help_panel=_ASKED, help="tcp: of an answer; 0 for all until the "
                     "server closes."),
    ] = 1,
    expect: Annotated[
        str | None,
        typer.Option(rich_help_panel=_ASKED, help="What must be in an answer (http), or what each "
                     "line of it must be (tcp)."),
    ] = None,
    metrics: Annotated[
        str | None,
        typer.Option(rich_help_panel=_JUDGED, help="URL of the server's metrics; without it its "
                     "/metrics."),
    ] = None,
    settle: Annotated[
        float,
        typer.Option(min=0, rich_help_panel=_JUDGED, help="Seconds for the server to be done with "
                     "them all."),
    ] = 10.0,
    effect: Annotated[
        bool | None,
        typer.Option("--effect/--no-effect", rich_help_panel=_JUDGED, help="Measure what who left "
                     "costs another; by default where no metrics tell."),
    ] = None,
    same: Annotated[
        bool, typer.Option(rich_help_panel=_JUDGED, help="All answers to who stays must be the "
                           "same.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", rich_help_panel=_TOLD, help="Report as JSON.")
    ] = False,
    json_file: Annotated[Path | None, typer.Option(rich_help_panel=_TOLD, help="And here.")] = None,
    html_file: Annotated[
        Path | None, typer.Option("--html", rich_help_panel=_TOLD, help="As a page, with plots.")
    ] = None,
    junit_file: Annotated[
        Path | None, typer.Option("--junit", rich_help_panel=_TOLD, help="As JUnit XML.")
    ] = None,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(rich_help_panel=_TOLD, help="Two reports in JSON; nothing is run."),
    ] = None,
) -> None:  # fmt: skip
    """Send clients to a server, some of which leave, and see that no other one is hurt.

    Progress goes to standard error, the report to standard output. The exit code is 0
    only if all of its checks hold. A server that tells of its requests is asked for its
    counts too, any other is judged by what who left costs another; nobody else may use
    it meanwhile.
    """
    try:
        import uvloop

        from disconnect_watch.cli._stress_files import compare_files, write
        from disconnect_watch.stress import (
            Asking,
            Point,
            Profile,
            StressOptions,
            TargetError,
            Way,
            exchange_with,
            parse_target,
        )
    except ImportError as error:
        fail(f"{error}; install it with: pip install 'disconnect-watch[server]'")
    if compare is not None:
        compare_files(*compare, as_json=as_json)
    if target is None:
        fail("cannot stress nothing: give a URL, host:port, or two reports to --compare")
    asking = Asking(
        prompt=prompt,
        max_tokens=max_tokens,
        leaver_max_tokens=leaver_max_tokens,
        model=model,
        is_stream=stream,
        method=method,
        status=status,
        headers=_headers(header or []),
        body=body,
        leaver_body=leaver_body,
        send=send,
        num_lines=lines or None,
        expect=expect,
    )
    try:
        server, exchange = exchange_with(
            parse_target(target), asking, Profile(profile.value) if profile else None
        )
        counts_at = parse_target(metrics) if metrics else server.with_path("/metrics")
        options = StressOptions(
            num_stay=stay,
            num_leave=leave,
            concurrency=concurrency or (_CONCURRENCY if rate is None else _MOST_AT_ONCE),
            rate=rate,
            ways=tuple(Way(option.value) for option in way) if way else None,
            **({"points": tuple(Point(option.value) for option in point)} if point else {}),
            max_delay=max_delay,
            kept=keep_alive,
            slow=slow,
            seed=secrets.randbits(32) if seed is None else seed,
            timeout=timeout,
            max_seconds=max_seconds,
            settle=settle,
            metrics=counts_at if metrics or server.path is not None else None,
            measures_effect=effect if server.path is not None else bool(effect),
            same=same,
        )
    except TargetError as error:
        fail(str(error))
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            report = runner.run(_stress(server, exchange, options))
    except OSError as error:
        fail(f"cannot go to {target!r}: {error.strerror or error}")
    except ValueError as error:
        fail(str(error))
    write(report, json_file, html_file, junit_file)
    print(json.dumps(report.as_dict()) if as_json else report.as_text())
    if report.is_interrupted:
        raise SystemExit(130)
    if not report.holds:
        raise SystemExit(1)


async def _stress(server: "Target", exchange: "Exchange", options: "StressOptions") -> "Report":
    from disconnect_watch.cli._stress_progress import progress
    from disconnect_watch.stress import run_stress

    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    def interrupt() -> None:
        stop.set()
        loop.remove_signal_handler(signal.SIGINT)  # a second one ends at once

    loop.add_signal_handler(signal.SIGINT, interrupt)
    try:
        with progress(options.max_seconds) as show:
            return await run_stress(server, exchange, options=options, stop=stop, on_progress=show)
    finally:
        loop.remove_signal_handler(signal.SIGINT)


def _headers(fields: list[str]) -> dict[str, str]:
    headers = {}
    for field in fields:
        name, colon, value = field.partition(":")
        if not colon or not name.strip():
            fail(f"cannot send the header {field!r}: give 'Name: value'")
        headers[name.strip()] = value.strip()
    return headers
