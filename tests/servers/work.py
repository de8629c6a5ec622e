"""What each request does, in the server's own process, and what it says of itself.

What happens goes line by line, as JSON, into the pipe that ``DW_EVENTS`` names:

    started    the handler runs
    ready      the answer is as far as it is to be when the client leaves
    noticed    the handler was cut off, and by which reason
    done       it worked to the end
    settled    after an answer that is long over: the reason of its token, where there is one
    zombie     a request was begun that lay behind the one whose client left

The path of a request ends in the kind of its answer and its name, see ``named``:

    /wait/NAME     nothing is sent
    /half/NAME     the head and half of a body of known length
    /stream/NAME   the head and one chunk of a stream
    /flood/NAME    more than the client and both kernels take
    /last/NAME     the whole answer, after which the handler works on
    /quick/NAME    the whole answer, and nothing else
    /zombie/NAME   the same
"""

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator
from typing import Any

from disconnect_watch.token import CancelToken
from tests.support.frameworks import Answering

__all__ = [
    "CHUNK",
    "HALF",
    "LONG_WORK",
    "QUICK",
    "WORK",
    "WORK_BEHIND",
    "chunks",
    "named",
    "note",
    "seconds_of",
    "told",
    "work",
]

#: Seconds of work. A handler that gets through them was never told.
WORK = 1.0
#: Seconds of work of a handler that must be told, and is even where the machine is slow.
LONG_WORK = 20.0
#: Seconds of work behind an answer, and until a token that is silent stays so.
WORK_BEHIND = 0.3

CHUNK = b"data: 1\n\n"
HALF = bytes(500)
QUICK = b"quick"
_FLOOD = bytes(1 << 24)


def named(name: str, seconds: float) -> str:
    """The name of a request that is to work so long."""
    return f"{name}~{seconds:g}"


def seconds_of(name: str) -> float:
    """How long a request of that name works."""
    return float(name.rpartition("~")[2])


def note(event: str, name: str, **more: Any) -> None:
    """Say that something happened."""
    line = {"event": event, "name": name, "at_ns": time.monotonic_ns(), **more}
    # Short enough for a pipe to take it whole, whoever else writes.
    with open(os.environ["DW_EVENTS"], "ab", buffering=0) as events:
        events.write(json.dumps(line).encode() + b"\n")


def told(name: str, token: CancelToken) -> None:
    """Say that the handler knows of the leave."""
    note("noticed", name, reason=_reason(token))


async def work(exchange: Answering) -> bytes | None:
    """Do what the path says. Returns the body of an answer that is sent as a whole."""
    kind, name = exchange.path.split("/")[-2:]
    if kind in ("quick", "zombie"):
        note(kind, name)
        asyncio.get_running_loop().call_later(WORK_BEHIND, _settle, name, exchange.token)
        return QUICK
    note("started", name)
    try:
        await _answer(exchange, kind, name)
    except BaseException:
        told(name, exchange.token)
        raise
    note("done", name)
    return QUICK if kind == "wait" else None


async def chunks(name: str, token: CancelToken) -> AsyncIterator[bytes]:
    """The work of ``/stream/NAME`` for frameworks that iterate over a stream."""
    note("started", name)
    try:
        yield CHUNK
        note("ready", name)
        await asyncio.sleep(seconds_of(name))
        yield CHUNK
    except BaseException:
        told(name, token)
        raise
    note("done", name)


def _settle(name: str, token: CancelToken) -> None:
    note("settled", name, reason=_reason(token))


def _reason(token: CancelToken) -> str:
    return token.reason.name if token.reason else ""


async def _answer(exchange: Answering, kind: str, name: str) -> None:
    if kind == "half":
        await exchange.begin(length=2 * len(HALF))
        await exchange.write(HALF)
    elif kind != "wait":
        await exchange.begin()
        await exchange.write(CHUNK)
    if kind == "last":
        await exchange.end()
        await asyncio.sleep(seconds_of(name))
        return
    note("ready", name)
    if kind == "flood":
        await exchange.write(_FLOOD)
        await exchange.write(CHUNK)
    await asyncio.sleep(seconds_of(name))
    if kind == "half":
        await exchange.write(HALF)
    if kind != "wait":
        await exchange.end()
