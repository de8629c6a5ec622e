"""Where the connection of an ASGI request is, server by server.

In the order in which they are tried:

    protocol    our own uvicorn protocol watches it already, and made the request's token
    transport   the server's transport, reached through what it called us with
    addresses   the fd between the two addresses of the scope; the socket is native code's
    none        nothing: a Unix socket of such a server, HTTP/3, addresses from a proxy's
                header, a test client without a connection

A transport is watched once and for as long as it is open, since it tells of its end. An
fd alone does not, so it is watched for one request, and looked at again once it is:
until then it may have been closed, and its number be another's.
"""

import asyncio
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from disconnect_watch.adapters import TOKEN_KEY
from disconnect_watch.adapters._fast import CALL_KEY
from disconnect_watch.adapters.fdlookup import FdLookup, SocketFd, address
from disconnect_watch.aio import LoopMailbox, loop_mailbox
from disconnect_watch.aio._connection import (
    LoopConnection,
    connection_known_to,
    connection_of_fd,
    connection_of_transport,
)
from disconnect_watch.errors import DisconnectWatchError
from disconnect_watch.watcher import Watcher

__all__ = ["Found", "How", "connection_of", "find"]

How = Literal["protocol", "transport", "addresses", "none"]

Scope = Mapping[str, Any]


class Found(NamedTuple):
    """The way to a request's connection.

    Attributes:
        how: "protocol", "transport", "addresses" or "none".
        transport: the server's, where it can be reached.
        socket: the fd, where only its addresses are known.
        is_lost: whether there is none any more: the connection was closed, by native code
            that goes on with the requests it has read.
    """

    how: How
    transport: asyncio.Transport | None = None
    socket: SocketFd | None = None
    is_lost: bool = False


def _of_uvicorn(receive: Any, send: Any) -> Any:
    return receive.__self__.transport  # the request's cycle


def _of_gunicorn(receive: Any, send: Any) -> Any:
    return receive.__self__.protocol.transport  # the body's receiver


def _of_hypercorn(receive: Any, send: Any) -> Any:
    http_stream = send.__self__
    http_connection = http_stream.send.__self__
    return http_connection.send.__self__.writer.transport


_PATHS: tuple[Callable[[Any, Any], Any], ...] = (_of_uvicorn, _of_gunicorn, _of_hypercorn)

_lookup = FdLookup()
#: The sockets of connections that have no transport.
_sockets: weakref.WeakKeyDictionary[LoopConnection, SocketFd] = weakref.WeakKeyDictionary()


def find(scope: Scope, receive: Any, send: Any) -> Found:
    """The way to the connection of a request, registering nothing.

    Args:
        scope: the request's.
        receive: as the server gave it; wrapped, it hides the way by the transport.
        send: as the server gave it.
    """
    state = scope.get("state", ())
    how: How = "protocol" if TOKEN_KEY in state and CALL_KEY not in state else "transport"
    for path in _PATHS:
        try:
            return Found(how, path(receive, send))
        except AttributeError:
            continue
    if how == "protocol":
        return Found(how)
    local, peer = address(scope.get("server")), address(scope.get("client"))
    if local is None or peer is None:
        return Found("none")
    # HTTP/3 has addresses too, but of datagrams.
    socket = _lookup.find(local, peer)
    if socket is not None:
        return Found("addresses", None, socket)
    is_lost = scope["http_version"] in ("1.0", "1.1") and _lookup.has_lost(local, peer)
    return Found("addresses", is_lost=True) if is_lost else Found("none")


def connection_of(found: Found, watcher: Watcher | None) -> LoopConnection | None:
    """The watched connection of an open transport or socket; None where it cannot be watched.

    Where nothing follows the connection's end it is the first request that attaches it
    and the last one that detaches it, through ``arm`` and ``leave``.
    """
    try:
        if found.transport is not None:
            known = connection_known_to(found.transport, watcher)
            return known or _of_transport(found.transport, loop_mailbox(watcher))
        if found.socket is not None:
            return _of_socket(found.socket, loop_mailbox(watcher))
    except (DisconnectWatchError, OSError):
        # Not a stream socket, closed since, or attached by another loop: http.disconnect
        # is what is left.
        return None
    return None


def _of_transport(transport: asyncio.Transport, mailbox: LoopMailbox) -> LoopConnection | None:
    sock = transport.get_extra_info("socket")
    if sock is None:
        return None
    return connection_of_transport(mailbox, transport, sock.fileno(), must_follow=True)


def _of_socket(socket: SocketFd, mailbox: LoopMailbox) -> LoopConnection | None:
    known = mailbox.connections.get(socket.fd)
    if known is not None and known.transport is None and _sockets.get(known) != socket:
        known.ended(None)  # the connection that had this number before
    connection = connection_of_fd(mailbox, socket.fd)
    if not socket.is_current():
        if not connection.is_followed:
            connection.ended(None)
        return None
    _sockets[connection] = socket
    return connection
