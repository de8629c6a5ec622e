"""Servers that run on a loop of their own program: ``python -m tests.servers.loops``.

Each listening socket is one mode of the server.
"""

import argparse
import asyncio
import contextlib
import socket
from importlib import import_module

from tests.servers.work import work
from tests.support.tls import server_context

#: By name: the module, which has a function of that name and "_app". Each process loads one.
MODULES = {
    "aiohttp": "tests.support.aiohttp_app",
    "protocol": "tests.servers.protocol_app",
    "sanic": "tests.support.sanic_app",
    "streams": "tests.servers.streams_app",
    "tornado": "tests.support.tornado_app",
}


async def serve(name: str, fds: dict[str, int], *, is_tls: bool) -> None:
    start = getattr(import_module(MODULES[name]), f"{name}_app")
    tls = server_context() if is_tls else None
    async with contextlib.AsyncExitStack() as stack:
        for mode, fd in fds.items():
            sock = socket.socket(fileno=fd)
            options = {"mode": mode} if name == "streams" else {"is_watched": mode != "own"}
            server = start(work, sock, tls, **options)
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
