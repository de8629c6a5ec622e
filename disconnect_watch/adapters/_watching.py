"""What the adapters of handlers share: options checked once, and a watch for each request."""

import asyncio
from collections.abc import Callable

from disconnect_watch.aio import Watch
from disconnect_watch.aio._policy import OnDisconnect, policy
from disconnect_watch.watcher import Watcher

__all__ = ["Watching", "watching"]

#: Makes the watch of one request.
Watching = Callable[[asyncio.Transport | int], Watch]


def watching(
    *,
    vanish_after: float | None,
    watcher: Watcher | None,
    on_disconnect: OnDisconnect = "cancel",
) -> Watching:
    """Check the options of an adapter.

    The watches pause nothing: the framework reads the rest of a request's body.

    Raises:
        ValueError: an option has a value that is none of those allowed.
    """
    checked = policy(vanish_after=vanish_after, on_disconnect=on_disconnect)

    def watch(target: asyncio.Transport | int) -> Watch:
        return Watch(target, checked, False, watcher)

    return watch
