"""Notice that a client left, and cancel its work. See README.md for the drop-in."""

try:
    from disconnect_watch import _core as _core
except ImportError as error:
    raise ImportError(
        "the extension disconnect_watch._core is missing or was built for another Python: "
        "run 'make build' in a checkout, or 'pip install --force-reinstall disconnect-watch'"
    ) from error

from disconnect_watch.aio import grace, start_server, start_unix_server, watch
from disconnect_watch.errors import (
    ClientDisconnected,
    ClosedError,
    DisconnectWatchError,
    ForkedError,
    StaleWatchError,
    UnsupportedSocketError,
)
from disconnect_watch.native import get_include
from disconnect_watch.token import CancelToken, Reason
from disconnect_watch.watcher import Connection, Watcher, attach, is_gone

__all__ = [
    "CancelToken",
    "ClientDisconnected",
    "ClosedError",
    "Connection",
    "DisconnectWatchError",
    "ForkedError",
    "Reason",
    "StaleWatchError",
    "UnsupportedSocketError",
    "Watcher",
    "attach",
    "get_include",
    "grace",
    "is_gone",
    "start_server",
    "start_unix_server",
    "watch",
]
