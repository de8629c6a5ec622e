"""``disconnect-watch serve``."""

import contextlib
import os
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from disconnect_watch.cli._app import app, fail, typer
from disconnect_watch.cli._fleet import refuse_in_fleet, serve_fleet
from disconnect_watch.cli._frontend import (
    AdminAddress,
    AdminPort,
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
    say_serving,
    serve_options,
)
from disconnect_watch.keys import KeyRing, Role
from disconnect_watch.ports import bind, bind_unix

if TYPE_CHECKING:
    from disconnect_watch.server.cloud import CloudMode
    from disconnect_watch.server.disagg.role import Transport

__all__ = ["serve"]


class ControlModeOption(StrEnum):
    """When models are loaded: all at the start; as clients say; as the directory changes."""

    NONE = "none"
    EXPLICIT = "explicit"
    POLL = "poll"


class ArithmeticOption(StrEnum):
    """What computes the model, see ``engine.EngineConfig``."""

    AUTO = "auto"
    NATIVE = "native"
    TORCH = "torch"
    TRITON = "triton"


class RoleOption(StrEnum):
    """What a server does among others, see ``server.disagg``."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


class KVTransferOption(StrEnum):
    """How caches go from node to node: on one host, or between hosts."""

    SHM = "shm"
    TCP = "tcp"


@app.command()
def serve(
    *,
    model: Annotated[
        Path | None,
        typer.Option(
            help="Hugging Face directory; without it, and without a model repository, the small "
            "model of the package."
        ),
    ] = None,
    model_name: Annotated[
        str | None, typer.Option(help="Name in URLs; without it the directory's.")
    ] = None,
    chat_template: Annotated[
        Path | None, typer.Option(help="Jinja file to take for the model's own chat template.")
    ] = None,
    embedding_model: Annotated[
        Path | None,
        typer.Option(help="sentence-transformers directory with a BERT, for /v1/embeddings."),
    ] = None,
    model_repository: Annotated[
        list[Path] | None,
        typer.Option(
            "--model-repository",
            "--model-store",
            help="Directory of models as Triton's, once for each.",
        ),
    ] = None,
    model_control_mode: Annotated[
        ControlModeOption,
        typer.Option(help="Load all at the start, what clients ask for, or what changes."),
    ] = ControlModeOption.NONE,
    load_model: Annotated[
        list[str] | None,
        typer.Option(help="To load at the start in mode explicit, once for each; * for all."),
    ] = None,
    repository_poll_secs: Annotated[
        float, typer.Option(min=0.1, help="Between two looks in mode poll.")
    ] = 15.0,
    disable_auto_complete_config: Annotated[
        bool, typer.Option("--disable-auto-complete-config", help="Take config.pbtxt as it is.")
    ] = False,
    exit_on_error: Annotated[
        BoolOption, typer.Option(help="Do not serve if a model can't be loaded.")
    ] = BoolOption.TRUE,
    strict_readiness: Annotated[
        BoolOption, typer.Option(help="Not ready while a model is not.")
    ] = BoolOption.TRUE,
    kill_after: Annotated[
        float | None,
        typer.Option(min=0, help="Seconds after which a model that ignores a cancel is stopped."),
    ] = None,
    http_address: Annotated[
        str | None,
        typer.Option(help="Address to listen on; without it loopback, in a cloud every one."),
    ] = None,
    http_port: Annotated[
        int | None,
        typer.Option(
            min=0, max=65535, help="0 takes a free one; without it 8000, or what the cloud says."
        ),
    ] = None,
    metrics_port: MetricsPort = 8002,
    frontends: Annotated[
        int, typer.Option(min=1, help="Processes that speak HTTP, before one of the engine.")
    ] = 1,
    http_restricted_api: RestrictedApi = None,
    trace_config: TraceConfig = None,
    http_header_forward_pattern: HeaderForwardPattern = None,
    allow_client_shm: AllowClientShm = BoolOption.FALSE,
    allow_sagemaker: Annotated[
        bool, typer.Option("--allow-sagemaker", help="Serve SageMaker's paths, by SAGEMAKER_*.")
    ] = False,
    allow_vertex_ai: Annotated[
        bool,
        typer.Option(
            "--allow-vertex-ai",
            help="Serve Vertex AI's paths, by AIP_*; AIP_MODE=PREDICTION turns it on too.",
        ),
    ] = False,
    vertex_ai_default_model: Annotated[
        str, typer.Option(help="For predictions that name no other.")
    ] = "",
    strict: Strict = False,
    grace: Grace = 5.0,
    half_close: HalfClose = HalfCloseOption.DISCONNECT,
    vanish_after: VanishAfter = None,
    unblind: Unblind = None,
    disconnect_grace: DisconnectGrace = 0.0,
    no_cancel_on_disconnect: NoCancelOnDisconnect = False,
    max_queue: Annotated[int, typer.Option(min=1, help="Requests that may wait.")] = 1024,
    max_num_seqs: Annotated[
        int, typer.Option(min=1, help="Requests that run at the same time.")
    ] = 64,
    arithmetic: Annotated[
        ArithmeticOption,
        typer.Option(help="What computes the model: C, torch, or our kernels on a GPU."),
    ] = ArithmeticOption.AUTO,
    device_steps: Annotated[
        int,
        typer.Option(
            min=1, help="Tokens that our kernels may draw for each request without the host."
        ),
    ] = 1,
    role: Annotated[
        RoleOption | None,
        typer.Option(help="Be a node behind `pd-proxy`: compute prompts, go on with them, both."),
    ] = None,
    kv_transfer: Annotated[
        KVTransferOption, typer.Option(help="How caches go between nodes: one host, or several.")
    ] = KVTransferOption.SHM,
    kv_address: Annotated[
        str, typer.Option(help="Of this host, by which other nodes reach it; for tcp.")
    ] = "127.0.0.1",
    kv_port: Annotated[
        int, typer.Option(min=0, max=65535, help="The same; 0 takes a free one.")
    ] = 0,
    kv_key: Annotated[
        Path | None, typer.Option(help="File with a secret that all nodes have; for tcp.")
    ] = None,
    kv_lease: Annotated[
        float,
        typer.Option(min=0.1, help="Seconds for which a cache is kept when nobody is heard of."),
    ] = 5.0,
    max_body_bytes: MaxBodyBytes = 1 << 26,
    read_timeout: ReadTimeout = 60.0,
    max_connections: MaxConnections = None,
    max_connections_per_address: MaxConnectionsPerAddress = None,
    request_timeout: RequestTimeout = None,
    cancel_bound: CancelBound = 30.0,
    api_keys: ApiKeys = None,
    admin_socket: AdminSocket = None,
    admin_port: AdminPort = None,
    admin_address: AdminAddress = "127.0.0.1",
    responses_store: Annotated[
        str | None,
        typer.Option(
            help="File, or URL of a Redis, that keeps what /v1/responses made; else memory."
        ),
    ] = None,
    responses_max_count: Annotated[
        int, typer.Option(min=1, help="Responses that are kept.")
    ] = 10_000,
    responses_max_bytes: Annotated[int, typer.Option(min=1, help="Of all of them.")] = 1 << 28,
    responses_max_age: Annotated[
        float, typer.Option(min=1, help="Seconds for which one is kept that has ended.")
    ] = 30 * 86_400.0,
    no_live_page: Annotated[
        bool, typer.Option("--no-live-page", help="Serve no page at / that shows what runs.")
    ] = False,
    log_level: LogLevel = LogLevelOption.INFO,
    log_verbose: LogVerbose = 0,
) -> None:
    """Serve models over HTTP until SIGTERM or Ctrl-C.

    One line on standard error says where and gives a curl to try; the rest of it is log
    lines in JSON, one for each request.
    """
    try:
        keys = KeyRing.read(api_keys, environment=os.environ)
        cloud = _cloud(allow_sagemaker, allow_vertex_ai, vertex_ai_default_model)
        if frontends > 1:
            refuse_in_fleet(
                {
                    "--model-repository": model_repository,
                    "--embedding-model": embedding_model,
                    "--allow-client-shm": allow_client_shm is BoolOption.TRUE,
                    "a cloud's mode": cloud,
                    "--role": role,
                }
            )
    except (OSError, ValueError) as error:
        fail(str(error))
    if role is not None and not any(entry.role is not Role.USER for entry in keys.callers):
        fail("--role needs --api-keys with a key of role service, which pd-proxy comes with")
    is_fleet = frontends > 1
    is_multi_model = allow_sagemaker and os.environ.get("SAGEMAKER_MULTI_MODEL") == "true"
    address = http_address or ("127.0.0.1" if cloud is None else "0.0.0.0")
    port = http_port if http_port is not None else 8000 if cloud is None else cloud.port
    try:
        # Before anything heavy is loaded, so that a port in use is told at once.
        with (
            bind(address, port) as http,
            bind(address, metrics_port) as metrics,
            bind_unix(str(admin_socket)) if admin_socket else contextlib.nullcontext() as admin,
            contextlib.nullcontext()
            if admin_port is None
            else bind(admin_address, admin_port) as admins_port,
        ):
            try:
                if not is_fleet:  # whose engine, and with it torch, is in another process
                    from disconnect_watch.backends.embedder import EmbedderBackend
                    from disconnect_watch.backends.engine import EngineBackend
                from disconnect_watch.backends.engines import EngineTable
                from disconnect_watch.backends.repository import ModelRepository
                from disconnect_watch.engine import DEFAULT_MODEL, CheckpointError, EngineConfig
                from disconnect_watch.server import serve as serve_until_signal
                from disconnect_watch.server.disagg.role import NodeRole
                from disconnect_watch.server.fleet.supervisor import FleetError
                from disconnect_watch.server.guard import Gatekeeper
                from disconnect_watch.server.logs import configure_logging
                from disconnect_watch.server.openai.responses.opening import open_store
                from disconnect_watch.server.openai.responses.store import StoreError, StoreLimits
                from disconnect_watch.server.run import ModelsFailedError
            except ImportError as error:
                fail(f"{error}; install it with: pip install 'disconnect-watch[server]'")

            configure_logging("debug" if log_verbose else log_level.value)
            gatekeeper = Gatekeeper(keys, has_admin_port=admins_port is not None)
            try:
                store = open_store(
                    responses_store,
                    StoreLimits(responses_max_count, responses_max_bytes, responses_max_age),
                )
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
                    strict_readiness=strict_readiness is BoolOption.TRUE,
                    allow_client_shm=allow_client_shm,
                    http_header_forward_pattern=http_header_forward_pattern,
                    http_restricted_api=http_restricted_api,
                    trace_config=trace_config,
                    cloud=cloud,
                    exit_on_error=exit_on_error is BoolOption.TRUE,
                    live_page=not no_live_page,
                )
                engine_config = EngineConfig(
                    max_queue=max_queue,
                    max_num_seqs=max_num_seqs,
                    max_num_batched_tokens=max(512, max_num_seqs),
                    arithmetic=arithmetic.value,
                    device_steps=device_steps,
                )
                engines = EngineTable()
                backend = None
                transport = None
                if role is not None:
                    transport = _transport(kv_transfer, kv_address, kv_port, kv_key)
                if not is_fleet and (model or not (model_repository or is_multi_model)):
                    backend = EngineBackend.from_pretrained(
                        model or DEFAULT_MODEL,
                        name=model_name,
                        config=engine_config,
                        chat_template=chat_template,
                        allocate=None if transport is None else transport.allocate,
                    )
                if role is not None and transport is not None:
                    if backend is None:
                        raise ValueError("--role is for the engine of --model, not a repository's")
                    node = NodeRole(backend.engine, role.value, transport, lease=kv_lease)
                    options = replace(options, node=node)
                embedder = (
                    EmbedderBackend.from_pretrained(embedding_model) if embedding_model else None
                )
            except (CheckpointError, StoreError, ValueError) as error:
                fail(str(error))

            def open_models() -> AbstractAsyncContextManager[ModelRepository | None]:
                if not model_repository and not is_multi_model:
                    return contextlib.nullcontext()
                repository = ModelRepository(
                    *model_repository or (),
                    mode="explicit" if is_multi_model else model_control_mode.value,
                    load_models=load_model or (),
                    poll_seconds=repository_poll_secs,
                    auto_complete=not disable_auto_complete_config,
                    kill_after=kill_after,
                    grace=grace,
                    engines=engines,
                    engine_config=engine_config,
                )
                if is_multi_model:
                    from disconnect_watch.server.multi_model import MultiModel

                    assert isinstance(cloud, MultiModel)
                    cloud.places = repository
                return repository

            try:
                if is_fleet:
                    serve_fleet(
                        frontends,
                        model=model or DEFAULT_MODEL,
                        model_name=model_name,
                        chat_template=chat_template,
                        engine_config=engine_config,
                        options=options,
                        keys=keys,
                        trace_config=trace_config,
                        log_level="debug" if log_verbose else log_level.value,
                        sockets={
                            "http": http,
                            "metrics": metrics,
                            "admin": admin,
                            "admin_port": admins_port,
                        },
                        store=store,
                        announce=lambda name, token: say_serving(
                            [name], [], http, metrics, token, admin_port=admins_port
                        ),
                    )
                    return
                serve_until_signal(
                    backend,
                    embedder=embedder,
                    http=http,
                    metrics=metrics,
                    options=options,
                    open_models=open_models,
                    gatekeeper=gatekeeper,
                    admin=admin,
                    admin_port=admins_port,
                    store=store,
                    engines=engines,
                    announce=lambda frontend: announce(
                        frontend,
                        http,
                        metrics,
                        gatekeeper.admin_token,
                        admin_port=admins_port,
                    ),
                )
            except (FleetError, ModelsFailedError, ValueError) as error:
                fail(str(error))
    except OSError as error:
        # What bind says is whole; of a file the name stands beside it.
        fail(str(error) if error.filename or not error.strerror else error.strerror)


def _transport(kind: KVTransferOption, address: str, port: int, key: Path | None) -> "Transport":
    from disconnect_watch.server.disagg.role import ShmTransport, TcpTransport

    if kind is KVTransferOption.SHM:
        return ShmTransport()
    if key is None:
        raise ValueError("--kv-transfer tcp needs --kv-key, a file with what all nodes know")
    return TcpTransport(key.read_bytes().strip(), host=address, port=port)


def _cloud(sagemaker: bool, vertex: bool, model: str) -> "CloudMode | None":
    vertex = vertex or os.environ.get("AIP_MODE") == "PREDICTION"
    if not (sagemaker or vertex):
        return None
    try:
        from disconnect_watch.server.cloud import SageMaker, VertexAI
    except ImportError as error:
        fail(f"{error}; install it with: pip install 'disconnect-watch[server]'")

    if sagemaker and vertex:
        raise ValueError("--allow-sagemaker and Vertex AI exclude each other, choose one")
    if sagemaker and os.environ.get("SAGEMAKER_MULTI_MODEL") == "true":
        from disconnect_watch.server.multi_model import MultiModel

        return MultiModel.from_environment(os.environ)
    if sagemaker:
        return SageMaker.from_environment(os.environ)
    if not model:
        raise ValueError("name the model for predictions with --vertex-ai-default-model")
    return VertexAI.from_environment(os.environ, model=model)
