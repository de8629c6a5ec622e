"""Servers that run on a loop of their own program: ``python -m tests.servers.loops``.

Each listening socket is one mode of the server.
"""

import argparse
import asyncio
import contextlib
import socket
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from tests.servers.protocol_app import protocol_app
from tests.servers.streams_app import streams_app
from tests.servers.work import work
from tests.support.aiohttp_app import aiohttp_app
from tests.support.sanic_app import sanic_app
from tests.support.tls import server_context
from tests.support.tornado_app import tornado_app

FRAMEWORKS: dict[str, Callable[..., AbstractAsyncContextManager[None]]] = {
    "aiohttp": aiohttp_app,
    "protocol": protocol_app,
    "sanic": sanic_app,
    "tornado": tornado_app,
}


async def serve(name: str, fds: dict[str, int], *, is_tls: bool) -> None:
    tls = server_context() if is_tls else None
    async with contextlib.AsyncExitStack() as stack:
        for mode, fd in fds.items():
            sock = socket.socket(fileno=fd)
            server = (
                streams_app(work, sock, tls, mode=mode)
                if name == "streams"
                else FRAMEWORKS[name](work, sock, tls, is_watched=mode != "own")
            )
            await stack.enter_async_context(server)
        await asyncio.get_running_loop().create_future()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.servers.loops", description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--tls", action="store_true")
    parser.add_argument("--fd", action="append", nargs=2, metavar=("MODE", "FD"), default=[])
    arguments = parser.parse_args()
    fds = {mode: int(fd) for mode, fd in arguments.fd}
    asyncio.run(serve(arguments.name, fds, is_tls=arguments.tls))


if __name__ == "__main__":
    main()
