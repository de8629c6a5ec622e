"""How the connection of a client that left is closed."""

import asyncio

from disconnect_watch.token import Reason

__all__ = ["hang_up"]


def hang_up(transport: asyncio.Transport, reason: Reason | None) -> None:
    """Close the connection of a client that left.

    After a FIN what is written already still goes out, to a peer that only half-closed; but
    not under TLS, where asyncio would wait 30 s for the goodbye of a peer that it does not
    read.
    """
    if reason is Reason.FIN and transport.get_extra_info("sslcontext") is None:
        transport.close()
    else:
        transport.abort()
