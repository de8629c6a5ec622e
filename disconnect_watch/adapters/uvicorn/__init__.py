"""uvicorn's HTTP protocols, with every request watched by the kernel.

Use one in place of uvicorn's own::

    uvicorn app:app --http disconnect_watch.adapters.uvicorn:HttpTools
    uvicorn app:app --http disconnect_watch.adapters.uvicorn:H11

Each request finds its ``CancelToken`` in ``scope["state"]["disconnect_watch.token"]``,
and an application that only awaits ``receive()`` hears ``http.disconnect`` also
where uvicorn alone would keep it back: it stops reading as soon as a second request
is pipelined, and with httptools tells only the newest request of a connection.

``http_tools(...)`` and ``h11(...)`` make protocol classes with other policies, for
``uvicorn.run(app, http=...)``. All that concerns the watch is in ``_watched``.
"""

from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, Unpack

from uvicorn.protocols.http.h11_impl import H11Protocol

from disconnect_watch.adapters.uvicorn._watched import WatchedProtocol
from disconnect_watch.aio._policy import HalfClose, OnDisconnect, policy
from disconnect_watch.watcher import Watcher

if TYPE_CHECKING:
    from disconnect_watch.adapters.uvicorn._httptools import HttpTools

__all__ = ["H11", "HalfClose", "HttpTools", "OnDisconnect", "h11", "http_tools"]


class H11(WatchedProtocol, H11Protocol):
    """uvicorn's h11 protocol with a watch on the connection's socket.

    As ``HttpTools``, whose attributes it has; slower, but needs nothing that uvicorn
    itself does not.
    """


class Options(TypedDict, total=False):
    """What ``HttpTools`` documents, by the same names."""

    half_close: HalfClose
    vanish_after: float | None
    unblind: int | None
    on_disconnect: OnDisconnect
    watcher: Watcher | None


def http_tools(**options: Unpack[Options]) -> type["HttpTools"]:
    """A protocol class for ``uvicorn.Config(http=...)`` with its own policy.

    Args:
        **options: the attributes of ``HttpTools``.

    Raises:
        ValueError: no such policy.
        ImportError: httptools is not installed.
    """
    from disconnect_watch.adapters.uvicorn._httptools import HttpTools

    return _configured(HttpTools, options)


def h11(**options: Unpack[Options]) -> type[H11]:
    """A protocol class for ``uvicorn.Config(http=...)`` with its own policy; see ``http_tools``."""
    return _configured(H11, options)


P = TypeVar("P", bound=type[WatchedProtocol])


def _configured(protocol: P, options: Options) -> P:
    policy(**{name: value for name, value in options.items() if name != "watcher"})  # type: ignore[arg-type]
    return type(protocol.__name__, (protocol,), dict(options))  # type: ignore[return-value]


def __getattr__(name: str) -> Any:
    # Not at import: an installation without httptools still has H11.
    if name == "HttpTools":
        from disconnect_watch.adapters.uvicorn._httptools import HttpTools

        return HttpTools
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
