"""uvicorn's protocols, its own and ours, in one process; ``_http_server`` says how to drive it.

The application answers ``{}`` at once: the least that one can do, so what a protocol
adds is the largest share that it can be.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import uvloop
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from bench._http_server import serve
from disconnect_watch.adapters.uvicorn import H11, HttpTools

__all__ = ["NUM_REPLY_BYTES", "PROTOCOLS"]

BODY = b"{}"
HEADERS = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(BODY))]
NUM_REPLY_BYTES = len(
    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
)

#: Each of ours after what it is compared with.
PROTOCOLS: dict[str, Any] = {
    "httptools": HttpToolsProtocol,
    "httptools, watched": HttpTools,
    "h11": H11Protocol,
    "h11, watched": H11,
}


async def application(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
    await send({"type": "http.response.body", "body": BODY})


def factories() -> dict[str, Callable[[], Any]]:
    """Makes a protocol of each kind, for ``loop.create_server``."""
    config = Config(
        application,
        interface="asgi3",
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        date_header=False,
    )
    config.load()
    state = ServerState()
    return {name: partial(protocol, config, state, {}) for name, protocol in PROTOCOLS.items()}


async def main() -> None:
    """Serve until stdin ends."""
    await serve(factories())


if __name__ == "__main__":
    uvloop.run(main())
