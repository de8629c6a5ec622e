"""Which store it is, by what a user says."""

from pathlib import Path

from disconnect_watch.server.openai.responses.sqlite_store import SqliteStore
from disconnect_watch.server.openai.responses.store import (
    ResponseStore,
    StoreError,
    StoreLimits,
)

__all__ = ["open_store"]


def open_store(where: str | None, limits: StoreLimits) -> ResponseStore:
    """The store of ``--responses-store``.

    Args:
        where: the path of a file, or the URL of a Redis; None is memory, which does not outlive
            the server.

    Raises:
        StoreError: it cannot be opened.
    """
    if where is not None and where.startswith(("redis://", "rediss://", "unix://")):
        try:
            from disconnect_watch.server.openai.responses.redis_store import RedisStore
        except ImportError as error:
            raise StoreError(
                f"{error}; install it with: pip install 'disconnect-watch[redis]'"
            ) from error

        return RedisStore(where, limits=limits)
    return SqliteStore(None if where is None else Path(where), limits=limits)
