"""Tornado handlers that are cancelled when their client leaves.

For a whole application, or for one method of a handler::

    setup(app)

    class Infer(RequestHandler):
        @cancel_on_disconnect
        async def post(self) -> None:
            self.write(await generate(cancel=client_token(self)))

Tornado by itself calls ``on_connection_close`` and cancels nothing; and it no longer
looks as soon as one byte of a further request has come.

A handler is cancelled by the rules of ``disconnect_watch.watch``, and its request is
logged with status 499. Of requests that are queued behind it, which Tornado would serve
from its buffer to nobody, the method never starts. Once a response is finished, its client
may leave.

Tornado's streams are no asyncio transports: a stream is watched by its fd, attached once,
and ``close_fd`` is shadowed on the instance to tell of the end before the fd is closed.

What is used of Tornado beyond its documented surface (6.6, held by
``tests/integration/test_framework_adapters.py``): the ``stream`` of an HTTP/1 connection.
"""

import asyncio
import contextlib
import functools
import ssl
from collections.abc import Callable
from inspect import isawaitable
from typing import Any, cast, overload

from tornado.http1connection import HTTP1Connection
from tornado.iostream import IOStream, StreamClosedError
from tornado.web import Application, Finish, RequestHandler

from disconnect_watch.adapters import LEAVES
from disconnect_watch.adapters._watching import Watching, watching
from disconnect_watch.aio import Watch, loop_mailbox
from disconnect_watch.aio._connection import LoopConnection
from disconnect_watch.aio._policy import OnDisconnect
from disconnect_watch.errors import ClientDisconnected
from disconnect_watch.token import CancelToken, Reason
from disconnect_watch.watcher import Watcher, is_gone

__all__ = ["cancel_on_disconnect", "client_token", "setup"]

Method = Callable[..., Any]

#: Of a handler.
_TOKEN = "_disconnect_watch_token"


def client_token(handler: RequestHandler) -> CancelToken:
    """The token of a handler's request, which fires when its client leaves.

    Raises:
        LookupError: the method that runs is not watched.
    """
    token = getattr(handler, _TOKEN, None)
    if token is None:
        request = handler.request
        raise LookupError(
            f"token of {request.method} {request.path}: none; call setup(app) or add "
            "cancel_on_disconnect to the method"
        )
    return cast("CancelToken", token)


def setup(
    app: Application,
    *,
    on_disconnect: OnDisconnect = "cancel",
    vanish_after: float | None = None,
    watcher: Watcher | None = None,
) -> None:
    """Watch the methods of all handlers of an application, those added later included.

    Args:
        app: the application; its handlers are run as subclasses of theirs.
        on_disconnect: "cancel", or ``grace(seconds)`` to let a handler go on for a while.
        vanish_after: see ``disconnect_watch.watch``.
        watcher: None for the process-wide one.

    Raises:
        ValueError: an option has a value that is none of these.
    """
    watch = watching(on_disconnect=on_disconnect, vanish_after=vanish_after, watcher=watcher)
    get_handler_delegate = app.get_handler_delegate

    classes: dict[type[RequestHandler], type[RequestHandler]] = {}

    def delegate(
        request: Any, target_class: type[RequestHandler], *args: Any, **kwargs: Any
    ) -> Any:
        if target_class not in classes:
            classes[target_class] = _watched_class(target_class, watch, watcher)
        return get_handler_delegate(request, classes[target_class], *args, **kwargs)

    vars(app)["get_handler_delegate"] = delegate


@overload
def cancel_on_disconnect(method: Method, /) -> Method: ...


@overload
def cancel_on_disconnect(
    *,
    on_disconnect: OnDisconnect = "cancel",
    vanish_after: float | None = None,
    watcher: Watcher | None = None,
) -> Callable[[Method], Method]: ...


def cancel_on_disconnect(
    method: Method | None = None,
    /,
    *,
    on_disconnect: OnDisconnect = "cancel",
    vanish_after: float | None = None,
    watcher: Watcher | None = None,
) -> Method | Callable[[Method], Method]:
    """Decorate one method (``get``, ``post`` …) of a ``RequestHandler``.

    Args:
        method: the method, where the decorator is used without options.
        on_disconnect: see ``setup``.
        vanish_after: see ``setup``.
        watcher: see ``setup``.

    Raises:
        ValueError: an option has a value that is none of these.
    """
    watch = watching(on_disconnect=on_disconnect, vanish_after=vanish_after, watcher=watcher)

    def decorate(method: Method) -> Method:
        return _watched(method, watch, watcher)

    return decorate if method is None else decorate(method)


def _watched_class(
    own: type[RequestHandler], watch: Watching, watcher: Watcher | None
) -> type[RequestHandler]:
    methods = {name.lower(): getattr(own, name.lower()) for name in own.SUPPORTED_METHODS}
    members: dict[str, Any] = {
        name: _watched(method, watch, watcher)
        for name, method in methods.items()
        if method is not RequestHandler._unimplemented_method
    }
    return type(own.__name__, (own,), {"__module__": own.__module__, **members})


def _watched(method: Method, watch: Watching, watcher: Watcher | None) -> Method:
    @functools.wraps(method)
    async def watched(handler: RequestHandler, *args: Any, **kwargs: Any) -> None:
        handle = functools.partial(method, handler, *args, **kwargs)
        connection = handler.request.connection
        if isinstance(connection, HTTP1Connection):
            await _run(handler, connection.stream, handle, watch, watcher)
        else:
            setattr(handler, _TOKEN, CancelToken())
            await _awaited(handle())

    return watched


async def _run(
    handler: RequestHandler,
    stream: IOStream,
    handle: Callable[[], Any],
    watch: Watching,
    watcher: Watcher | None,
) -> None:
    if not stream.closed():
        _attach(stream, watcher)
        block = watch(stream.socket.fileno())
        try:
            async with block:
                if not block.has_left:
                    setattr(handler, _TOKEN, block.token)
                    _disarm_at_end(handler, stream, block)
                    await _awaited(handle())
                    return
        except ClientDisconnected:
            # It may be of another connection, such as the handler's own upstream.
            if block.token.reason not in LEAVES:
                raise
        finally:
            # Also where the handler made an answer or an error of its own of the cancel.
            if block.reason in LEAVES:
                _begin_no_more(stream)
    else:
        _begin_no_more(stream)
    await asyncio.sleep(0)  # on_connection_close() is due; to finish would be to call it off
    handler.set_status(499, "Client Closed Request")
    raise Finish


def _begin_no_more(stream: IOStream) -> None:
    """Close a stream, and take what is in its buffer, which Tornado would serve all the same."""
    stream.close()
    _take_buffer(stream)


def _take_buffer(stream: IOStream) -> None:
    with contextlib.suppress(StreamClosedError):  # nothing was
        stream.read_bytes(stream.max_buffer_size, partial=True)


async def _awaited(result: Any) -> None:
    if isawaitable(result):
        await result


def _disarm_at_end(handler: RequestHandler, stream: IOStream, block: Watch) -> None:
    """The client may leave as soon as it has the last byte, and that is no disconnect.

    The handshake of a WebSocket, whose protocol has a goodbye of its own, ends so too.
    """
    finish = handler.finish

    def disarm_and_finish(*args: Any, **kwargs: Any) -> Any:
        # What has to wait for the client still needs its watch.
        if not stream.writing():
            block.disarm()
        return finish(*args, **kwargs)

    vars(handler)["finish"] = disarm_and_finish


def _attach(stream: IOStream, watcher: Watcher | None) -> None:
    """Attach a stream once, until it closes its fd; the watches of its fd then share that."""
    attributes = vars(stream)
    if "close_fd" in attributes:
        return
    fd, close_fd = stream.socket.fileno(), stream.close_fd
    connection = LoopConnection(loop_mailbox(watcher), fd)
    connection.adopt(lambda: attributes.pop("close_fd", None))

    def tell_and_close_fd() -> None:
        error = None if isinstance(stream.error, ssl.SSLError) else stream.error
        # Tornado closes at the end that it reads, and names no error. Under TLS the FIN may
        # still be on its way then; but no task of the application's is running.
        is_read = asyncio.current_task() is None
        reason = is_gone(fd) or (Reason.FIN if is_read else None)
        if error is None and reason is not None:
            connection.mailbox.lost(connection.conn, reason)
        is_watched = bool(connection.blocks)
        connection.ended(error)
        close_fd()
        if is_watched:
            # A handler still runs, perhaps for its grace, and Tornado goes on without it: to
            # the next request in the buffer, a turn or two of the loop from now.
            asyncio.get_running_loop().call_soon(_take_buffer, stream)

    attributes["close_fd"] = tell_and_close_fd
