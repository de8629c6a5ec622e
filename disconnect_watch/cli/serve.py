"""``disconnect-watch serve``."""

import contextlib
import json
import logging
import os
import socket
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from disconnect_watch.cli._app import app, fail, typer
from disconnect_watch.keys import KeyRing
from disconnect_watch.ports import bind, bind_unix

__all__ = ["serve"]


class HalfCloseOption(StrEnum):
    """What a client's FIN means, see ``adapters.uvicorn.HttpTools``."""

    DISCONNECT = "disconnect"
    PROBE = "probe"
    IGNORE = "ignore"


class LogLevel(StrEnum):
    """From which level on lines are logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


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
    request_timeout: Annotated[
        float | None,
        typer.Option(min=0, help="Seconds for a request that brings no limit of its own."),
    ] = None,
    api_keys: Annotated[
        Path | None,
        typer.Option(help="File of hashed API keys, see `key`; without one no key is needed."),
    ] = None,
    admin_socket: Annotated[
        Path | None, typer.Option(help="Unix socket whose clients are the admin.")
    ] = None,
    log_level: Annotated[LogLevel, typer.Option(help="Of the JSON lines.")] = LogLevel.INFO,
) -> None:
    """Serve a model over HTTP until SIGTERM or Ctrl-C.

    One line on standard error says where and gives a curl to try; the rest of it is log
    lines in JSON, one for each request.
    """
    try:
        keys = KeyRing.read(api_keys, environment=os.environ)
    except (OSError, ValueError) as error:
        fail(str(error))
    try:
        # Before anything heavy is loaded, so that a port in use is told at once.
        with (
            bind(http_address, http_port) as http,
            bind(http_address, metrics_port) as metrics,
            bind_unix(str(admin_socket)) if admin_socket else contextlib.nullcontext() as admin,
        ):
            try:
                from disconnect_watch.backends.engine import EngineBackend
                from disconnect_watch.engine import DEFAULT_MODEL, CheckpointError, EngineConfig
                from disconnect_watch.server import ServeOptions
                from disconnect_watch.server import serve as serve_until_signal
                from disconnect_watch.server.guard import Gatekeeper
                from disconnect_watch.server.logs import configure_logging
            except ImportError as error:
                fail(f"{error}; install it with: pip install 'disconnect-watch[server]'")

            configure_logging(log_level.value)
            gatekeeper = Gatekeeper(keys)
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
                fail(str(error))
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
                    request_timeout=request_timeout,
                ),
                gatekeeper=gatekeeper,
                admin=admin,
                announce=lambda: _announce(backend.name, http, metrics, gatekeeper.admin_token),
            )
    except OSError as error:
        # What bind says is whole; of a file the name stands beside it.
        fail(str(error) if error.filename or not error.strerror else error.strerror)


def _announce(
    name: str, http: socket.socket, metrics: socket.socket, admin_token: str | None
) -> None:
    url, metrics_url = _url(http), _url(metrics)
    body = json.dumps({"text_input": "The class", "max_tokens": 2000, "temperature": 0.8})
    print(
        f"serving {name} on {url}, metrics on {metrics_url}/metrics; try: "
        f"curl -N {url}/v2/models/{name}/generate_stream -d '{body}'",
        file=sys.stderr,
        flush=True,
    )
    if admin_token is not None:
        # For whoever started it, not for the log, which others read.
        print(f"admin token: {admin_token}", file=sys.stderr, flush=True)
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
