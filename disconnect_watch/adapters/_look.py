"""Whether who calls ``receive()`` waits in it, or only has a look.

Starlette's ``is_disconnected()`` looks: it receives inside a scope of anyio's that is
cancelled already. What it is told then may not reach it: ``BaseHTTPMiddleware``, which
awaits once more on the way, drops the message there, and remembers it as delivered.
"""

import math
import sys

__all__ = ["is_mere_look"]


def is_mere_look() -> bool:
    """Whether the current task is in a cancelled scope of anyio's, if that is in use."""
    anyio = sys.modules.get("anyio")
    return anyio is not None and anyio.current_effective_deadline() == -math.inf
