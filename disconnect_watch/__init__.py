"""Notice that a client left, and cancel its work. See README.md for the drop-in."""

from disconnect_watch.errors import (
    ClientDisconnected,
    ClosedError,
    DisconnectWatchError,
    ForkedError,
    StaleWatchError,
    UnsupportedSocketError,
)
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
    "is_gone",
]
