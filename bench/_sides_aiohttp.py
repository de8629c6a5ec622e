"""The work under aiohttp: ``python -m bench._sides_aiohttp FD own|ours``, see ``_sides_app``."""

import socket
import sys

from aiohttp import web

from bench._sides_work import Work
from disconnect_watch.adapters.aiohttp import middleware

__all__ = ["main"]


def main(fd: int, mode: str) -> None:
    """Serve on a listening socket."""
    work = Work()

    async def plain(request: web.Request) -> web.Response:
        return web.json_response({"done": await work.run(int(request.query["steps"]))})

    async def told(request: web.Request) -> web.Response:
        return web.json_response(work.counts())

    application = web.Application(middlewares=[middleware()] if mode == "ours" else [])
    application.add_routes([web.post("/plain", plain), web.get("/work", told)])
    web.run_app(
        application,
        sock=socket.socket(fileno=fd),
        handler_cancellation=mode == "own",
        print=lambda *_: None,
        access_log=None,
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
