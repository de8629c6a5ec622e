"""The pytest plugin of disconnect_watch: fixtures for tests of servers that clients leave.

A module of its own beside the package, since pytest imports it in every run: a run that uses
no fixture of it loads nothing of the package.
"""

import contextlib
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from disconnect_watch import Watcher
    from disconnect_watch.testing import LeavingClient, ThreadedServer

__all__ = ["dw_serve", "dw_watcher", "leaving_client"]


@pytest.fixture
def leaving_client() -> "Iterator[Callable[..., LeavingClient]]":
    """``leaving_client(server)`` connects a ``LeavingClient``, which is closed at the end."""
    from disconnect_watch.testing import LeavingClient

    with contextlib.ExitStack() as stack:
        yield lambda server, **options: stack.enter_context(LeavingClient(server, **options))


@pytest.fixture
def dw_serve() -> "Iterator[Callable[..., ThreadedServer]]":
    """``dw_serve(app)`` serves an ASGI application by uvicorn, as ``testing.serving`` does."""
    from disconnect_watch.testing import serving

    with contextlib.ExitStack() as stack:

        def serve(app: Any, **options: Any) -> "ThreadedServer":
            return stack.enter_context(serving(app, **options))

        yield serve


@pytest.fixture
def dw_watcher() -> "Iterator[Watcher]":
    """A ``Watcher`` of this test's own; what is still attached to it at the end is a failure."""
    from disconnect_watch import Watcher

    with Watcher() as watcher:
        yield watcher
        if watcher.is_closed:
            return
        stats = watcher.stats()
        if stats.num_connections or stats.num_armed:
            pytest.fail(
                f"left in the watcher: {stats.num_connections} connections, {stats.num_armed} "
                "armed watches; call detach() or leave the block that watches"
            )
