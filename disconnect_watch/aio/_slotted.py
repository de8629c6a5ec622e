"""Hear from a protocol whose instances take no attribute (``__slots__``).

aiohttp's and Sanic's are such. What cannot be put on the instance goes on its class:
while it is followed, the instance is of a subclass that adds no slot, so that Python
lets the class of a living object be exchanged. The subclass finds the connection by the
protocol's identity, which is the connection's alone for as long as it holds the protocol.

Nothing of the transport holds the connection then; so the loop does, by way of its mailbox,
until the connection detaches.
"""

import asyncio
import types
import weakref
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from disconnect_watch.aio._connection import LoopConnection

__all__ = ["follow_slotted"]

_connections: weakref.WeakValueDictionary[int, "LoopConnection"] = weakref.WeakValueDictionary()


def follow_slotted(
    connection: "LoopConnection", protocol: asyncio.BaseProtocol, known_as: str
) -> Callable[[], None] | None:
    """Report the callbacks of ``protocol`` to ``connection`` first.

    Args:
        connection: who hears of it.
        protocol: has no ``__dict__``.
        known_as: the attribute under which the protocol then has the connection.

    Returns:
        What undoes it; None where the protocol's class cannot be exchanged.
    """
    own: Any = type(protocol)
    following = _following(own, known_as)
    try:
        protocol.__class__ = following
    except (TypeError, AttributeError):
        return None
    held = connection.mailbox.held
    held.add(connection)
    _connections[id(protocol)] = connection

    def undo() -> None:
        if _connections.get(id(protocol)) is connection:
            del _connections[id(protocol)]
            if type(protocol) is following:
                protocol.__class__ = own
        held.discard(connection)

    return undo


@cache
def _following(own: type[asyncio.BaseProtocol], known_as: str) -> type[asyncio.BaseProtocol]:
    """The subclass that tells. One a class; the name stays, for logs that show it."""

    def known(self: asyncio.BaseProtocol) -> "LoopConnection | None":
        return _connections.get(id(self))

    def connection_lost(self: asyncio.BaseProtocol, error: Exception | None) -> None:
        connection = known(self)
        if connection is not None:
            connection.ended(error)
        own.connection_lost(self, error)

    def eof_received(self: asyncio.BaseProtocol) -> bool | None:
        connection = known(self)
        if connection is not None:
            connection.end_of_stream()
        keeps_open: bool | None = own.eof_received(self)  # type: ignore[attr-defined]
        return keeps_open

    members: dict[str, Any] = {
        "__slots__": (),
        "__module__": own.__module__,
        "__qualname__": own.__qualname__,
        known_as: property(known),
        "connection_lost": connection_lost,
    }
    if hasattr(own, "eof_received"):
        members["eof_received"] = eof_received
    return types.new_class(own.__name__, (own,), exec_body=lambda names: names.update(members))
