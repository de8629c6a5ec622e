"""What a process of a fleet is told when it starts; pickled, from parent to child."""

import contextlib
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from disconnect_watch.engine import EngineConfig
from disconnect_watch.keys import KeyRing
from disconnect_watch.server.run import ServeOptions

__all__ = ["EngineSetup", "FleetSetup", "FrontendSetup", "Start"]


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """The engine, see ``EngineBackend.from_pretrained``."""

    path: Path
    name: str | None = None
    chat_template: Path | None = None
    config: EngineConfig = field(default_factory=EngineConfig)


@dataclass(frozen=True, slots=True)
class FrontendSetup:
    """A frontend.

    Attributes:
        options: without ``tracing``, which is made of ``trace_config`` in each process.
        admin_token: the same for all of them; None where there are keys.
    """

    options: ServeOptions
    keys: KeyRing = field(default_factory=KeyRing)
    admin_token: str | None = None
    trace_config: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FleetSetup:
    """All of it.

    Attributes:
        log_level: see ``configure_logging``.
    """

    num_frontends: int
    engine: EngineSetup
    frontend: FrontendSetup
    log_level: str = "info"


@dataclass(frozen=True, slots=True)
class Start:
    """What one process is told.

    Attributes:
        fds: sockets by the names that ``serve`` has for them, and the flag table as ``table``.
    """

    setup: FleetSetup
    fds: Mapping[str, int]

    @contextlib.contextmanager
    def sockets(self) -> Iterator[dict[str, Any]]:
        """The sockets that were inherited, closed at the end."""
        with contextlib.ExitStack() as stack:
            yield {
                name: stack.enter_context(socket.socket(fileno=fd))
                for name, fd in self.fds.items()
                if name != "table"
            }
