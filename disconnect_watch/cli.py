"""The command line: ``disconnect-watch serve``, ``stress`` and ``doctor``.

Exit codes: 0 after an orderly end, 1 if a stressed server failed a check or the doctor found
a problem, 2 for whatever prevents the command, 130 for a Ctrl-C before it served or in
mid-stress.
"""

import asyncio
import contextlib
import json
import logging
import secrets
import signal
import socket
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

try:
    import typer
except ImportError as error:
    raise SystemExit(
        f"disconnect-watch: {error}; install it with: pip install 'disconnect-watch[server]'"
    ) from error

from disconnect_watch.ports import bind

if TYPE_CHECKING:
    from disconnect_watch.stress import StressOptions
    from disconnect_watch.stress.exchange import Exchange
    from disconnect_watch.stress.report import Counts, Report
    from disconnect_watch.stress.target import Target

__all__ = ["app", "main"]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True)


class HalfCloseOption(StrEnum):
    """What a client's FIN means, see ``adapters.uvicorn.HttpTools``."""

    DISCONNECT = "disconnect"
    PROBE = "probe"
    IGNORE = "ignore"


class WayOption(StrEnum):
    """How clients leave, see ``stress.Way``."""

    FIN = "fin"
    RST = "rst"
    HALF_CLOSE = "half_close"
    BEHIND_REQUEST = "behind_request"


class ServerOption(StrEnum):
    """What the doctor can serve by, see ``doctor.setup.SERVERS``."""

    UVICORN = "uvicorn"
    HYPERCORN = "hypercorn"


class LogLevel(StrEnum):
    """From which level on lines are logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@app.callback()
def disconnect_watch() -> None:
    """When an inference client goes away, the GPU stops."""


@app.command()
def serve(
    *,
    model: Annotated[
        Path | None,
        typer.Option(help="Hugging Face directory; without it the small model of the package."),
    ] = None,
    model_name: Annotated[
        str | None, typer.Option(help="Name in URLs; without it the directory's.")
    ] = None,
    chat_template: Annotated[
        Path | None, typer.Option(help="Jinja file to take for the model's own chat template.")
    ] = None,
    http_address: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    http_port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    metrics_port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8002,
    grace: Annotated[
        float, typer.Option(min=0, help="Seconds that running requests get at a shutdown.")
    ] = 5.0,
    half_close: Annotated[
        HalfCloseOption, typer.Option(help="What a client's FIN means: left, find out, nothing.")
    ] = HalfCloseOption.DISCONNECT,
    vanish_after: Annotated[
        float | None,
        typer.Option(min=2, max=86_400, help="Seconds without a sign of life of a client, asked."),
    ] = None,
    unblind: Annotated[
        int | None, typer.Option(min=1, help="Unread bytes to see a client's leaving behind.")
    ] = None,
    disconnect_grace: Annotated[
        float, typer.Option(min=0, help="Seconds that a request may go on without its client.")
    ] = 0.0,
    max_queue: Annotated[int, typer.Option(min=1, help="Requests that may wait.")] = 1024,
    max_num_seqs: Annotated[
        int, typer.Option(min=1, help="Requests that run at the same time.")
    ] = 64,
    max_body_bytes: Annotated[int, typer.Option(min=1, help="Of one request.")] = 1 << 26,
    log_level: Annotated[LogLevel, typer.Option(help="Of the JSON lines.")] = LogLevel.INFO,
) -> None:
    """Serve a model over HTTP until SIGTERM or Ctrl-C.

    One line on standard error says where and gives a curl to try; the rest of it is log
    lines in JSON, one for each request.
    """
    try:
        # Before anything heavy is loaded, so that a port in use is told at once.
        with bind(http_address, http_port) as http, bind(http_address, metrics_port) as metrics:
            try:
                from disconnect_watch.backends.engine import EngineBackend
                from disconnect_watch.engine import DEFAULT_MODEL, CheckpointError, EngineConfig
                from disconnect_watch.server import ServeOptions
                from disconnect_watch.server import serve as serve_until_signal
                from disconnect_watch.server.logs import configure_logging
            except ImportError as error:
                _fail(f"{error}; install it with: pip install 'disconnect-watch[server]'")

            configure_logging(log_level.value)
            config = EngineConfig(
                max_queue=max_queue,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max(512, max_num_seqs),
            )
            try:
                backend = EngineBackend.from_pretrained(
                    model or DEFAULT_MODEL,
                    name=model_name,
                    config=config,
                    chat_template=chat_template,
                )
            except CheckpointError as error:
                _fail(str(error))
            serve_until_signal(
                backend,
                http=http,
                metrics=metrics,
                options=ServeOptions(
                    grace=grace,
                    half_close=half_close.value,
                    vanish_after=vanish_after,
                    unblind=unblind,
                    disconnect_grace=disconnect_grace,
                    max_body_bytes=max_body_bytes,
                ),
                announce=lambda: _announce(backend.name, http, metrics),
            )
    except OSError as error:
        # What bind says is whole; of a file the name stands beside it.
        _fail(str(error) if error.filename or not error.strerror else error.strerror)


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
        _fail(f"{error}; install it with: pip install 'disconnect-watch[server]'")

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
        _fail(str(error))
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
        _fail(f"cannot go to {target!r}: {error.strerror or error}")
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


@app.command()
def doctor(
    application: Annotated[
        str | None, typer.Argument(help="ASGI application to try, as module:attribute.")
    ] = None,
    *,
    factory: Annotated[bool, typer.Option(help="Call it for the application.")] = False,
    lifespan: Annotated[bool, typer.Option(help="Run its start-up and shutdown.")] = False,
    header: Annotated[
        list[str] | None,
        typer.Option(help="'Name: value' for the trial's requests, once for each."),
    ] = None,
    http: Annotated[
        str | None, typer.Option(help="Protocol of ours, or your own of it, as uvicorn's --http.")
    ] = None,
    server: Annotated[
        list[ServerOption] | None,
        typer.Option(help="To try, once for each; without it those that are installed."),
    ] = None,
    listen: Annotated[
        float | None,
        typer.Option(min=0, help="Seconds to wait for a client that comes through a proxy."),
    ] = None,
    host: Annotated[str, typer.Option(help="To listen on, with --listen.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="To listen on; 0 takes a free one.")
    ] = 8000,
    as_json: Annotated[bool, typer.Option("--json", help="Report as JSON.")] = False,
) -> None:
    """Tell what this machine, and an application on it, notices of clients that leave.

    The application is served on loopback for a moment, with a route of the doctor's own, and
    real clients leave it; none of its own handlers runs. The exit code is 0 if nothing is a
    problem.
    """
    try:
        from disconnect_watch.doctor import (
            ApplicationError,
            diagnose,
            listen_behind_proxy,
            load_application,
        )

        # What the application prints must not come into the report.
        with contextlib.redirect_stdout(sys.stderr):
            loaded = load_application(application, is_factory=factory) if application else None
            proxy = (
                []
                if listen is None
                else listen_behind_proxy(host, port, seconds=listen, announce=_announce_listening)
            )
            report = diagnose(
                loaded,
                protocol=http,
                headers=dict(_header(text) for text in header or ()),
                lifespan="on" if lifespan else "off",
                servers=tuple(option.value for option in server or ServerOption),
                proxy=tuple(proxy),
            )
    except ImportError as error:
        _fail(f"{error}; install it with: pip install 'disconnect-watch[server]'")
    except ApplicationError as error:
        _fail(str(error))
    except OSError as error:
        _fail(error.strerror or str(error))
    print(json.dumps(report.as_dict()) if as_json else report.as_text())
    if not report.holds:
        raise SystemExit(1)


def _announce_listening(url: str) -> None:
    print(
        f"listening on {url}: send a request through the proxy, and leave it (curl -m 1)",
        file=sys.stderr,
        flush=True,
    )


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not name.strip() or not colon:
        _fail(f"cannot send the header {text!r}: give 'Name: value'")
    return name.strip(), value.strip()


def _print_progress(counts: "Counts") -> None:
    """A line that rewrites itself; where that can't be, a line for each tenth."""
    num_ended = counts.num_sent - counts.num_open
    is_last = num_ended == counts.num_planned
    if sys.stderr.isatty():
        print(f"\r{counts.equation} ", end="\n" * is_last, file=sys.stderr, flush=True)
    elif is_last or num_ended % max(1, counts.num_planned // 10) == 0:
        print(counts.equation, file=sys.stderr, flush=True)


def _announce(name: str, http: socket.socket, metrics: socket.socket) -> None:
    url, metrics_url = _url(http), _url(metrics)
    body = json.dumps({"text_input": "The class", "max_tokens": 2000, "temperature": 0.8})
    print(
        f"serving {name} on {url}, metrics on {metrics_url}/metrics; try: "
        f"curl -N {url}/v2/models/{name}/generate_stream -d '{body}'",
        file=sys.stderr,
        flush=True,
    )
    logging.getLogger("disconnect_watch.server").info(
        "serving",
        extra={
            "model": name,
            "http_port": http.getsockname()[1],
            "metrics_port": metrics.getsockname()[1],
        },
    )


def _url(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _fail(message: str) -> NoReturn:
    print(f"disconnect-watch: {message}", file=sys.stderr)
    raise SystemExit(2)


def main() -> None:
    """Entry point of the ``disconnect-watch`` script."""
    try:
        app(prog_name="disconnect-watch")
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
