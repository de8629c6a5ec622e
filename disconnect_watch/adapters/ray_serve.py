"""A cancel token for each request of Ray Serve.

    @serve.deployment
    class Model:
        @cancellable
        def __call__(self, request):  # in a thread, with or without async
            return generate(request, cancel=client_token())

    RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=disconnect_watch.adapters.ray_serve.watch_proxy

Serve cancels the task of a request when its HTTP proxy hears that the client left, or when
its time is over; a thread or an engine it does not tell, and a plain function it never stops.
The token does, with reason OWNER_CLOSED: which of the two it was, Serve does not say.

The proxy runs in a process of its own. It hears nothing of a client that leaves behind a
pipelined request; with ``watch_proxy`` as its callback, it does.

What is used of Ray beyond its documented surface (2.60, held by
``tests/integration/test_ray.py``): that Serve closes a stream with a ``CancelledError``.
"""

import asyncio
import contextvars
import functools
import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator
from contextlib import aclosing
from typing import Any

from starlette.middleware import Middleware
from starlette.responses import StreamingResponse

from disconnect_watch.adapters._telling import telling
from disconnect_watch.adapters.asgi import CancelOnDisconnect
from disconnect_watch.token import CancelToken, Reason

__all__ = ["cancellable", "client_token", "watch_proxy"]

#: Keys of a scope's state that our adapters write.
_OURS = "disconnect_watch."

_token: contextvars.ContextVar[CancelToken] = contextvars.ContextVar("client_token")


def client_token() -> CancelToken:
    """The token of the request that this context works for.

    Raises:
        LookupError: its method is not ``cancellable``.

    Threads: any that ``cancellable`` or ``asyncio.to_thread`` began; others are given it.
    """
    try:
        return _token.get()
    except LookupError:
        raise LookupError(
            "token of a request of Ray Serve: none; make its method @cancellable"
        ) from None


def cancellable(method: Callable[..., Any]) -> Callable[..., Any]:
    """Give each call of a deployment's method a token, which fires when Serve cancels it.

    Coroutines and asynchronous generators hear of it as before, once the token has fired.
    Plain functions and generators are run in a thread, and Serve's count of ongoing requests
    has them until they end. An answer that is a ``StreamingResponse`` has the same token to
    its end.
    """
    # Ray copies the methods of a script by value, with all that they name: these name nothing
    # but functions, which it copies by name.
    if inspect.isasyncgenfunction(method) or inspect.isgeneratorfunction(method):

        @functools.wraps(method)
        async def stream(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
            async with aclosing(_stream(method, args, kwargs)) as items:
                async for item in items:
                    yield item

        return stream

    @functools.wraps(method)
    async def answer(*args: Any, **kwargs: Any) -> Any:
        return await _answer(method, args, kwargs)

    return answer


def watch_proxy() -> list[Middleware]:
    """What Serve's HTTP proxy puts around itself: the kernel's word on each of its clients."""
    return [Middleware(_Watched)]


class _Watched:
    """An ASGI application whose clients are watched, and which is told of a leave alone.

    The proxy copies the scope to another process. No token of this one can go there, and a
    watch of this one must not keep the application there from one of its own.
    """

    def __init__(self, app: Callable[..., Any]) -> None:
        self._app = app
        self._watching = CancelOnDisconnect(self._without_token)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self._watching(scope, receive, send)

    async def _without_token(self, scope: Any, receive: Any, send: Any) -> None:
        state = scope.get("state")
        if state:
            kept = {key: value for key, value in state.items() if not key.startswith(_OURS)}
            scope = {**scope, "state": kept}
        await self._app(scope, receive, send)


async def _answer(method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    is_async = inspect.iscoroutinefunction(method)
    token = CancelToken()
    before = _token.set(token)
    try:
        call = method(*args, **kwargs) if is_async else _in_thread(method, *args, **kwargs)
        result = await telling(call, functools.partial(_cancel, token))
    finally:
        _token.reset(before)
    if isinstance(result, StreamingResponse):
        result.body_iterator = _streaming(aiter(result.body_iterator), token)
    return result


def _stream(method: Callable[..., Any], args: Any, kwargs: Any) -> AsyncGenerator[Any, None]:
    items = method(*args, **kwargs)
    return _streaming(
        items if isinstance(items, AsyncGenerator) else _in_steps(items), CancelToken()
    )


def _cancel(token: CancelToken) -> None:
    token.cancel(Reason.OWNER_CLOSED)


async def _streaming(items: AsyncIterator[Any], token: CancelToken) -> AsyncGenerator[Any, None]:
    """The items, each made while the context has the token."""
    cancel = functools.partial(_cancel, token)
    try:
        while True:
            before = _token.set(token)
            try:
                item = await telling(anext(items), cancel)
            except StopAsyncIteration:
                return
            finally:
                _token.reset(before)
            yield item
    except (asyncio.CancelledError, GeneratorExit):  # while it waited for its reader
        cancel()
        raise
    finally:
        if isinstance(items, AsyncGenerator):
            await items.aclose()


async def _in_steps(items: Generator[Any, None, None]) -> AsyncGenerator[Any, None]:
    """The items of a plain generator, each made in a thread."""
    end = object()
    try:
        while (item := await _in_thread(next, items, end)) is not end:
            yield item
    finally:
        await _in_thread(items.close)


async def _in_thread(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call it in a thread, in a copy of this context; a cancel waits for its end."""
    call = functools.partial(contextvars.copy_context().run, function, *args, **kwargs)
    work = asyncio.get_running_loop().run_in_executor(None, call)
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        # The token has fired. Serve may send the next request once this has ended.
        await asyncio.wait([work])
        if not work.cancelled():
            work.exception()  # nobody else asks
        raise
