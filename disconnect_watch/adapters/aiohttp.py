"""aiohttp handlers that are cancelled when their client leaves.

For a whole application, or for one route::

    app = web.Application(middlewares=[middleware()])

    @cancel_on_disconnect
    async def infer(request: web.Request) -> web.Response:
        return web.json_response(await generate(cancel=client_token(request)))

aiohttp by itself tells a handler nothing unless ``handler_cancellation`` is set, and
then only what its transport reads: it stops reading when requests queue up behind a
running one, or when more of a body waits than the handler takes.

A handler is cancelled by the rules of ``disconnect_watch.watch``, and its request is
logged with status 499. Requests that are queued behind it are never started. Once the
last of a response is written, its client may leave.

What is used of aiohttp beyond its documented surface (3.14, held by
``tests/integration/test_aiohttp_adapter.py``): the protocol's ``writing_paused``, that the
writer of a request takes an attribute, and that a response is not sent into a transport
that is closing.
"""

import contextlib
import functools
from collections.abc import Awaitable, Callable
from typing import Any, cast, overload

from aiohttp import payload, web
from aiohttp.typedefs import Handler, Middleware

from disconnect_watch.adapters import LEAVES, TOKEN_KEY
from disconnect_watch.adapters._hang_up import hang_up
from disconnect_watch.adapters._watching import Watching, watching
from disconnect_watch.aio import Grace, Watch
from disconnect_watch.aio._policy import OnDisconnect
from disconnect_watch.errors import ClientDisconnected
from disconnect_watch.token import CancelToken
from disconnect_watch.watcher import Watcher

__all__ = ["Grace", "cancel_on_disconnect", "client_token", "middleware"]

#: A function of a request, a method of a ``web.View``, or one of another object.
RouteHandler = Callable[..., Awaitable[web.StreamResponse]]

#: aiohttp warns of a str from 3.14 on, and knows nothing else before.
_KEY: Any = web.RequestKey("token", CancelToken) if hasattr(web, "RequestKey") else TOKEN_KEY


def client_token(request: web.Request) -> CancelToken:
    """The token of a request, which fires when its client leaves.

    Raises:
        LookupError: the request's route is not watched.
    """
    try:
        return cast("CancelToken", request[_KEY])
    except KeyError:
        raise LookupError(
            f"token of {request.method} {request.path}: none; add middleware() to the "
            "application or cancel_on_disconnect to the route"
        ) from None


def middleware(
    *,
    on_disconnect: OnDisconnect = "cancel",
    vanish_after: float | None = None,
    watcher: Watcher | None = None,
) -> Middleware:
    """A middleware for ``web.Application(middlewares=[...])``; put it first.

    It covers what the middlewares behind it do, and the iterator of a response's body.

    Args:
        on_disconnect: "cancel", or ``grace(seconds)`` to let a handler go on for a while.
        vanish_after: see ``disconnect_watch.watch``.
        watcher: None for the process-wide one.

    Raises:
        ValueError: an option has a value that is none of these.
    """
    watch = watching(on_disconnect=on_disconnect, vanish_after=vanish_after, watcher=watcher)

    @web.middleware
    async def watched(request: web.Request, handler: Handler) -> web.StreamResponse:
        return await _run(request, functools.partial(_answer, request, handler), watch)

    return watched


@overload
def cancel_on_disconnect(handler: RouteHandler, /) -> RouteHandler: ...


@overload
def cancel_on_disconnect(
    *,
    on_disconnect: OnDisconnect = "cancel",
    vanish_after: float | None = None,
    watcher: Watcher | None = None,
) -> Callable[[RouteHandler], RouteHandler]: ...


def cancel_on_disconnect(
    handler: RouteHandler | None = None,
    /,
    *,
    on_disconnect: OnDisconnect = "cancel",
    vanish_after: float | None = None,
    watcher: Watcher | None = None,
) -> RouteHandler | Callable[[RouteHandler], RouteHandler]:
    """Decorate one handler: a function, a method of a ``web.View``, or another method.

    Args:
        handler: the handler, where the decorator is used without options.
        on_disconnect: see ``middleware``.
        vanish_after: see ``middleware``.
        watcher: see ``middleware``.

    Raises:
        ValueError: an option has a value that is none of these.
    """
    watch = watching(on_disconnect=on_disconnect, vanish_after=vanish_after, watcher=watcher)

    def decorate(handler: RouteHandler) -> RouteHandler:
        @functools.wraps(handler)
        async def watched(*args: Any) -> web.StreamResponse:
            request = args[-1].request if isinstance(args[-1], web.View) else args[-1]
            return await _run(request, functools.partial(handler, *args), watch)

        return watched

    return decorate if handler is None else decorate(handler)


async def _answer(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Run the handler and, where work may be left in it, the body of its response.

    aiohttp would iterate over that body behind all middlewares.
    """
    response = await handler(request)
    if isinstance(response, web.Response) and isinstance(response.body, payload.Payload):
        with contextlib.suppress(ConnectionError):  # aiohttp finds that out again, and logs it
            await response.prepare(request)
            await response.write_eof()
    return response


async def _run(
    request: web.Request, handle: Callable[[], Awaitable[web.StreamResponse]], watch: Watching
) -> web.StreamResponse:
    if request.headers.get("Upgrade", "").lower() == "websocket":
        # Its protocol has a goodbye of its own, behind which the client may close.
        request[_KEY] = CancelToken()
        return await handle()
    transport = request.transport
    if transport is None:
        return _left()
    block = watch(transport)
    try:
        async with block:
            if not block.has_left:
                request[_KEY] = block.token
                _disarm_at_end(request, block)
                return await handle()
    except ClientDisconnected:
        # It may be of another connection, such as the handler's own upstream.
        if block.token.reason not in LEAVES:
            raise
    finally:
        # Also where the handler made an answer or an error of its own of the cancel:
        # a request behind it may be of a route that is not watched.
        if block.reason in LEAVES:
            hang_up(transport, block.reason)
    return _left()


def _disarm_at_end(request: web.Request, block: Watch) -> None:
    """The client may leave as soon as it has the last byte, and that is no disconnect."""
    writer = request.writer
    write_eof = writer.write_eof

    async def disarm_and_write_eof(chunk: bytes = b"") -> None:
        # A write that has to wait for the client still needs its watch.
        if not request.protocol.writing_paused:
            block.disarm()
        await write_eof(chunk)

    vars(writer)["write_eof"] = disarm_and_write_eof


def _left() -> web.Response:
    """What aiohttp logs; it finds the transport closed and sends nothing."""
    return web.Response(status=499, reason="Client Closed Request")
