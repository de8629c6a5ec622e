"""The work as RPCs of ``grpc.aio``: ``python -m tests.servers.grpc_server``.

One server has our interceptor, the other none; where they listen is their first event. A
request is its own name.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
from grpc import aio

from disconnect_watch.adapters.grpc import Interceptor, client_token
from disconnect_watch.token import CancelToken
from tests.servers.work import chunks, note, seconds_of, told

SERVICE = "Work"


class Handlers:
    """The work as a coroutine, as a stream, and as a function in a thread."""

    def __init__(self, *, is_ours: bool) -> None:
        self._is_ours = is_ours

    async def wait(self, request: bytes, context: Any) -> bytes:
        name = request.decode()
        token = self._token(context)
        note("started", name)
        note("ready", name)
        try:
            await asyncio.sleep(seconds_of(name))
        except BaseException:
            told(name, token)
            raise
        note("done", name)
        return b""

    async def stream(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        async for chunk in chunks(request.decode(), self._token(context)):
            yield chunk

    def thread(self, request: bytes, context: Any) -> bytes:
        name = request.decode()
        token = self._token(context)
        note("started", name)
        note("ready", name)
        if self._is_ours and token.wait(seconds_of(name)):
            told(name, token)
        elif not self._is_ours:
            time.sleep(seconds_of(name))
        note("done", name)
        return b""

    def _token(self, context: Any) -> CancelToken:
        return client_token(context) if self._is_ours else CancelToken()


async def start(*, is_ours: bool) -> tuple[Any, int]:
    """A server, and its port."""
    server = aio.server(interceptors=[Interceptor()] if is_ours else [])
    handlers = Handlers(is_ours=is_ours)
    methods = {
        "wait": grpc.unary_unary_rpc_method_handler(handlers.wait),
        "stream": grpc.unary_stream_rpc_method_handler(handlers.stream),
        "thread": grpc.unary_unary_rpc_method_handler(handlers.thread),
    }
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, methods)])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return server, port


async def main() -> None:
    own, own_port = await start(is_ours=False)
    ours, ours_port = await start(is_ours=True)
    note("serving", "", own=own_port, ours=ours_port)
    await asyncio.gather(own.wait_for_termination(), ours.wait_for_termination())


if __name__ == "__main__":
    asyncio.run(main())
