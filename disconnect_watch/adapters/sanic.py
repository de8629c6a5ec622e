"""Sanic handlers that are cancelled when their client leaves.

For a whole application, or for one route::

    setup(app)

    @app.post("/infer")
    @cancel_on_disconnect
    async def infer(request: Request) -> HTTPResponse:
        return json(await generate(cancel=client_token(request)))

Sanic by itself cancels a handler when its transport has read the client's end: not while
it stops reading, with 64 KiB of further requests in its buffer, and only once the loop
comes to it. A token fires at once, for threads, too.

A handler is cancelled by the rules of ``disconnect_watch.watch``, and its request is
logged with status 499. Requests that are queued behind it are never started. Once the
last of a response is written, its client may leave.

For Sanic's own server over HTTP/1.1; under an ASGI server use ``adapters.asgi``. What is
used of Sanic beyond its documented surface (25.12, held by
``tests/integration/test_framework_adapters.py``): ``stage``, ``response`` and ``response_func``
of a request's stream, what Sanic does in stage RESPONSE after an error, and the protocol's
``_can_write``.
"""

import asyncio
import functools
from collections.abc import Callable
from inspect import isawaitable
from typing import Any, cast, overload

from sanic import HTTPResponse, Request, Sanic
from sanic.exceptions import RequestCancelled
from sanic.http import Http, Stage

from disconnect_watch.adapters import LEAVES
from disconnect_watch.adapters._watching import Watching, watching
from disconnect_watch.aio import Watch
from disconnect_watch.errors import ClientDisconnected
from disconnect_watch.token import CancelToken
from disconnect_watch.watcher import Watcher

__all__ = ["cancel_on_disconnect", "client_token", "setup"]

Handler = Callable[..., Any]

#: Of ``request.ctx``.
_TOKEN = "disconnect_watch_token"
#: Handlers of WebSockets have it: their protocol has a goodbye of its own.
_IS_WEBSOCKET = "is_websocket"


def client_token(request: Request) -> CancelToken:
    """The token of a request, which fires when its client leaves.

    Raises:
        LookupError: the request's route is not watched.
    """
    token = getattr(request.ctx, _TOKEN, None)
    if token is None:
        raise LookupError(
            f"token of {request.method} {request.path}: none; call setup(app) or add "
            "cancel_on_disconnect to the route"
        )
    return cast("CancelToken", token)


def setup(
    app: Sanic[Any, Any],
    *,
    vanish_after: float | None = None,
    watcher: Watcher | None = None,
) -> None:
    """Watch all routes of an application that exist when its server starts.

    Args:
        app: the application; blueprints are covered.
        vanish_after: see ``disconnect_watch.watch``.
        watcher: None for the process-wide one.

    Raises:
        ValueError: an option has a value that is none of these.
    """
    watch = watching(vanish_after=vanish_after, watcher=watcher)

    async def watch_routes(app: Sanic[Any, Any]) -> None:
        for route in app.router.routes:
            if not hasattr(route.handler, _IS_WEBSOCKET):
                route.handler = _watched(route.handler, watch)

    app.register_listener(watch_routes, "before_server_start")


@overload
def cancel_on_disconnect(handler: Handler, /) -> Handler: ...


@overload
def cancel_on_disconnect(
    *,
    vanish_after: float | None = None,
    watcher: Watcher | None = None,
) -> Callable[[Handler], Handler]: ...


def cancel_on_disconnect(
    handler: Handler | None = None,
    /,
    *,
    vanish_after: float | None = None,
    watcher: Watcher | None = None,
) -> Handler | Callable[[Handler], Handler]:
    """Decorate one handler, below the decorator that makes it a route.

    Args:
        handler: a function, or a method of an ``HTTPMethodView``, where the decorator is
            used without options.
        vanish_after: see ``setup``.
        watcher: see ``setup``.

    Raises:
        ValueError: an option has a value that is none of these.
    """
    watch = watching(vanish_after=vanish_after, watcher=watcher)

    def decorate(handler: Handler) -> Handler:
        return _watched(handler, watch)

    return decorate if handler is None else decorate(handler)


def _watched(handler: Handler, watch: Watching) -> Handler:
    @functools.wraps(handler)
    async def watched(*args: Any, **kwargs: Any) -> Any:
        request = next(arg for arg in args if isinstance(arg, Request))
        return await _run(request, functools.partial(handler, *args, **kwargs), watch)

    return watched


async def _run(request: Request, handle: Callable[[], Any], watch: Watching) -> Any:
    stream = request.stream
    transport = cast("asyncio.Transport | None", request.transport)
    if not isinstance(stream, Http) or transport is None:
        setattr(request.ctx, _TOKEN, CancelToken())
        return await _awaited(handle())
    block = watch(transport)
    try:
        async with block:
            if not block.has_left:
                setattr(request.ctx, _TOKEN, block.token)
                _disarm_at_end(stream, block)
                return await _awaited(handle())
    except ClientDisconnected:
        # It may be of another connection, such as the handler's own upstream.
        if block.token.reason not in LEAVES:
            raise
    except asyncio.CancelledError:
        # Sanic's own cancel, at the end of the connection, came with ours.
        if block.has_left:
            _note_left(stream)
        raise
    _note_left(stream)
    raise RequestCancelled  # Sanic closes the connection at that


async def _awaited(response: Any) -> Any:
    return await response if isawaitable(response) else response


def _disarm_at_end(stream: Http, block: Watch) -> None:
    """The client may leave as soon as it has the last byte, and that is no disconnect."""
    send = stream.response_func

    async def disarm_and_send(data: bytes, end_stream: bool) -> None:
        nonlocal send
        # A write that has to wait for the client still needs its watch.
        if end_stream and stream.protocol._can_write.is_set():
            block.disarm()
        await send(data, end_stream)
        if stream.response_func not in (None, disarm_and_send):
            # Another one, for the body, now that the head is sent.
            send, stream.response_func = stream.response_func, disarm_and_send

    stream.response_func = disarm_and_send


def _note_left(stream: Http) -> None:
    """Have the request logged as one that nobody waits for, and the connection ended.

    In stage RESPONSE Sanic sends no error after an error, nor begins another request; in
    FAILED it would not log the request either.
    """
    stream.stage = Stage.RESPONSE
    stream.response = HTTPResponse(status=499)
