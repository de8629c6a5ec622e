"""uvicorn with what one may put around an application, in one process.

``_http_server`` tells how to drive it. The application answers ``{}`` at once: the least
that one can do, so what is put around it is the largest share that it can be.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import uvloop
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from bench._http_server import serve
from disconnect_watch.adapters.asgi import CancelOnDisconnect
from disconnect_watch.adapters.uvicorn import H11, HttpTools

__all__ = ["NUM_REPLY_BYTES", "VARIANTS", "factory"]

BODY = b"{}"
HEADERS = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(BODY))]
NUM_REPLY_BYTES = len(
    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
)


async def application(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
    await send({"type": "http.response.body", "body": BODY})


async def empty_middleware(scope: Any, receive: Any, send: Any) -> None:
    """The least that can be around an application."""
    await application(scope, receive, send)


async def two_tasks(scope: Any, receive: Any, send: Any) -> None:
    """The usual way: a task that works beside a task that listens, until one of them ends."""

    async def listen() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks = [
        asyncio.create_task(application(scope, receive, send)),
        asyncio.create_task(listen()),
    ]
    _, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()


#: The protocol, and the application under it, by a name whose first word is what it is
#: compared with.
VARIANTS: dict[str, tuple[Any, Any]] = {
    "httptools": (HttpToolsProtocol, application),
    "httptools, watched": (HttpTools, application),
    "httptools, empty middleware": (HttpToolsProtocol, empty_middleware),
    "httptools, two tasks": (HttpToolsProtocol, two_tasks),
    "httptools, CancelOnDisconnect": (HttpToolsProtocol, CancelOnDisconnect(application)),
    "httptools, watched, CancelOnDisconnect": (HttpTools, CancelOnDisconnect(application)),
    "h11": (H11Protocol, application),
    "h11, watched": (H11, application),
    "h11, CancelOnDisconnect": (H11Protocol, CancelOnDisconnect(application)),
}


def factory(protocol: Any, app: Any) -> Callable[[], Any]:
    """Makes protocols with this application, for ``loop.create_server``."""
    config = Config(
        app,
        interface="asgi3",
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        date_header=False,
        proxy_headers=False,
    )
    config.load()
    return partial(protocol, config, ServerState(), {})


async def main() -> None:
    """Serve until stdin ends."""
    await serve({name: factory(*variant) for name, variant in VARIANTS.items()})


if __name__ == "__main__":
    uvloop.run(main())
