"""The work as a FastAPI application, with what people do about a client that leaves.

    POST /plain?steps=N       nothing
    POST /poll?steps=N        ``is_disconnected()`` before each step
    POST /decorator?steps=N   a decorator that awaits ``http.disconnect`` beside the handler, as
                              vLLM's API server does (``vllm/entrypoints/utils.py``)
    GET  /work                what was done so far

``app`` is left to its server, ``ours`` is watched.
"""

import asyncio
import contextlib
import functools
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from bench._sides_work import Work
from disconnect_watch.adapters.asgi import CancelOnDisconnect

__all__ = ["app", "ours"]

app = FastAPI()
ours = CancelOnDisconnect(app)
_work = Work()

Handler = Callable[[Request, int], Awaitable[Any]]


def _beside_a_listener(handler: Handler) -> Handler:
    """Whichever ends first, the handler or the listener, cancels the other."""

    @functools.wraps(handler)
    async def listened(request: Request, steps: int) -> Any:
        handling = asyncio.ensure_future(handler(request, steps))
        listening = asyncio.ensure_future(_disconnected(request))
        await asyncio.wait({handling, listening}, return_when=asyncio.FIRST_COMPLETED)
        for task in (handling, listening):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await listening
        with contextlib.suppress(asyncio.CancelledError):
            return await handling
        return JSONResponse({"done": False}, 499)

    return listened


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


@app.post("/plain")
async def plain(request: Request, steps: int) -> dict[str, bool]:
    return {"done": await _work.run(steps)}


@app.post("/poll")
async def poll(request: Request, steps: int) -> dict[str, bool]:
    return {"done": await _work.run(steps, request.is_disconnected)}


@app.post("/decorator")
@_beside_a_listener
async def decorator(request: Request, steps: int) -> dict[str, bool]:
    return {"done": await _work.run(steps)}


@app.get("/work")
async def work() -> dict[str, int]:
    return _work.counts()
