"""httpx and aiohttp on an event loop."""

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any

import aiohttp
import httpx
import pytest

from tests.clients.visit import ENDED, PATIENCE, Visit, case

LIMIT = aiohttp.ClientTimeout(total=30)


async def cancel(visit: Visit, work: Coroutine[Any, Any, Any]) -> None:
    """Run work as a task until the server has its request, and cancel it."""
    task = asyncio.create_task(work)
    await asyncio.to_thread(visit.call)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


@case("httpx, async", "`timeout=`")
async def httpx_async_timeout(visit: Visit) -> None:
    async with httpx.AsyncClient(timeout=PATIENCE) as client:
        with pytest.raises(httpx.ReadTimeout):
            await client.get(visit.url)
        await asyncio.to_thread(visit.is_noticed)


@case("httpx, async", "`task.cancel()`")
async def httpx_async_cancel(visit: Visit) -> None:
    async with httpx.AsyncClient(timeout=40) as client:
        await cancel(visit, client.get(visit.url))
        await asyncio.to_thread(visit.is_noticed)


@case("httpx, async", "`await response.aclose()`", answer="stream")
async def httpx_async_aclose(visit: Visit) -> None:
    async with httpx.AsyncClient(timeout=40) as client:
        response = await client.send(client.build_request("GET", visit.url), stream=True)
        lines = response.aiter_lines()
        assert await anext(lines)
        await response.aclose()
        await asyncio.to_thread(visit.is_noticed, *ENDED)


@case("httpx, async", "`break` in `async with client.stream()`", answer="stream")
async def httpx_async_break(visit: Visit) -> None:
    async with httpx.AsyncClient(timeout=40) as client:
        async with client.stream("GET", visit.url) as response:
            async for _ in response.aiter_lines():
                break
        await asyncio.to_thread(visit.is_noticed, *ENDED)


@case("aiohttp", "`ClientTimeout(total=)`")
async def aiohttp_timeout(visit: Visit) -> None:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=PATIENCE)) as session:
        with pytest.raises(asyncio.TimeoutError):
            await session.get(visit.url)
        await asyncio.to_thread(visit.is_noticed)


@case("aiohttp", "`task.cancel()`")
async def aiohttp_cancel(visit: Visit) -> None:
    async with aiohttp.ClientSession(timeout=LIMIT) as session:
        await cancel(visit, session.get(visit.url))
        await asyncio.to_thread(visit.is_noticed)


@case("aiohttp", "`break` in `async with session.get()`", answer="stream")
async def aiohttp_break(visit: Visit) -> None:
    async with aiohttp.ClientSession(timeout=LIMIT) as session:
        async with session.get(visit.url) as response:
            async for _ in response.content:
                break
        await asyncio.to_thread(visit.is_noticed, *ENDED)


@case("aiohttp", "the response kept", answer="stream")
async def aiohttp_keep_response(visit: Visit) -> None:
    async with aiohttp.ClientSession(timeout=LIMIT) as session:
        response = await session.get(visit.url)
        assert await response.content.readline()
        await asyncio.to_thread(visit.is_unnoticed, "the response holds its connection")
        visit.then("`session.close()`")
        await session.close()
        await asyncio.to_thread(visit.is_noticed, *ENDED)
        response.close()
