"""Clients of a vLLM that stay and clients that leave it: what those who stay get."""

import asyncio
import json
import random
import time
from typing import Any

from tests.support.http import request_bytes
from tests.support.net import wait_until
from tests.support.vllm_server import MODEL, VllmServer

__all__ = ["LEAVES", "after_prompt", "idle", "live_rate", "until_idle"]

#: How clients leave: what they send last.
LEAVES = {"a close": b"", "a pipelined request, then a close": b"same"}
#: Clients that stay and that leave; seconds after which those do, and for which these are counted.
NUM_LIVE, NUM_LEAVING, STAY, WINDOW = 8, 72, 0.3, 8.0
#: Tokens of who leaves, in the crowd and alone; of a prompt.
CROWD_TOKENS, ALONE_TOKENS, PROMPT_TOKENS = 100, 1000, 12_000
#: Seconds until all of them are answered, though nobody is there.
IDLE_LIMIT = 300.0


def _request(max_tokens: int, prompt: Any = "A class is", *, stream: bool = True) -> bytes:
    body = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": stream,
    }
    return request_bytes("/v1/completions", body, content_type="application/json")


async def live_rate(server: VllmServer, leave: str | None) -> float:
    """Tokens a second of those who stay, from when the others have left; None: there are none."""
    request = _request(CROWD_TOKENS)
    if leave is not None:
        hidden = _request(CROWD_TOKENS, stream=False)
        leaving = [
            (await asyncio.open_connection("127.0.0.1", server.port))[1] for _ in range(NUM_LEAVING)
        ]
        for writer in leaving:
            writer.write(hidden)
        await asyncio.sleep(STAY)
        for writer in leaving:
            writer.write(hidden if LEAVES[leave] else b"")
            writer.close()
    counts = [0] * NUM_LIVE

    async def stay(place: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        try:
            writer.write(request)
            while b"[DONE]" not in (line := await reader.readline()):
                counts[place] += line.startswith(b"data: ")
        finally:
            writer.close()

    began = time.perf_counter()
    done, pending = await asyncio.wait(
        [asyncio.create_task(stay(place)) for place in range(NUM_LIVE)], timeout=WINDOW
    )
    took = time.perf_counter() - began
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    for task in done:
        task.result()
    return sum(counts) / took


async def until_idle(server: VllmServer, leave: str) -> float:
    """Milliseconds from a client's leaving until nothing runs and no block is held."""
    # Not a stream, at which even a server that hears nothing fails as it writes.
    request = _request(ALONE_TOKENS, stream=False)
    _, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(request)
    await asyncio.to_thread(wait_until, lambda: server.gauges()[0] == 1)
    writer.write(request if LEAVES[leave] else b"")
    writer.close()
    began = time.perf_counter()
    await idle(server)
    return (time.perf_counter() - began) * 1000


async def idle(server: VllmServer) -> None:
    """Wait until nothing runs or waits, and no block is held."""
    await asyncio.to_thread(wait_until, lambda: server.gauges() == (0, 0, 0), IDLE_LIMIT)


async def after_prompt(server: VllmServer, *, leaves: bool) -> float:
    """Milliseconds until another client's one token, behind a long prompt; see ``leaves``.

    Args:
        leaves: whether the client of the prompt leaves, after ``STAY``; else it waits for it.
    """
    prompt = [random.randrange(1, 2048) for _ in range(PROMPT_TOKENS)]
    _, long = await asyncio.open_connection("127.0.0.1", server.port)
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        long.write(_request(1, prompt, stream=False))
        await asyncio.sleep(STAY)
        if leaves:
            long.close()
        began = time.perf_counter()
        writer.write(_request(1, stream=False))
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0])
        assert json.loads(await reader.readexactly(length))["usage"]["completion_tokens"] == 1
        return (time.perf_counter() - began) * 1000
    finally:
        long.close()
        writer.close()
