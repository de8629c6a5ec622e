"""A cancel token for each RPC of a ``grpc.aio`` server.

    server = grpc.aio.server(interceptors=[Interceptor()])

    async def Infer(self, request, context):
        return await generate(request, cancel=client_token(context))

gRPC cancels the task of an RPC by itself: when the client cancels, its connection is lost,
its deadline is over or the server stops. What it does not do is to tell a thread, an engine
or another process; and a handler that is a plain function it does not stop at all. The
token does, with reason DEADLINE where the deadline is over, and RESET where the stream ended.

Sockets and streams are the C core's own: nothing is watched by the kernel here, and the
news comes when the loop does. How it comes:

    a handler that awaits      its task is cancelled: the token fires before it sees that
    a stream between two sends the task ends without having finished: fired at its end
    a handler in a thread      the same, while the thread goes on

What is used of gRPC beyond its documented surface (1.85, held by
``tests/integration/test_grpc_adapter.py``): that interceptors run in the task of the RPC.
"""

import asyncio
import functools
import inspect
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterator,
)
from typing import Any

import grpc
from grpc import aio

from disconnect_watch.adapters._telling import telling
from disconnect_watch.token import CancelToken, Reason

__all__ = ["Interceptor", "client_token"]

#: The client's deadline may be over a little before ours, and it then cancels: by what its
#: request took longer to come than the cancel, in seconds, and by what the timeout was
#: rounded up on its way, of the whole.
_JITTER, _ROUNDING = 0.05, 0.01

#: By the id of the context, which the value keeps from being another's.
_calls: dict[int, "_Call"] = {}


def client_token(context: Any) -> CancelToken:
    """The token of an RPC, which fires when its client has no more use for the answer.

    Args:
        context: the ``ServicerContext`` that the handler was given.

    Raises:
        LookupError: the server has no ``Interceptor``, or the RPC is over.

    Threads: any.
    """
    call = _calls.get(id(context))
    if call is None:
        raise LookupError(
            f"token of {context!r}: none; give the server interceptors=[Interceptor()]"
        )
    return call.token


class Interceptor(aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """Makes the tokens. Put it last, so that the others pass their contexts to it."""

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> Any:
        """Wrap the handler of one RPC."""
        handler = await continuation(handler_call_details)
        if handler is None:  # no such method
            return None
        call = _Call()
        task = asyncio.current_task()
        assert task is not None
        task.add_done_callback(call.task_ended)
        return _wrapped(handler, call)


class _Call:
    """One RPC, from its handler's start to its end."""

    def __init__(self) -> None:
        self.token = CancelToken()
        self._context: Any = None
        self._timeout: float | None = None
        self._has_finished = False

    def begin(self, context: Any) -> None:
        self._context = context
        self._timeout = context.time_remaining()
        _calls[id(context)] = self

    def finish(self) -> None:
        """The handler ended: what comes now is no news for it. Partner of ``begin``."""
        self._has_finished = True
        _calls.pop(id(self._context), None)

    def cancel(self) -> None:
        """The client is gone, or has had enough of it."""
        is_late = self._timeout is not None and self._context.time_remaining() <= (
            _JITTER + _ROUNDING * self._timeout
        )
        self.token.cancel(Reason.DEADLINE if is_late else Reason.RESET)

    def task_ended(self, task: "asyncio.Task[Any]") -> None:
        """The RPC is over for gRPC, if not for a handler in a thread."""
        if not self._has_finished:
            self.cancel()


def _wrapped(handler: Any, call: _Call) -> Any:
    """The handler of an RPC, which tells ``call`` of its start, its cancel and its end."""
    kinds = {
        (False, False): ("unary_unary", grpc.unary_unary_rpc_method_handler),
        (False, True): ("unary_stream", grpc.unary_stream_rpc_method_handler),
        (True, False): ("stream_unary", grpc.stream_unary_rpc_method_handler),
        (True, True): ("stream_stream", grpc.stream_stream_rpc_method_handler),
    }
    name, make = kinds[bool(handler.request_streaming), bool(handler.response_streaming)]
    behavior = getattr(handler, name)
    # gRPC asks what kind of function it is, to call it as such.
    if inspect.isasyncgenfunction(behavior):
        wrapper: Any = _async_stream
    elif inspect.iscoroutinefunction(behavior):
        wrapper = _async
    else:
        wrapper = _stream_in_thread if handler.response_streaming else _in_thread
    return make(
        wrapper(behavior, call),
        request_deserializer=handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )


def _async(behavior: Callable[..., Awaitable[Any]], call: _Call) -> Any:
    @functools.wraps(behavior)
    async def run(request: Any, context: Any) -> Any:
        call.begin(context)
        try:
            return await telling(behavior(request, context), call.cancel)
        finally:
            call.finish()

    return run


def _async_stream(behavior: Callable[..., AsyncGenerator[Any, None]], call: _Call) -> Any:
    @functools.wraps(behavior)
    async def run(request: Any, context: Any) -> AsyncIterator[Any]:
        call.begin(context)
        responses = behavior(request, context)
        try:
            while True:
                try:
                    response = await telling(anext(responses), call.cancel)
                except StopAsyncIteration:
                    return
                yield response
        except GeneratorExit:
            # gRPC takes no more. Where tasks start eagerly it closes this before its task ends.
            call.cancel()
            raise
        finally:
            await responses.aclose()
            call.finish()

    return run


def _in_thread(behavior: Callable[..., Any], call: _Call) -> Any:
    @functools.wraps(behavior)
    def run(request: Any, context: Any) -> Any:
        call.begin(context)
        try:
            return behavior(request, context)
        finally:
            call.finish()

    return run


def _stream_in_thread(behavior: Callable[..., Iterator[Any]], call: _Call) -> Any:
    @functools.wraps(behavior)
    def run(request: Any, context: Any) -> Iterator[Any]:
        call.begin(context)
        try:
            yield from behavior(request, context)
        finally:
            call.finish()

    return run
