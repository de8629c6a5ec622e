"""One route of Starlette or FastAPI that stops with its client, and its token.

::

    @app.post("/generate")
    @cancel_on_disconnect
    async def generate(prompt: str, token: CancelToken = Depends(client_token)): ...

A route has two parts, the function and, where it returned a stream, the sending of it.
Each is watched for itself, with one token for both; between them the framework works.

For a whole application ``CancelOnDisconnect`` is the better way: it is outermost, and so
finds the connection itself also behind middleware that wraps ``receive``.
"""

import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar, cast, overload

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from disconnect_watch.adapters import TOKEN_KEY
from disconnect_watch.adapters._asgi_call import (
    CLIENT_CLOSED_REQUEST,
    Scope,
    Send,
)
from disconnect_watch.adapters._asgi_uvicorn import calls
from disconnect_watch.adapters._fast import CALL_KEY, Calls
from disconnect_watch.adapters._inbox import Inbox, Receive
from disconnect_watch.aio._policy import OnDisconnect, policy
from disconnect_watch.token import CancelToken
from disconnect_watch.watcher import Watcher

__all__ = ["cancel_on_disconnect", "client_token"]

Route = TypeVar("Route", bound=Callable[..., Any])


class Decorator(Protocol):
    """Takes a route of any kind."""

    def __call__(self, route: Route, /) -> Route: ...


#: The parameter through which FastAPI hands a route its request.
_PARAMETER = "disconnect_watch_request"
_IS_WATCHED = "_disconnect_watch_is_watched"


def client_token(request: Request) -> CancelToken:
    """The token of a request; for FastAPI, ``Depends(client_token)``.

    Raises:
        RuntimeError: nobody watches this request.
    """
    state: dict[str, Any] = request.scope.setdefault("state", {})
    token: CancelToken | None = state.get(TOKEN_KEY)
    if token is None and hasattr(request.scope.get("endpoint"), _IS_WATCHED):
        # The dependencies of a route come before it: it will watch with this token.
        token = state[TOKEN_KEY] = CancelToken()
        state[CALL_KEY] = False
    if token is None:
        raise RuntimeError(
            f"no cancel token for {request.url.path!r}: wrap the application in "
            "CancelOnDisconnect, decorate the route with @cancel_on_disconnect, or serve it "
            "by disconnect_watch.adapters.uvicorn"
        )
    return token


@overload
def cancel_on_disconnect(route: Route) -> Route: ...


@overload
def cancel_on_disconnect(
    *,
    vanish_after: float | None = None,
    on_disconnect: OnDisconnect = "cancel",
    watcher: Watcher | None = None,
) -> Decorator: ...


def cancel_on_disconnect(
    route: Route | None = None,
    *,
    vanish_after: float | None = None,
    on_disconnect: OnDisconnect = "cancel",
    watcher: Watcher | None = None,
) -> Any:
    """Have one route run for as long as its client is there.

    An ``async def`` route is cancelled when the client leaves. A ``def`` route runs in the
    thread pool, where nothing can be cancelled: it gets the token (``client_token``), and
    nobody waits for it any more. The stream that a route returns is closed, too. Inside a
    ``CancelOnDisconnect`` the decorator adds nothing.

    Args:
        route: of Starlette or FastAPI; goes below the framework's own decorator.
        vanish_after: see ``CancelOnDisconnect``.
        on_disconnect: see ``CancelOnDisconnect``.
        watcher: None for the process-wide one.

    Raises:
        TypeError: the route is a generator, which FastAPI sends itself.
        ValueError: an option has a value that is none of these.
    """
    checked = policy(vanish_after=vanish_after, on_disconnect=on_disconnect)
    watching = _Watching(calls(checked, watcher))
    return watching.decorate if route is None else watching.decorate(route)


class _Watching:
    """What the routes of one decorator have in common."""

    def __init__(self, calls: Calls) -> None:
        self.calls = calls

    def decorate(self, route: Route) -> Route:
        if inspect.isasyncgenfunction(route) or inspect.isgeneratorfunction(route):
            raise TypeError(
                f"watch the route {route!r}: it is a generator, which FastAPI sends itself; "
                "wrap the application in CancelOnDisconnect, or return a StreamingResponse"
            )
        work = route if _is_async(route) else _in_thread(route)

        @functools.wraps(route)
        async def watched(*args: Any, **kwargs: Any) -> Any:
            request = kwargs.pop(_PARAMETER, None) or _request_among(*args, *kwargs.values())
            if request.scope.get("state", {}).get(CALL_KEY):
                return await work(*args, **kwargs)
            return await self._answer(request, functools.partial(work, *args, **kwargs))

        watched.__signature__ = _with_request(route)  # type: ignore[attr-defined]
        watched.__dict__[_IS_WATCHED] = True
        # FastAPI would look through it for annotations, and whether this is a coroutine.
        del watched.__wrapped__
        return cast("Route", watched)

    async def _answer(self, request: Request, work: Callable[[], Awaitable[Any]]) -> Any:
        receive = request.receive
        call = self.calls.make(request.scope, receive, request._send)
        request._receive = call.receive  # one reader, see _inbox
        answer = None
        with call as is_there:
            if is_there:
                answer = await work()
        request._receive = receive
        state = request.scope["state"]
        if call.is_borrowed:
            del state[CALL_KEY]
        else:
            state[CALL_KEY] = False
        if call.has_left:
            call.log()
            # Else a server goes on to what waits behind it, on a socket that it closes.
            is_shared = request.scope["http_version"] not in ("1.0", "1.1")
            return Response(
                status_code=CLIENT_CLOSED_REQUEST,
                headers=None if is_shared else {"connection": "close"},
            )
        if isinstance(answer, Response) and hasattr(answer, "body_iterator"):
            _watch_sending(answer, self, call.inbox)
        return answer


class _WatchedSending:
    """What a streaming response becomes: one that is sent for as long as its client is there."""

    _watching: _Watching
    _inbox: Inbox | None
    body_iterator: Any

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = super().__call__  # type: ignore[misc]
        call = self._watching.calls.make(scope, receive, send)
        call.inbox = self._inbox
        with call as is_there:
            if is_there:
                await response(scope, call.receive, call.send)
        if call.has_left:
            await self._close_body()
            call.log()
            await call.answer_nobody()

    async def _close_body(self) -> None:
        """Run the ``finally`` blocks of a stream that was not in one of its own waits."""
        aclose = getattr(self.body_iterator, "aclose", None)
        if aclose is not None:
            await aclose()


#: By the class that a route returned.
_watched_kinds: dict[type[Response], type[Response]] = {}


def _watch_sending(response: Any, watching: _Watching, inbox: Inbox | None) -> None:
    # Python looks ``__call__`` up on the type; a wrapper around the response would hide
    # the attributes that frameworks go on setting.
    kind = type(response)
    if kind not in _watched_kinds:
        _watched_kinds[kind] = type(f"Watched{kind.__name__}", (_WatchedSending, kind), {})
    response._watching = watching
    response._inbox = inbox
    response.__class__ = _watched_kinds[kind]


def _is_async(route: Callable[..., Any]) -> bool:
    """Whether a route is a coroutine function, or an object that is called like one."""
    is_async = inspect.iscoroutinefunction
    return is_async(route) or is_async(getattr(route, "__call__", None))  # noqa: B004


def _in_thread(route: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
    async def run(*args: Any, **kwargs: Any) -> Any:
        return await run_in_threadpool(route, *args, **kwargs)

    return run


def _request_among(*values: Any) -> Request:
    for value in values:
        if isinstance(value, Request):
            return value
    raise TypeError("cancel_on_disconnect: the route was called without a starlette Request")


def _with_request(route: Callable[..., Any]) -> inspect.Signature:
    """The signature of a route with a parameter more, for FastAPI to fill in."""
    signature = _signature(route)
    parameters = list(signature.parameters.values())
    if any(parameter.annotation is Request for parameter in parameters):
        return signature
    own = inspect.Parameter(_PARAMETER, inspect.Parameter.KEYWORD_ONLY, annotation=Request)
    has_rest = bool(parameters) and parameters[-1].kind is inspect.Parameter.VAR_KEYWORD
    parameters.insert(len(parameters) - has_rest, own)
    return signature.replace(parameters=parameters)


def _signature(route: Callable[..., Any]) -> inspect.Signature:
    """The signature of a route, whose annotations FastAPI cannot evaluate any more.

    A name that only type checkers import stays a string. Starlette asks for none.
    """
    try:
        return inspect.signature(route, eval_str=True)
    except NameError:
        signature = inspect.signature(route)
    names = getattr(inspect.unwrap(route), "__globals__", {})

    def evaluated(annotation: Any) -> Any:
        try:
            return eval(annotation, names) if isinstance(annotation, str) else annotation
        except NameError:
            return annotation

    return signature.replace(
        parameters=[
            parameter.replace(annotation=evaluated(parameter.annotation))
            for parameter in signature.parameters.values()
        ],
        return_annotation=evaluated(signature.return_annotation),
    )
