"""Event loops: a block or a handler is cancelled when its client leaves.

``watch`` is for one block of code, ``start_server`` for whole connection
handlers, ``loop_mailbox`` for adapters that bring events to their own code.
Works on asyncio's loops and on uvloop.
"""

from disconnect_watch.aio._mailbox import LoopMailbox, loop_mailbox
from disconnect_watch.aio._policy import Grace, grace
from disconnect_watch.aio._server import start_server, start_unix_server
from disconnect_watch.aio._watch import Watch, watch

__all__ = [
    "Grace",
    "LoopMailbox",
    "Watch",
    "grace",
    "loop_mailbox",
    "start_server",
    "start_unix_server",
    "watch",
]
