"""The command line: ``disconnect-watch serve``.

Exit codes: 0 after an orderly end, 2 for whatever prevents serving, 130 for a Ctrl-C
before it began.
"""

import json
import logging
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

if TYPE_CHECKING:
    import socket

__all__ = ["app", "main"]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True)


class HalfCloseOption(StrEnum):
    """What a client's FIN means, see ``adapters.uvicorn.HttpTools``."""

    DISCONNECT = "disconnect"
    IGNORE = "ignore"


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
    http_address: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    http_port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    metrics_port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8002,
    grace: Annotated[
        float, typer.Option(min=0, help="Seconds that running requests get at a shutdown.")
    ] = 5.0,
    half_close: Annotated[
        HalfCloseOption, typer.Option(help="What a client's FIN means: it left, or nothing.")
    ] = HalfCloseOption.DISCONNECT,
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
        from disconnect_watch.backends.engine import EngineBackend
        from disconnect_watch.engine import DEFAULT_MODEL, CheckpointError, EngineConfig
        from disconnect_watch.server import ServeOptions, bind
        from disconnect_watch.server import serve as serve_until_signal
        from disconnect_watch.server.logs import configure_logging
    except ImportError as error:
        _fail(f"{error}; install it with: pip install 'disconnect-watch[server]'")

    configure_logging(log_level.value)
    try:
        # Before the model is loaded, so that a port in use is told at once.
        with bind(http_address, http_port) as http, bind(http_address, metrics_port) as metrics:
            backend = EngineBackend.from_pretrained(
                model or DEFAULT_MODEL,
                name=model_name,
                config=EngineConfig(
                    max_queue=max_queue,
                    max_num_seqs=max_num_seqs,
                    max_num_batched_tokens=max(512, max_num_seqs),
                ),
            )
            serve_until_signal(
                backend,
                http=http,
                metrics=metrics,
                options=ServeOptions(
                    grace=grace, half_close=half_close.value, max_body_bytes=max_body_bytes
                ),
                announce=lambda: _announce(backend.name, http, metrics),
            )
    except (OSError, CheckpointError) as error:
        _fail(error.strerror or str(error) if isinstance(error, OSError) else str(error))


def _announce(name: str, http: "socket.socket", metrics: "socket.socket") -> None:
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


def _url(sock: "socket.socket") -> str:
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
