"""The error family. System failures stay ``OSError`` with their errno."""

import json
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


#: Characters of a value in a message: who sent 64 MiB does not get them back.
MAX_SHOWN = 80


def shown(value: object) -> str:
    """A value as a message gives it: as JSON, which is how its sender wrote it, and cut."""
    try:
        return cut(json.dumps(value, ensure_ascii=False))
    except (TypeError, ValueError, RecursionError):  # no JSON, or too much of it
        return f"<{type(value).__name__}>"


def cut(text: str) -> str:
    """A text as a message gives it, with an ellipsis for what is too much."""
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."


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
