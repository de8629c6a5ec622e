"""HTTP servers in one process that differ only in what they do about leaving clients.

Each listens on a port of its own, so they share everything else. Two families:

    bare    replies when a request's head ends: no parsing, no task. The least
            that a server can do, hence the hardest to be compared with.
    http    parses with httptools and runs a handler in a task for each request.

Prints its ports as JSON. Then orders come line by line on stdin, each answered
by a line; end of file ends the process:

    cpu          the process's CPU time so far, nanoseconds
    zero         start callgrind's count anew
    dump LABEL   write callgrind's count out
"""

import asyncio
import ctypes
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import cast

import httptools
import uvloop

import disconnect_watch as dw
from bench._build import build_library

__all__ = ["REPLY", "VARIANTS", "serve"]

BODY = b'{"model_name":"tiny","text_output":"a word and another"}'
REPLY = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (
    len(BODY),
    BODY,
)


class Bare(asyncio.Protocol):
    """Replies to every head, watching nobody."""

    transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are asyncio's by their methods, not by their class.
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if b"\r\n\r\n" in data:
            self.respond()

    def respond(self) -> None:
        self.transport.write(REPLY)


class Watched(Bare):
    """Attached for as long as the connection is open, as every adapter does it."""

    connection: dw.Connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.connection = dw.attach(transport.get_extra_info("socket"))

    def connection_lost(self, exc: Exception | None) -> None:
        self.connection.lost()
        self.connection.detach()


class BareArmed(Watched):
    """Armed for each request, with the one token that no request has spent yet."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.token = dw.CancelToken()

    def respond(self) -> None:
        watch_id = self.connection.arm(self.token)
        self.transport.write(REPLY)
        self.connection.disarm(watch_id)


class BareToken(Watched):
    """Armed for each request, with a token of its own."""

    def respond(self) -> None:
        watch_id = self.connection.arm(dw.CancelToken())
        self.transport.write(REPLY)
        self.connection.disarm(watch_id)


class Http(Bare):
    """Parses, and handles each request in a task."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.loop = asyncio.get_running_loop()
        self.parser = httptools.HttpRequestParser(self)
        self.headers: list[tuple[bytes, bytes]] = []
        self.task: asyncio.Task[None] | None = None

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self.url = url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_message_complete(self) -> None:
        self.task = self.loop.create_task(self.handle())
        self.headers = []

    async def handle(self) -> None:
        await asyncio.sleep(0)
        self.respond()


class HttpArmed(Http, Watched):
    """Armed for each request, with a token of its own, by the protocol."""

    async def handle(self) -> None:
        watch_id = self.connection.arm(dw.CancelToken())
        await asyncio.sleep(0)
        self.respond()
        self.connection.disarm(watch_id)


class HttpWatch(Http):
    """``async with dw.watch``, as a handler of one's own would."""

    async def handle(self) -> None:
        async with dw.watch(self.transport):
            await asyncio.sleep(0)
            self.respond()


VARIANTS: dict[str, type[Bare]] = {
    "bare": Bare,
    "bare, armed": BareArmed,
    "bare, armed with a new token": BareToken,
    "http": Http,
    "http, armed with a new token": HttpArmed,
    "http, watch": HttpWatch,
}


class Orders:
    """Obeys what stdin says."""

    def __init__(self) -> None:
        self._marks = ctypes.CDLL(str(build_library("marks"))) if "--marks" in sys.argv else None
        self._buffer = b""
        self.is_over = asyncio.get_running_loop().create_future()

    def read(self) -> None:
        data = os.read(sys.stdin.fileno(), 4096)
        if not data and not self.is_over.done():
            self.is_over.set_result(None)
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            verb, _, label = line.partition(b" ")
            print(self._obey(verb, label), flush=True)

    def _obey(self, verb: bytes, label: bytes) -> int:
        if verb == b"cpu":
            return time.process_time_ns()
        assert self._marks is not None, f"order {verb!r}: start with --marks"
        if verb == b"zero":
            self._marks.marks_zero()
        else:
            self._marks.marks_dump(label)
        return 0


async def serve(variants: Mapping[str, Callable[[], asyncio.BaseProtocol]]) -> None:
    """Serve each protocol on a port of its own until stdin ends."""
    loop = asyncio.get_running_loop()
    servers = {
        name: await loop.create_server(protocol, "127.0.0.1", 0)
        for name, protocol in variants.items()
    }
    print(json.dumps({n: s.sockets[0].getsockname()[1] for n, s in servers.items()}), flush=True)
    orders = Orders()
    loop.add_reader(sys.stdin.fileno(), orders.read)
    await orders.is_over
    loop.remove_reader(sys.stdin.fileno())
    for server in servers.values():
        server.close()
        await server.wait_closed()


if __name__ == "__main__":
    uvloop.run(serve(VARIANTS))
