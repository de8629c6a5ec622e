"""``disconnect-watch gateway``."""

import contextlib
import os
import re
import shlex
from pathlib import Path
from typing import Annotated, Any

from disconnect_watch.cli._app import app, fail, typer
from disconnect_watch.cli._frontend import (
    AdminSocket,
    AllowClientShm,
    ApiKeys,
    BoolOption,
    CancelBound,
    DisconnectGrace,
    Grace,
    HalfClose,
    HalfCloseOption,
    HeaderForwardPattern,
    LogLevel,
    LogLevelOption,
    LogVerbose,
    MaxBodyBytes,
    MaxConnections,
    MaxConnectionsPerAddress,
    MetricsPort,
    NoCancelOnDisconnect,
    ReadTimeout,
    RequestTimeout,
    RestrictedApi,
    Strict,
    TraceConfig,
    Unblind,
    VanishAfter,
    announce,
    serve_options,
)
from disconnect_watch.keys import KeyRing
from disconnect_watch.ports import bind, bind_unix

__all__ = ["gateway"]


@app.command()
def gateway(
    *,
    triton: Annotated[
        list[str] | None,
        typer.Option(help="grpc://HOST:PORT of a Triton, or of several with commas between."),
    ] = None,
    vllm: Annotated[
        str | None,
        typer.Option(help="A model for vLLM to run here: a folder, or its name at Hugging Face."),
    ] = None,
    vllm_args: Annotated[
        str, typer.Option(help="Options of vLLM's engine, as `vllm serve` has them, in one text.")
    ] = "",
    model_name: Annotated[
        str | None, typer.Option(help="Name of vLLM's model in URLs; its folder's by default.")
    ] = None,
    chat_template: Annotated[
        Path | None, typer.Option(help="A Jinja file to take for the one of vLLM's model.")
    ] = None,
    http: Annotated[
        str | None, typer.Option(help="http://HOST:PORT of any other server, to be passed to.")
    ] = None,
    triton_header: Annotated[
        list[str] | None,
        typer.Option(help="NAME=VALUE that goes with every call, once for each."),
    ] = None,
    triton_ca: Annotated[
        Path | None, typer.Option(help="PEM file of whom to trust for grpcs://.")
    ] = None,
    triton_cert: Annotated[
        Path | None, typer.Option(help="PEM file of the certificate to show.")
    ] = None,
    triton_key: Annotated[Path | None, typer.Option(help="PEM file of its private key.")] = None,
    triton_name: Annotated[
        str | None, typer.Option(help="Name in the certificates of the Tritons.")
    ] = None,
    pass_headers: Annotated[
        str | None,
        typer.Option(
            help="Regular expression of headers that go along with a call; without it, those of "
            "a trace."
        ),
    ] = None,
    max_message_bytes: Annotated[
        int, typer.Option(min=1, max=(1 << 31) - 1, help="Of a call or its answer.")
    ] = (1 << 31) - 1,
    probe_seconds: Annotated[
        float, typer.Option(min=0.1, help="Between two questions whether a Triton is ready.")
    ] = 2.0,
    http_address: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    http_port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    metrics_port: MetricsPort = 8002,
    http_restricted_api: RestrictedApi = None,
    trace_config: TraceConfig = None,
    http_header_forward_pattern: HeaderForwardPattern = None,
    allow_client_shm: AllowClientShm = BoolOption.FALSE,
    strict: Strict = False,
    grace: Grace = 5.0,
    half_close: HalfClose = HalfCloseOption.DISCONNECT,
    vanish_after: VanishAfter = None,
    unblind: Unblind = None,
    disconnect_grace: DisconnectGrace = 0.0,
    no_cancel_on_disconnect: NoCancelOnDisconnect = False,
    max_body_bytes: MaxBodyBytes = 1 << 26,
    read_timeout: ReadTimeout = 60.0,
    max_connections: MaxConnections = None,
    max_connections_per_address: MaxConnectionsPerAddress = None,
    request_timeout: RequestTimeout = None,
    cancel_bound: CancelBound = 30.0,
    api_keys: ApiKeys = None,
    admin_socket: AdminSocket = None,
    log_level: LogLevel = LogLevelOption.INFO,
    log_verbose: LogVerbose = 0,
) -> None:
    """Stand before other servers, and have them notice that a client left.

    With --triton the endpoints are those of `serve` and of Triton itself; each request is a
    gRPC call, whose cancel Triton passes to its model. With --vllm a model is run by vLLM, whose
    engine looks at the flags of who left, behind the endpoints of `serve`. With --http each
    request goes to the server as it is, and its connection is closed when its client leaves.
    Until SIGTERM or Ctrl-C.
    """
    if [triton, vllm, http].count(None) != 2:
        fail("give one of --triton, --vllm and --http: what the gateway is to stand before")
    if http is not None and api_keys is not None:
        fail("--api-keys go with --triton or --vllm: a server behind --http looks at its own")
    try:
        keys = KeyRing.read(api_keys, environment=os.environ)
        pem = [file.read_bytes() if file else None for file in (triton_ca, triton_key, triton_cert)]
        with (
            bind(http_address, http_port) as listening,
            bind(http_address, metrics_port) as metrics,
            bind_unix(str(admin_socket)) if admin_socket else contextlib.nullcontext() as admin,
        ):
            try:
                from disconnect_watch.server import serve as serve_until_signal
                from disconnect_watch.server.guard import Gatekeeper
                from disconnect_watch.server.logs import configure_logging

                if triton is not None:
                    from disconnect_watch.backends.triton import (
                        Connecting,
                        HeaderPassing,
                        TritonRepository,
                        parse_endpoints,
                    )
                elif http is not None:
                    from disconnect_watch.server.reverse_proxy import ReverseProxy
                else:
                    from disconnect_watch.backends.vllm import VllmBackend, engine_args
            except ImportError as error:
                package = (
                    "'disconnect-watch[gateway]'" if vllm is None else "vllm, into this Python"
                )
                fail(f"{error}; install it with: pip install {package}")

            configure_logging("debug" if log_verbose else log_level.value)
            gatekeeper = Gatekeeper(keys)
            try:
                options = serve_options(
                    grace=grace,
                    half_close=half_close,
                    vanish_after=vanish_after,
                    unblind=unblind,
                    disconnect_grace=disconnect_grace,
                    no_cancel_on_disconnect=no_cancel_on_disconnect,
                    read_timeout=read_timeout,
                    max_connections=max_connections,
                    max_connections_per_address=max_connections_per_address,
                    max_body_bytes=max_body_bytes,
                    request_timeout=request_timeout,
                    cancel_bound=cancel_bound,
                    strict=strict,
                    allow_client_shm=allow_client_shm,
                    http_header_forward_pattern=http_header_forward_pattern,
                    http_restricted_api=http_restricted_api,
                    trace_config=trace_config,
                )
                behind: dict[str, Any] = {}
                if triton is not None:
                    endpoints = parse_endpoints(triton)
                    passing = HeaderPassing(
                        [_header(text) for text in triton_header or ()],
                        *([pass_headers] if pass_headers is not None else ()),
                    )
                    connecting = Connecting(
                        max_message_bytes=max_message_bytes,
                        root_certificates=pem[0],
                        private_key=pem[1],
                        certificate=pem[2],
                        server_name=triton_name,
                        headers=passing.fixed,
                        probe_seconds=probe_seconds,
                    )
                    behind["open_remote"] = lambda: TritonRepository(
                        endpoints, connecting=connecting, passing=passing
                    )
                elif http is not None:
                    behind["open_app"] = ReverseProxy(http).serving
            except re.error as error:
                fail(f"--pass-headers {pass_headers!r} is no regular expression: {error}")
            except ValueError as error:
                fail(str(error))

            backend = None
            if vllm is not None:
                try:
                    backend = VllmBackend.from_args(
                        engine_args(vllm, shlex.split(vllm_args)),
                        name=model_name,
                        chat_template=chat_template,
                    )
                except ValueError as error:
                    fail(str(error))
            serve_until_signal(
                backend,
                http=listening,
                metrics=metrics,
                options=options,
                gatekeeper=gatekeeper,
                admin=admin,
                announce=lambda frontend: announce(
                    frontend, listening, metrics, gatekeeper.admin_token, before=http
                ),
                **behind,
            )
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and not error.filename and error.strerror:
            fail(error.strerror)  # what bind says is whole
        fail(str(error))


def _header(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"cannot read the header {text!r}: give NAME=VALUE")
    return name, value
