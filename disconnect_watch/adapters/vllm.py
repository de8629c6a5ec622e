"""``vllm serve``: its clients watched by the kernel, and its engine told of each that left.

With the plugin, see ``disconnect_watch.vllm_plugin``, nothing else is needed::

    DISCONNECT_WATCH_VLLM=1 vllm serve MODEL
    DISCONNECT_WATCH_VLLM=half_close=ignore,vanish_after=30 vllm serve MODEL

or the middleware alone, which a request that is pipelined behind another may still hide from::

    vllm serve MODEL --middleware disconnect_watch.adapters.vllm.CancelOnDisconnect

What is used of vLLM beyond its documented surface (0.32, held by ``tests/gateways/test_vllm.py``):
``AsyncLLM.add_request``, ``app.state.engine_client``, ``request.state.request_metadata``, of the
engine client ``output_processor.external_req_ids``, and of responses ``background_tasks``.
"""

import asyncio
import contextvars
import functools
import logging
import sys
from typing import TYPE_CHECKING, Any

from disconnect_watch.adapters import TOKEN_KEY, asgi
from disconnect_watch.adapters._asgi_call import App, Scope, Send
from disconnect_watch.adapters._inbox import DISCONNECT, Message, Receive
from disconnect_watch.remote import FLAG_KEY, name_of
from disconnect_watch.token import CancelToken

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from disconnect_watch.adapters.uvicorn import Options

__all__ = ["CancelOnDisconnect", "install", "options_of"]

logger = logging.getLogger("disconnect_watch.adapters.vllm")

#: Seconds that vLLM gets to abort a request by itself, which also tidies up behind it.
OWN_WAY = 0.05

#: The name that vLLM gives to a task that goes on without its client: a response of
#: ``/v1/responses`` in the background.
_BACKGROUND = "create_"

_token: contextvars.ContextVar[CancelToken | None] = contextvars.ContextVar("_token", default=None)
#: The loop has weak references to tasks only.
_aborts: set[asyncio.Task[None]] = set()


class CancelOnDisconnect(asgi.CancelOnDisconnect):
    """``asgi.CancelOnDisconnect`` for vLLM's application; an abort that was lost comes after.

    A middleware of the user's may keep ``http.disconnect`` to itself. So what the request has
    in the engine is aborted there, a moment after its own handler could have done so.
    """

    def __init__(self, app: App, **options: Any) -> None:
        super().__init__(_Serving(app), **options)


class _Serving:
    """vLLM's application, with the token of each request where ``AsyncLLM`` finds it."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        token = scope["state"].get(TOKEN_KEY) if scope["type"] == "http" else None
        if token is None:
            await self._app(scope, receive, send)
            return

        async def hear() -> Message:
            message = await receive()
            if message["type"] == DISCONNECT and token.cancelled:
                _abort_soon(scope)
            return message

        before = _token.set(token)
        try:
            await self._app(scope, hear, send)
        finally:
            _token.reset(before)
            if token.cancelled:
                _abort_soon(scope)


def _abort_soon(scope: Scope) -> None:
    asyncio.get_running_loop().call_later(OWN_WAY, _abort, scope)


def _abort(scope: Scope) -> None:
    metadata = scope["state"].get("request_metadata")
    engine = getattr(getattr(scope.get("app"), "state", None), "engine_client", None)
    processor = getattr(engine, "output_processor", None)
    if metadata is None or engine is None or processor is None:
        return
    name = metadata.request_id
    # A response in the background is no longer its client's, and its task goes on.
    responses = getattr(scope["app"].state, "openai_serving_responses", None)
    if name in getattr(responses, "background_tasks", ()):
        return
    # Of several prompts each has a number behind the request's id.
    ids = [id_ for id_ in processor.external_req_ids if id_ == name or _is_part(id_, name)]
    if ids:
        logger.info("aborting %s in the engine, its handler has not", ", ".join(ids))
        task = asyncio.get_running_loop().create_task(engine.abort(ids))
        _aborts.add(task)
        task.add_done_callback(_aborts.discard)


def _is_part(id_: str, name: str) -> bool:
    rest = id_.removeprefix(name)
    return rest != id_ and rest[0] in "-_" and rest[1:].isdecimal()


def options_of(text: str) -> "Options":
    """The options of our protocol that the variable's value says.

    Args:
        text: a yes, for the defaults, or ``half_close=…,vanish_after=…,unblind=…`` as
            ``adapters.uvicorn.http_tools`` has them.

    Raises:
        ValueError: it is neither.
    """
    options: Options = {}
    if text.lower() in ("1", "true", "yes", "on"):
        return options
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        try:
            if name == "half_close":
                options["half_close"] = value  # type: ignore[typeddict-item] # checked by policy
            elif name == "vanish_after":
                options["vanish_after"] = float(value)
            elif name == "unblind":
                options["unblind"] = int(value)
            else:
                raise ValueError("no such option")
        except ValueError as error:
            raise ValueError(
                f"cannot read {part!r} in {text!r}: {error}; give 1, or half_close=, "
                "vanish_after= and unblind= with commas between"
            ) from None
    return options


def install(text: str = "1") -> None:
    """Have uvicorn's HTTP protocols be ours in this process, with ``CancelOnDisconnect`` in front.

    Does nothing where no HTTP is served: vLLM's own command has loaded uvicorn by now, and its
    engine's processes never do. Idempotent.

    Args:
        text: see ``options_of``.

    Raises:
        ValueError: see there.
    """
    options = options_of(text)
    if "uvicorn" not in sys.modules:
        return
    from uvicorn.config import HTTP_PROTOCOLS

    from disconnect_watch.adapters.uvicorn import h11, http_tools

    protocols: dict[str, Any] = {"h11": h11(**options)}
    try:
        protocols["httptools"] = http_tools(**options)
    except ImportError:
        protocols["auto"] = protocols["h11"]
    else:
        protocols["auto"] = protocols["httptools"]
    for name, protocol in protocols.items():
        protocols[name] = type(protocol.__name__, (_InFront, protocol), {"__slots__": ()})
    HTTP_PROTOCOLS.update(protocols)  # uvicorn takes classes as well as their names
    _name_flags()
    logger.info("clients of this server are watched, with %s", options or "the defaults")


class _InFront:
    """Stands before a protocol among the bases: our middleware is around its application."""

    __slots__ = ()

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        if not isinstance(config.loaded_app, CancelOnDisconnect):
            config.loaded_app = CancelOnDisconnect(config.loaded_app)
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg] # the protocol's


def _name_flags() -> None:
    """Have each request that ``AsyncLLM`` sends to the engine say which flag is its client's."""
    from vllm.v1.engine.async_llm import AsyncLLM

    add_request: Callable[..., Awaitable[Any]] = AsyncLLM.add_request
    if hasattr(add_request, "__wrapped__"):
        return

    @functools.wraps(add_request)
    async def named(
        self: Any, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
    ) -> Any:
        return await add_request(self, request_id, prompt, _with_flag(params), *args, **kwargs)

    AsyncLLM.add_request = named


def _with_flag(params: Any) -> Any:
    extra = getattr(params, "extra_args", None) or {}
    token = None if _runs_in_background() else _token.get()
    if not hasattr(params, "extra_args") or (token is None and FLAG_KEY not in extra):
        return params
    # What a client writes there itself is no flag of its.
    extra = {key: value for key, value in extra.items() if key != FLAG_KEY}
    if token is not None:
        extra[FLAG_KEY] = [list(name_of(token))]
    params = params.clone()
    params.extra_args = extra
    return params


def _runs_in_background() -> bool:
    task = asyncio.current_task()
    return task is not None and task.get_name().startswith(_BACKGROUND)
