"""How an application says by an exception that it stopped, as its client left.

Starlette raises one of its own from each read of a body whose client is gone. It would be
logged as a failure, with a traceback for every upload that was given up.
"""

import sys

from disconnect_watch.errors import ClientDisconnected

__all__ = ["says_client_left"]


def says_client_left(error: BaseException | None) -> bool:
    """Whether that is what an application ended by; of which client is not asked."""
    if isinstance(error, ClientDisconnected):
        return True
    starlette = sys.modules.get("starlette.requests")
    return starlette is not None and isinstance(error, starlette.ClientDisconnect)
