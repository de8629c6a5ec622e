"""Which store it is, by what a user says."""

from pathlib import Path

from disconnect_watch.server.openai.responses.sqlite_store import SqliteStore
from disconnect_watch.server.openai.responses.store import ResponseStore, StoreLimits

__all__ = ["open_store"]


def open_store(where: str | None, limits: StoreLimits) -> ResponseStore:
    """The store of ``--responses-store``.

    Args:
        where: the path of a file; None is memory, which does not outlive the server.

    Raises:
        StoreError: it cannot be opened.
    """
    return SqliteStore(None if where is None else Path(where), limits=limits)
