"""How the connections of a server reach the watcher; each module imports its one framework."""

from disconnect_watch.token import Reason

__all__ = ["LEAVES", "TOKEN_KEY"]

#: Where in an ASGI ``scope["state"]`` a request's cancel token is.
TOKEN_KEY = "disconnect_watch.token"

#: The reasons that mean the peer is gone, not that somebody aborted its request.
LEAVES = frozenset({Reason.FIN, Reason.RESET, Reason.TIMED_OUT, Reason.OWNER_CLOSED})
