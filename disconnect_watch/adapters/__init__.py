"""How the connections of a server reach the watcher; each module imports its one framework."""

from disconnect_watch.token import Reason

__all__ = ["LEAVES", "TOKEN_KEY", "WHOLE_KEY"]

#: Where in an ASGI ``scope["state"]`` a request's cancel token is.
TOKEN_KEY = "disconnect_watch.token"

#: In an ASGI ``scope["state"]`` where a response may come whole: its first message then has
#: the body under this key, and is the last. Names of headers are in lower case.
WHOLE_KEY = "disconnect_watch.whole"

#: The reasons that mean the peer is gone, not that somebody aborted its request.
LEAVES = frozenset({Reason.FIN, Reason.RESET, Reason.TIMED_OUT, Reason.OWNER_CLOSED})
