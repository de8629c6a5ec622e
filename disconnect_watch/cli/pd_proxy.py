"""``disconnect-watch pd-proxy``."""

import os
from pathlib import Path
from typing import Annotated

from disconnect_watch.cli._app import app, fail, typer
from disconnect_watch.cli._frontend import (
    ApiKeys,
    BoolOption,
    CancelBound,
    Grace,
    HalfClose,
    HalfCloseOption,
    LogLevel,
    LogLevelOption,
    MaxBodyBytes,
    MaxConnections,
    MaxConnectionsPerAddress,
    MetricsPort,
    ReadTimeout,
    Unblind,
    VanishAfter,
    announce,
    serve_options,
)
from disconnect_watch.keys import KeyRing
from disconnect_watch.ports import bind

__all__ = ["pd_proxy"]

#: Of the environment.
KEY_VARIABLE = "DISCONNECT_WATCH_SERVICE_KEY"


@app.command("pd-proxy")
def pd_proxy(
    *,
    prefill: Annotated[
        list[str], typer.Option(help="http://HOST:PORT of `serve --role prefill`; commas between.")
    ],
    decode: Annotated[
        list[str], typer.Option(help="http://HOST:PORT of `serve --role decode`; commas between.")
    ],
    service_key: Annotated[
        Path | None,
        typer.Option(help=f"File with the key by which nodes know it; else {KEY_VARIABLE}."),
    ] = None,
    probe_seconds: Annotated[
        float, typer.Option(min=0.05, help="Between two questions whether a node is ready.")
    ] = 1.0,
    http_address: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    http_port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    metrics_port: MetricsPort = 8002,
    grace: Grace = 5.0,
    half_close: HalfClose = HalfCloseOption.DISCONNECT,
    vanish_after: VanishAfter = None,
    unblind: Unblind = None,
    max_body_bytes: MaxBodyBytes = 1 << 26,
    read_timeout: ReadTimeout = 60.0,
    max_connections: MaxConnections = None,
    max_connections_per_address: MaxConnectionsPerAddress = None,
    cancel_bound: CancelBound = 30.0,
    api_keys: ApiKeys = None,
    log_level: LogLevel = LogLevelOption.INFO,
) -> None:
    """Stand before nodes that prefill and decode apart.

    Each request has its prompt computed by one node and its answer by another, the least busy
    that are ready. Who leaves here has left there, too. Until SIGTERM or Ctrl-C.
    """
    try:
        keys = KeyRing.read(api_keys, environment={})
        key = service_key.read_text().strip() if service_key else os.environ.get(KEY_VARIABLE, "")
        if not key:
            fail(f"give --service-key or {KEY_VARIABLE}: the key by which the nodes know the proxy")
        with bind(http_address, http_port) as http, bind(http_address, metrics_port) as metrics:
            try:
                from disconnect_watch.server import serve as serve_until_signal
                from disconnect_watch.server.disagg.nodes import NodePool
                from disconnect_watch.server.disagg.proxy import PdProxy
                from disconnect_watch.server.guard import Gatekeeper
                from disconnect_watch.server.logs import configure_logging
            except ImportError as error:
                fail(f"{error}; install it with: pip install 'disconnect-watch[gateway]'")

            configure_logging(log_level.value)
            gatekeeper = Gatekeeper(keys)
            proxy = PdProxy(
                NodePool(_split(prefill)),
                NodePool(_split(decode)),
                key=key,
                probe_seconds=probe_seconds,
                gatekeeper=gatekeeper,
                max_body_bytes=max_body_bytes,
            )
            options = serve_options(
                grace=grace,
                half_close=half_close,
                vanish_after=vanish_after,
                unblind=unblind,
                disconnect_grace=0.0,
                no_cancel_on_disconnect=False,
                read_timeout=read_timeout,
                max_body_bytes=max_body_bytes,
                request_timeout=None,
                max_connections=max_connections,
                max_connections_per_address=max_connections_per_address,
                cancel_bound=cancel_bound,
                strict=False,
                allow_client_shm=BoolOption.FALSE,
                http_header_forward_pattern=None,
                http_restricted_api=None,
                trace_config=None,
            )
            nodes = f"{', '.join(_split(prefill))} and {', '.join(_split(decode))}"
            serve_until_signal(
                None,
                http=http,
                metrics=metrics,
                options=options,
                gatekeeper=gatekeeper,
                open_app=proxy.serving,
                announce=lambda frontend: announce(frontend, http, metrics, None, before=nodes),
            )
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and not error.filename and error.strerror:
            fail(error.strerror)  # what bind says is whole
        fail(str(error))


def _split(urls: list[str]) -> list[str]:
    return [url for text in urls for url in text.split(",") if url]
