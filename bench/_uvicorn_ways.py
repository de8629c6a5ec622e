"""The ways in which an application learns of a disconnect under uvicorn.

One endpoint a protocol class: uvicorn's own, and ours. The application runs
whatever way a trial is about.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from disconnect_watch.adapters.uvicorn import HttpTools

__all__ = ["LISTEN", "Endpoint", "Way", "poll_every", "serve"]

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Way:
    """How an application waits for its client's leaving.

    Attributes:
        notice: returns when it noticed.
        period: seconds from one look to the next; 0 for one that is told.
    """

    notice: Callable[[Scope, Receive], Awaitable[None]]
    period: float = 0.0


def poll_every(period: float) -> Way:
    """Ask Starlette's ``is_disconnected()`` every `period` seconds."""

    async def poll(scope: Scope, receive: Receive) -> None:
        request = Request(scope, receive)
        while not await request.is_disconnected():  # noqa: ASYNC110 polling is what is measured
            await asyncio.sleep(period)

    return Way(poll, period)


async def _listen(scope: Scope, receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


#: Await ``receive()`` until it says ``http.disconnect``.
LISTEN = Way(_listen)


class Endpoint:
    """A listening server, and the application behind it, which serves one trial at a time."""

    def __init__(self) -> None:
        self.port = 0
        self._way = LISTEN
        self._begun: asyncio.Future[None]
        self._noticed: asyncio.Future[int]
        self._tasks: set[asyncio.Task[Any]] = set()
        self._transports: set[asyncio.BaseTransport] = set()

    def expect(self, way: Way) -> None:
        """Have the next request wait in this way, and requests behind it end at once."""
        loop = asyncio.get_running_loop()
        self._way = way
        self._begun, self._noticed = loop.create_future(), loop.create_future()

    async def begun(self) -> None:
        """Wait for the request."""
        await asyncio.wait_for(self._begun, 10)

    async def noticed_ns(self, give_up: float) -> int | None:
        """When it noticed, ``time.monotonic_ns``; None if it did not within `give_up` seconds."""
        await asyncio.wait((self._noticed,), timeout=give_up)
        return self._noticed.result() if self._noticed.done() else None

    async def end(self) -> None:
        """End what runs, and the connections, so that nothing reaches the next trial."""
        for transport in tuple(self._transports):
            transport.abort()  # type: ignore[attr-defined]
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        while self._transports:  # noqa: ASYNC110 connection_lost comes with the loop's next turns
            await asyncio.sleep(0)

    async def application(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application. It answers nobody: its clients leave."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            if self._begun.done():
                return
            self._begun.set_result(None)
            await self._way.notice(scope, receive)
            self._noticed.set_result(time.monotonic_ns())
        finally:
            self._tasks.discard(task)

    def note_transport(self, transport: asyncio.BaseTransport, *, is_open: bool) -> None:
        """Know of a connection, to end it."""
        (self._transports.add if is_open else self._transports.discard)(transport)


@asynccontextmanager
async def serve(*, is_watched: bool) -> AsyncIterator[Endpoint]:
    """An endpoint on loopback under uvicorn's protocol or, watched, under ours."""
    endpoint = Endpoint()
    base = HttpTools if is_watched else HttpToolsProtocol

    class Protocol(base):  # type: ignore[misc, valid-type]
        """Tells the endpoint of its transport."""

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            endpoint.note_transport(transport, is_open=True)
            super().connection_made(transport)

        def connection_lost(self, exc: Exception | None) -> None:
            endpoint.note_transport(self.transport, is_open=False)
            super().connection_lost(exc)

    config = Config(
        endpoint.application, interface="asgi3", log_config=None, access_log=False, lifespan="off"
    )
    config.load()
    state = ServerState()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Protocol(config, state, {}, loop), "127.0.0.1", 0)
    endpoint.port = server.sockets[0].getsockname()[1]
    logger = logging.getLogger("uvicorn.error")
    level = logger.level
    # A way that never notices is cancelled without an answer, which is no error here.
    logger.setLevel(logging.CRITICAL)
    try:
        yield endpoint
    finally:
        server.close()
        await endpoint.end()
        await server.wait_closed()
        logger.setLevel(level)
