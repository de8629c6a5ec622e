"""An application for servers in processes of their own, which tell by a file who left.

Each of its lines is ``PID begun`` or ``PID`` and the reason that ended a request.
"""

import os
from typing import Any

from disconnect_watch.adapters import TOKEN_KEY
from disconnect_watch.watcher import default_watcher

#: Names the file.
LOG = "LEAVE_LOG"

if os.environ.get("WATCH_BEFORE_FORK"):
    default_watcher()


def note(word: str) -> None:
    with open(os.environ[LOG], "a") as log:
        log.write(f"{os.getpid()} {word}\n")


async def app(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "lifespan":
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await send({"type": "lifespan.shutdown.complete"})
        return
    if scope["path"] == "/wait":
        note("begun")
        while (await receive())["type"] != "http.disconnect":
            pass
        note(scope["state"][TOKEN_KEY].reason)
        return
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": str(os.getpid()).encode()})
