"""``serve --frontends N``: what it can't have, and how it is put together."""

import dataclasses
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from disconnect_watch.engine import EngineConfig
    from disconnect_watch.keys import KeyRing
    from disconnect_watch.server import ServeOptions
    from disconnect_watch.server.openai.responses.store import ResponseStore

__all__ = ["refuse_in_fleet", "serve_fleet"]


def refuse_in_fleet(options: Mapping[str, Any]) -> None:
    """Refuse what only one frontend can have.

    Args:
        options: by their names, whether each was given.

    Raises:
        ValueError: names one that was.
    """
    for name, is_given in options.items():
        if is_given:
            raise ValueError(
                f"{name} goes with one frontend only: --frontends share one engine and nothing else"
            )


def serve_fleet(
    num_frontends: int,
    *,
    model: Path,
    model_name: str | None,
    chat_template: Path | None,
    engine_config: "EngineConfig",
    options: "ServeOptions",
    keys: "KeyRing",
    trace_config: list[str] | None,
    log_level: str,
    sockets: Mapping[str, socket.socket | None],
    store: "ResponseStore",
    announce: Callable[[str, str | None], None],
) -> None:
    """Serve until SIGTERM or SIGINT.

    Args:
        sockets: by the names that ``server.serve`` has for them.
        announce: called with the model's name and the admin's token once requests are taken.

    Raises:
        OSError: says on which address it cannot listen.
        FleetError: says what can't be served, and why.
    """
    from disconnect_watch.backends.engine_tensors import model_name as name_of
    from disconnect_watch.server.fleet.setup import EngineSetup, FleetSetup, FrontendSetup
    from disconnect_watch.server.fleet.supervisor import supervise
    from disconnect_watch.server.guard import Gatekeeper

    admin_token = Gatekeeper(keys).admin_token
    supervise(
        FleetSetup(
            num_frontends,
            EngineSetup(model, model_name, chat_template, engine_config),
            FrontendSetup(
                dataclasses.replace(options, tracing=None),
                keys,
                admin_token,
                tuple(trace_config or ()),
            ),
            log_level,
        ),
        {name: sock for name, sock in sockets.items() if sock is not None},
        store,
        announce=lambda: announce(name_of(model, model_name), admin_token),
    )
