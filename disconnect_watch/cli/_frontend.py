"""Options of the commands that serve HTTP, each said once."""

import json
import logging
import math
import re
import socket
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from disconnect_watch.cli._app import fail, typer

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

    from disconnect_watch.server import Frontend, ServeOptions

__all__ = [
    "AdminAddress",
    "AdminPort",
    "AdminSocket",
    "AllowClientShm",
    "ApiKeys",
    "BoolOption",
    "CancelBound",
    "DisconnectGrace",
    "Grace",
    "HalfClose",
    "HalfCloseOption",
    "HeaderForwardPattern",
    "LogLevel",
    "LogLevelOption",
    "LogVerbose",
    "MaxBodyBytes",
    "MaxConnections",
    "MaxConnectionsPerAddress",
    "MetricsPort",
    "NoCancelOnDisconnect",
    "ReadTimeout",
    "RequestTimeout",
    "RestrictedApi",
    "Strict",
    "Unblind",
    "VanishAfter",
    "announce",
    "say_serving",
    "serve_options",
]


class HalfCloseOption(StrEnum):
    """What a client's FIN means, see ``adapters.uvicorn.HttpTools``."""

    DISCONNECT = "disconnect"
    PROBE = "probe"
    IGNORE = "ignore"


class BoolOption(StrEnum):
    """What Triton's options take: ``--strict-readiness=false``."""

    TRUE = "true"
    FALSE = "false"


class LogLevelOption(StrEnum):
    """From which level on lines are logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


MetricsPort = Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")]
RestrictedApi = Annotated[
    list[str] | None,
    typer.Option(help="<category>[,<category>]:<header>=<value>, once for each."),
]
HeaderForwardPattern = Annotated[
    str | None, typer.Option(help="Regular expression of headers that models get.")
]
AllowClientShm = Annotated[
    BoolOption, typer.Option(help="Let clients have tensors in shared memory.")
]
Strict = Annotated[
    bool,
    typer.Option("--strict", help="Answer in all as Triton: 400 for what was cancelled."),
]
Grace = Annotated[
    float,
    typer.Option(
        "--grace",
        "--exit-timeout-secs",
        min=0,
        help="Seconds that running requests get at a shutdown.",
    ),
]
HalfClose = Annotated[
    HalfCloseOption, typer.Option(help="What a client's FIN means: left, find out, nothing.")
]
VanishAfter = Annotated[
    float | None,
    typer.Option(min=2, max=86_400, help="Seconds without a sign of life of a client, asked."),
]
Unblind = Annotated[
    int | None, typer.Option(min=1, help="Unread bytes to see a client's leaving behind.")
]
DisconnectGrace = Annotated[
    float, typer.Option(min=0, help="Seconds that a request may go on without its client.")
]
NoCancelOnDisconnect = Annotated[
    bool,
    typer.Option("--no-cancel-on-disconnect", help="Let requests end without their client."),
]
MaxBodyBytes = Annotated[
    int, typer.Option("--max-body-bytes", "--http-max-input-size", min=1, help="Of a request.")
]
MaxConnections = Annotated[
    int | None,
    typer.Option(min=1, help="At once; others wait. As many as open files, unless told."),
]
MaxConnectionsPerAddress = Annotated[
    int | None, typer.Option(min=1, help="At once of one IP address; more are answered 503.")
]
ReadTimeout = Annotated[
    float,
    typer.Option(min=0.1, help="Seconds that a request has to arrive, and more by its size."),
]
RequestTimeout = Annotated[
    float | None,
    typer.Option(min=0, help="Seconds for a request that brings no limit of its own."),
]
CancelBound = Annotated[
    float,
    typer.Option(min=0.1, help="Seconds from a cancel to its effect; beyond it, not ready."),
]
ApiKeys = Annotated[
    Path | None,
    typer.Option(help="File of hashed API keys, see `key`; without one no key is needed."),
]
AdminPort = Annotated[
    int | None,
    typer.Option(
        min=0, max=65535, help="Port for what only an admin may do, no longer on the main one."
    ),
]
AdminAddress = Annotated[str, typer.Option(help="Address of --admin-port.")]
AdminSocket = Annotated[Path | None, typer.Option(help="Unix socket whose clients are the admin.")]
LogLevel = Annotated[LogLevelOption, typer.Option(help="Of the JSON lines.")]
LogVerbose = Annotated[
    int, typer.Option(min=0, help="Triton's word for --log-level debug, if not 0.")
]


TraceConfig = Annotated[
    list[str] | None,
    typer.Option(
        help="As Triton's: mode=opentelemetry, opentelemetry,url=URL, "
        "opentelemetry,resource=NAME=VALUE, rate=N; once for each."
    ),
]


def serve_options(
    *,
    grace: float,
    half_close: HalfCloseOption,
    vanish_after: float | None,
    unblind: int | None,
    disconnect_grace: float,
    no_cancel_on_disconnect: bool,
    read_timeout: float,
    max_connections: int | None,
    max_connections_per_address: int | None,
    max_body_bytes: int,
    request_timeout: float | None,
    cancel_bound: float,
    strict: bool,
    strict_readiness: bool = True,
    allow_client_shm: BoolOption,
    http_header_forward_pattern: str | None,
    http_restricted_api: list[str] | None,
    trace_config: list[str] | None,
    live_page: bool = False,
    **others: Any,
) -> "ServeOptions":
    """The options as the server takes them.

    Args:
        others: fields of ``ServeOptions`` that not every command has.

    Raises:
        ValueError: one makes no sense; the message says which.
    """
    from disconnect_watch.server import FrontendOptions, ServeOptions
    from disconnect_watch.server.v2.restricted import parse_restrictions

    return ServeOptions(
        grace=grace,
        half_close=half_close.value,
        vanish_after=vanish_after,
        unblind=unblind,
        disconnect_grace=math.inf if no_cancel_on_disconnect else disconnect_grace,
        read_timeout=read_timeout,
        max_connections=max_connections,
        max_connections_per_address=max_connections_per_address,
        frontend=FrontendOptions(
            max_body_bytes=max_body_bytes,
            request_timeout=request_timeout,
            cancel_bound=cancel_bound,
            strict=strict,
            strict_readiness=strict_readiness,
            allow_client_shm=allow_client_shm is BoolOption.TRUE,
            header_forward_pattern=_pattern(http_header_forward_pattern),
            restrictions=parse_restrictions(http_restricted_api or ()),
            live_page=live_page,
        ),
        tracing=_tracing(trace_config) if trace_config else None,
        **others,
    )


def _tracing(settings: list[str]) -> "TracerProvider | None":
    try:
        from disconnect_watch.server.spans import tracer_provider
    except ImportError as error:
        fail(f"{error}; install it with: pip install 'disconnect-watch[otel]'")
    return tracer_provider(settings)


def announce(
    frontend: "Frontend",
    http: socket.socket,
    metrics: socket.socket,
    admin_token: str | None,
    *,
    before: str | None = None,
    admin_port: socket.socket | None = None,
) -> None:
    """Say what is served and where, on standard error and in the log.

    Args:
        before: the server that all requests are passed to; None where they are answered here.
        admin_port: where an admin is served, if there is such a port.
    """
    engines = list(frontend.backends)
    models = frontend.models.index(ready=True) if frontend.models else ()
    others = sorted({entry.name for entry in models} - set(engines))
    say_serving(engines, others, http, metrics, admin_token, before=before, admin_port=admin_port)


def say_serving(
    engines: list[str],
    others: list[str],
    http: socket.socket,
    metrics: socket.socket,
    admin_token: str | None,
    *,
    before: str | None = None,
    admin_port: socket.socket | None = None,
) -> None:
    """As ``announce``, by the names of the models that are served.

    Args:
        others: those that take tensors only.
    """
    url = _url(http)
    names = [before] if before else [*engines, *others]
    if before:
        example = f"curl {url}/health"
    elif engines:
        body = json.dumps({"text_input": "The class", "max_tokens": 2000, "temperature": 0.8})
        example = f"curl -N {url}/v2/models/{engines[0]}/generate_stream -d '{body}'"
    elif names:
        example = f"curl {url}/v2/models/{names[0]}"
    else:
        example = f"curl -X POST {url}/v2/repository/index"
    print(
        f"serving {', '.join(names) or 'no model yet'} on {url}, "
        f"metrics on {_url(metrics)}/metrics; try: {example}",
        file=sys.stderr,
        flush=True,
    )
    if admin_token is not None and not before:
        # For whoever started it, not for the log, which others read.
        print(f"admin token: {admin_token}", file=sys.stderr, flush=True)
    logging.getLogger("disconnect_watch.server").info(
        "serving",
        extra={
            "model": names[0] if len(names) == 1 else names,
            "http_port": http.getsockname()[1],
            "metrics_port": metrics.getsockname()[1],
            **({"admin_port": admin_port.getsockname()[1]} if admin_port else {}),
        },
    )


def _url(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _pattern(text: str | None) -> re.Pattern[str] | None:
    if not text:
        return None
    try:
        return re.compile(text, re.IGNORECASE)
    except re.error as error:
        fail(f"--http-header-forward-pattern {text!r} is no regular expression: {error}")
