"""The error family. System failures stay ``OSError`` with their errno."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from disconnect_watch.token import Reason

__all__ = [
    "ClientDisconnected",
    "ClosedError",
    "DisconnectWatchError",
    "ForkedError",
    "StaleWatchError",
    "UnsupportedSocketError",
]


class DisconnectWatchError(Exception):
    """Base of every error that is this package's own."""


class ClosedError(DisconnectWatchError):
    """The watcher or connection was used after it was closed."""


class StaleWatchError(DisconnectWatchError, LookupError):
    """A watch id, connection or flag that no longer names anything alive."""


class UnsupportedSocketError(DisconnectWatchError, ValueError):
    """The object is no open stream socket, or its kind cannot be watched."""


class ForkedError(DisconnectWatchError):
    """A watcher made before ``os.fork`` was used in the child, where its thread does not exist."""


class ClientDisconnected(DisconnectWatchError, ConnectionError):
    """The client left while its request was being worked on.

    Attributes:
        reason: how it left.
        detected_at: seconds on the ``time.monotonic`` clock at which the watcher saw it.
    """

    def __init__(self, reason: "Reason", detected_at: float) -> None:
        super().__init__(f"client disconnected: {reason.value}")
        self.reason = reason
        self.detected_at = detected_at

    def __reduce__(self) -> "tuple[type[ClientDisconnected], tuple[Reason, float]]":
        return type(self), (self.reason, self.detected_at)
