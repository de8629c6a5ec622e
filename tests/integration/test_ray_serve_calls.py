"""What ``cancellable`` makes of methods, and the proxy of scopes, without a Ray around them.

Ray Serve calls them in ``test_ray.py``; no module of Ray is needed to cancel a task.
"""

import asyncio
import pickle
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from starlette.responses import StreamingResponse

from disconnect_watch import CancelToken, Reason
from disconnect_watch.adapters.ray_serve import cancellable, client_token, watch_proxy
from tests.support.net import PATIENCE, until


def test_a_call_that_counts_until_its_thread_has_ended() -> None:
    begun, may_end = threading.Event(), threading.Event()
    tokens: list[CancelToken] = []

    @cancellable
    def method() -> None:
        tokens.append(client_token())
        begun.set()
        tokens[0].wait()
        may_end.wait(PATIENCE)

    async def main() -> None:
        call = asyncio.ensure_future(method())
        await until(begun.is_set)
        call.cancel()
        await until(lambda: tokens[0].cancelled)
        await asyncio.sleep(0)
        assert not call.done()
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await call

    asyncio.run(main())
    assert tokens[0].reason is Reason.OWNER_CLOSED


def test_an_answer_of_a_plain_function_and_its_error_are_the_callers() -> None:
    @cancellable
    def divide(one: int, *, by: int) -> float:
        return one / by

    assert asyncio.run(divide(1, by=2)) == 0.5
    with pytest.raises(ZeroDivisionError):
        asyncio.run(divide(1, by=0))


@cancellable
async def stream() -> AsyncIterator[CancelToken]:
    yield client_token()
    yield client_token()


@cancellable
def stream_in_thread() -> Iterator[CancelToken]:
    yield client_token()
    yield client_token()


@pytest.mark.parametrize("method", [stream, stream_in_thread])
def test_a_stream_that_is_closed_between_two_items_has_its_token_fired(method: Any) -> None:
    async def main() -> CancelToken:
        items = method()
        token: CancelToken = await anext(items)
        assert not token.cancelled
        await items.aclose()
        return token

    assert asyncio.run(main()).cancelled


@pytest.mark.parametrize("method", [stream, stream_in_thread])
def test_a_stream_that_is_read_to_its_end_has_one_live_token(method: Any) -> None:
    async def main() -> list[CancelToken]:
        return [token async for token in method()]

    one, two = asyncio.run(main())
    assert one is two
    assert not one.cancelled


def test_a_streamed_answer_has_the_token_of_its_method() -> None:
    tokens = []

    @cancellable
    async def method() -> StreamingResponse:
        async def items() -> AsyncIterator[bytes]:
            tokens.append(client_token())
            yield b"one"

        tokens.append(client_token())
        return StreamingResponse(items())

    async def main() -> None:
        answer = await method()
        await anext(answer.body_iterator)
        await answer.body_iterator.aclose()

    asyncio.run(main())
    of_the_method, of_the_items = tokens
    assert of_the_method is of_the_items
    assert of_the_method.cancelled


def test_no_token_is_there_outside_of_a_call() -> None:
    with pytest.raises(LookupError, match="@cancellable"):
        client_token()


def test_the_scope_behind_the_proxys_watch_can_be_copied() -> None:
    scopes: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        scopes.append(scope)

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        raise AssertionError(message)

    async def main() -> None:
        (middleware,) = watch_proxy()
        proxy: Any = middleware.cls(app, *middleware.args, **middleware.kwargs)
        scope = {"type": "http", "http_version": "1.1", "headers": [], "state": {"its": "own"}}
        await proxy(scope, receive, send)

    asyncio.run(main())
    assert pickle.loads(pickle.dumps(scopes[0]))["state"] == {"its": "own"}
