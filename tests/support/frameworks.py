"""Servers of frameworks that are not ASGI, each with the same handlers, on a thread of its own.

A handler is written once, against ``Exchange``; a framework says how one of its requests
becomes one, and how its server starts.
"""

import asyncio
import contextlib
import functools
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from disconnect_watch.errors import ClientDisconnected
from disconnect_watch.ports import bind
from disconnect_watch.token import CancelToken, Reason
from disconnect_watch.watcher import Watcher
from tests.support.loops import LOOP_FACTORIES
from tests.support.net import until, wait_until
from tests.support.tls import server_context

CHUNK = b"data: 1\n\n"


class Answering(Protocol):
    """One request, as who answers it without a look at its body sees it."""

    path: str
    token: CancelToken

    async def begin(self, *, length: int | None = None) -> None:
        """Send the head, of a body of so many bytes or of any number."""

    async def write(self, data: bytes) -> None: ...

    async def end(self) -> None: ...


class Exchange(Answering, Protocol):
    """One request, and the response to it."""

    async def read(self) -> bytes: ...


@dataclass
class Record:
    """What handlers did.

    Attributes:
        tokens: of the requests that were started, by path.
        ended: how each ended, by path: "done", or the name of what it raised.
        go_on: lets ``/finish`` end.
        flood: how often ``/flood`` could write.
    """

    tokens: dict[str, CancelToken] = field(default_factory=dict)
    ended: dict[str, str] = field(default_factory=dict)
    go_on: threading.Event = field(default_factory=threading.Event)
    flood: int = 0

    def has_written_more_than(self, flood: int) -> bool:
        return self.flood > flood


async def behave(exchange: Exchange, record: Record) -> bytes | None:
    """Do what the path says. Returns the body of a response that is not a stream."""
    path = exchange.path
    record.tokens[path] = exchange.token
    try:
        body = await _answer(exchange, record)
    except BaseException as error:
        record.ended[path] = type(error).__name__
        raise
    record.ended[path] = "done"
    return body


async def _answer(exchange: Exchange, record: Record) -> bytes | None:
    match exchange.path.strip("/").partition("-")[0]:
        case "wait":
            await _forever()
        case "read":
            await exchange.read()
            await _forever()
        case "stream":
            await exchange.begin()
            await exchange.write(CHUNK)
            await _forever()
        case "flood":
            await exchange.begin()
            while True:
                await exchange.write(bytes(65536))
                record.flood += 1
        case "finish":
            await exchange.begin()
            await exchange.write(CHUNK)
            await exchange.end()
            await until(record.go_on.is_set)
            return None
        case "thread":
            await asyncio.shield(asyncio.to_thread(exchange.token.wait, 30))
        case "swallow":
            with contextlib.suppress(asyncio.CancelledError):
                await _forever()
            return b"swallowed"
        case "group":
            async with asyncio.TaskGroup() as group:
                group.create_task(_forever())
        case "fail":
            raise ZeroDivisionError
        case "foreign":
            raise ClientDisconnected(Reason.FIN, 0.0)  # of the handler's own upstream, say
    return exchange.path.encode() + b"=" + await exchange.read()


async def _forever() -> None:
    await asyncio.get_running_loop().create_future()


#: What answers a request; it returns the body of a response that is not a stream.
Answer = Callable[[Any], Awaitable[bytes | None]]


class Framework(Protocol):
    """How a server starts whose requests are all answered by ``answer``."""

    def __call__(
        self, answer: Answer, sock: socket.socket, tls: ssl.SSLContext | None, **options: Any
    ) -> AbstractAsyncContextManager[None]: ...


@dataclass
class Running:
    """A server that serves.

    Attributes:
        record: what its handlers did.
        watcher: its own.
        reports: what reached its loop's exception handler.
    """

    port: int
    record: Record
    watcher: Watcher
    loop: asyncio.AbstractEventLoop
    reports: list[dict[str, Any]]

    def num_tasks(self) -> int:
        return len(asyncio.all_tasks(self.loop))


@contextlib.contextmanager
def serving(
    framework: Framework, *, loop_kind: str = "asyncio", is_tls: bool = False, **options: Any
) -> Iterator[Running]:
    """The server; at the end it has left nothing in its watcher and told its loop of no error."""
    record = Record()
    loop = LOOP_FACTORIES[loop_kind]()
    started = threading.Event()
    stop = asyncio.Event()
    reports: list[dict[str, Any]] = []

    async def main() -> None:
        loop.set_exception_handler(lambda _, context: reports.append(context))
        answer = functools.partial(behave, record=record)
        async with framework(answer, sock, tls, watcher=watcher, **options):
            started.set()
            await stop.wait()

    def run() -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: loop) as runner:
                runner.run(main())
        finally:
            started.set()

    tls = server_context() if is_tls else None
    with Watcher() as watcher, bind("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        thread = threading.Thread(target=run, name="test-framework")
        thread.start()
        try:
            assert started.wait(40)
            yield Running(port, record, watcher, loop, reports)
            wait_until(lambda: watcher.stats().num_connections == 0)
            assert watcher.stats().num_armed == 0
            assert not reports
        finally:
            record.go_on.set()
            with contextlib.suppress(RuntimeError):  # the loop is closed: main() failed
                loop.call_soon_threadsafe(stop.set)
            thread.join(40)
            assert not thread.is_alive(), "the server did not stop"
