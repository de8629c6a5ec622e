"""OpenAI's SDK, on ``/v1/chat/completions``."""

import asyncio
from typing import Any

import openai
import pytest

from tests.clients.looping import cancel
from tests.clients.visit import ENDED, PATIENCE, Visit, case

HELD = "the stream holds its connection until it is closed"
ASK: dict[str, Any] = {"model": "slow", "messages": [{"role": "user", "content": "Go on."}]}


def client_of(visit: Visit, **options: Any) -> openai.OpenAI:
    settings = {"timeout": 20, "max_retries": 0, **options}
    return openai.OpenAI(base_url=f"{visit.base}/v1", api_key="none", **settings)


def async_client_of(visit: Visit) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"{visit.base}/v1", api_key="none", timeout=40, max_retries=0
    )


@case("openai", "`break`, the stream kept", answer="stream")
def openai_break(visit: Visit) -> None:
    with client_of(visit) as client:
        stream = client.chat.completions.create(stream=True, **ASK)
        for chunk in stream:
            assert chunk.choices[0].delta.content == "tick "
            break
        visit.is_unnoticed(HELD)
        visit.then("`stream.close()`")
        stream.close()
        visit.is_noticed(*ENDED)


@case("openai", "`break` in `with stream`", answer="stream")
def openai_with(visit: Visit) -> None:
    with client_of(visit) as client:
        with client.chat.completions.create(stream=True, **ASK) as stream:
            assert next(stream).choices
        visit.is_noticed(*ENDED)


@case("openai", "`client.close()`", answer="stream")
def openai_client_close(visit: Visit) -> None:
    client = client_of(visit)
    stream = client.chat.completions.create(stream=True, **ASK)
    assert next(stream).choices
    client.close()
    visit.is_noticed(*ENDED)


@case("openai", "`timeout=`, `max_retries=1`")
def openai_retries(visit: Visit) -> None:
    with client_of(visit, timeout=PATIENCE, max_retries=1) as client:
        with pytest.raises(openai.APITimeoutError):
            client.chat.completions.create(**ASK)
        visit.is_noticed()
        visit.then("the retry, a request of its own")
        visit.is_noticed(number=1)


@case("openai, async", "`task.cancel()`")
async def openai_async_cancel(visit: Visit) -> None:
    async with async_client_of(visit) as client:
        await cancel(visit, client.chat.completions.create(**ASK))
        await asyncio.to_thread(visit.is_noticed)


@case("openai, async", "`break`, the stream kept", answer="stream")
async def openai_async_break(visit: Visit) -> None:
    async with async_client_of(visit) as client:
        stream = await client.chat.completions.create(stream=True, **ASK)
        async for _ in stream:
            break
        await asyncio.to_thread(visit.is_unnoticed, HELD)
        visit.then("`await stream.close()`")
        await stream.close()
        await asyncio.to_thread(visit.is_noticed, *ENDED)
