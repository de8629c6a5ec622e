"""The routes below ``/v2``: one look at the path, as Triton does it, and one table.

A path is matched whole and as the client wrote it, without decoding. The header of a
restricted category is asked for before the method is looked at.
"""

import re
from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from disconnect_watch.backends.infer import InferError
from disconnect_watch.server.access import RECORD_KEY
from disconnect_watch.server.errors import CancelledByPeer, RequestError
from disconnect_watch.server.frontend import Frontend
from disconnect_watch.server.guard import MAX_KNOWN_PATH, MAX_KNOWN_PATHS
from disconnect_watch.server.v2 import metadata, regions, repository, settings, statistics
from disconnect_watch.server.v2.call import Answer, Call, Message, Receive, Send, error_answer
from disconnect_watch.server.v2.compression import UnsupportedCodingError
from disconnect_watch.server.v2.failures import failure_of
from disconnect_watch.server.v2.generate import generate, generate_stream
from disconnect_watch.server.v2.infer import infer

__all__ = ["V2", "Route", "paths"]

App = Callable[[Message, Receive, Send], Awaitable[None]]
Handler = Callable[[Call], Awaitable[Answer | None]]


class Route(NamedTuple):
    """What a path leads to.

    Attributes:
        category: of restricted APIs.
    """

    methods: tuple[str, ...]
    category: str
    handler: Handler


_GET, _POST, _BOTH = ("GET",), ("POST",), ("GET", "POST")

_MODEL = re.compile(
    r"/v2/models/(?P<model>[^/]+)(?:/versions/(?P<version>[0-9]+))?"
    r"(?:/(?P<action>infer|generate|generate_stream|ready|config|stats|trace/setting))?"
)
_OF_MODEL = {
    None: Route(_GET, "metadata", metadata.model_metadata),
    "infer": Route(_POST, "inference", infer),
    "generate": Route(_POST, "inference", generate),
    "generate_stream": Route(_POST, "inference", generate_stream),
    "ready": Route(_GET, "health", metadata.model_ready),
    "config": Route(_GET, "model-config", metadata.config),
    "stats": Route(_GET, "statistics", statistics.model_statistics),
    "trace/setting": Route(_BOTH, "trace", settings.trace_settings),
}
_FIXED = {
    "/v2": Route(_GET, "metadata", metadata.server_metadata),
    "/v2/health/live": Route(_GET, "health", metadata.live),
    "/v2/health/ready": Route(_GET, "health", metadata.ready),
    "/v2/models/stats": Route(_GET, "statistics", statistics.all_statistics),
    "/v2/logging": Route(_BOTH, "logging", settings.logging_settings),
    "/v2/trace/setting": Route(_BOTH, "trace", settings.trace_settings),
}
_OTHERS: tuple[tuple[re.Pattern[str], dict[str, Route]], ...] = (
    (
        re.compile(
            r"/v2/systemsharedmemory(?:/region/(?P<region>[^/]+))?"
            r"/(?P<action>status|register|unregister)"
        ),
        {
            "status": Route(_GET, "shared-memory", regions.status),
            "register": Route(_POST, "shared-memory", regions.register),
            "unregister": Route(_POST, "shared-memory", regions.unregister),
        },
    ),
    (
        re.compile(
            r"/v2/cudasharedmemory(?:/region/(?P<region>[^/]+))?"
            r"/(?P<action>status|register|unregister)"
        ),
        {
            "status": Route(_GET, "shared-memory", regions.cuda_status),
            "register": Route(_POST, "shared-memory", regions.cuda_register),
            "unregister": Route(_POST, "shared-memory", regions.cuda_register),
        },
    ),
    (
        re.compile(r"/v2/repository(?:/(?P<repository>[^/]+))?/(?P<action>index)"),
        {"index": Route(_POST, "model-repository", repository.index)},
    ),
    (
        re.compile(
            r"/v2/repository(?:/(?P<repository>[^/]+))?"
            r"/models/(?P<model>[^/]+)/(?P<action>load|unload)"
        ),
        {
            "load": Route(_POST, "model-repository", repository.load),
            "unload": Route(_POST, "model-repository", repository.unload),
        },
    ),
)


#: Of ``_OTHERS``, as a document writes them.
_TEMPLATES = (
    *(
        f"/v2/{kind}sharedmemory{region}/{action}"
        for kind in ("system", "cuda")
        for region in ("", "/region/{region}")
        for action in ("status", "register", "unregister")
    ),
    "/v2/repository/index",
    "/v2/repository/{repository}/index",
    *(
        f"/v2/repository{repository}/models/{{model}}/{action}"
        for repository in ("", "/{repository}")
        for action in ("load", "unload")
    ),
)


def paths() -> Iterator[tuple[str, Route]]:
    """Every path with its route; what stands for a name is in braces."""
    of_models = (
        f"/v2/models/{{model}}{version}{f'/{action}' if action else ''}"
        for version in ("", "/versions/{version}")
        for action in _OF_MODEL
    )
    for template in (*_FIXED, *of_models, *_TEMPLATES):
        route, _ = _find(template.replace("{version}", "1"))
        if route is not None:
            yield template, route


class V2:
    """An ASGI application for ``/v2``; what lies elsewhere, and engines' text, is the rest's.

    Args:
        rest: has ``generate`` and ``generate_stream`` of engines, and all other paths.
    """

    def __init__(self, rest: App, frontend: Frontend) -> None:
        self._rest = rest
        self._frontend = frontend

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        if scope["type"] != "http" or not path.startswith("/v2"):
            await self._rest(scope, receive, send)
            return
        try:
            answer = await self._answer(path, scope, receive, send)
        except CancelledByPeer:
            return  # nobody is there to read anything
        except RequestError as error:
            answer = _answer_to(error)
        except InferError as error:
            token = scope["state"][RECORD_KEY].token
            failure = failure_of(error, token, strict=self._frontend.options.strict)
            if isinstance(failure, CancelledByPeer):
                return
            answer = _answer_to(failure)
        except Exception:
            # A bug of ours. uvicorn logs the traceback; the client learns nothing of it.
            if not scope["state"][RECORD_KEY].status:  # no head was sent
                await error_answer(500, "internal error").send(send, scope["state"])
            raise
        if answer is not None:
            whole = answer.as_one(scope["state"])
            if whole is not None:
                await send(whole)
            else:
                await answer.send(send, scope["state"])

    async def _answer(
        self, path: str, scope: Message, receive: Receive, send: Send
    ) -> Answer | None:
        route, found = _find(path)
        if route is None:
            return error_answer(404, "Not Found")
        restriction = self._frontend.options.restrictions.get(route.category)
        if restriction is not None:
            restriction.check(scope["headers"])
        if scope["method"] not in route.methods:
            return error_answer(405, "Method Not Allowed")
        if route.handler in _OF_ENGINES and found["model"] in self._frontend.backends:
            await self._rest(scope, receive, send)
            return None
        if (remote := self._frontend.remote) is not None:
            await remote.refresh(route.category, found.get("model"), found.get("version"))
        call = Call(scope, receive, send, frontend=self._frontend, path=found)
        return await route.handler(call)


_OF_ENGINES = (generate, generate_stream)


def _find(path: str) -> tuple[Route | None, Mapping[str, Any]]:
    return _known(path) if len(path) <= MAX_KNOWN_PATH else _look_up(path)


def _look_up(path: str) -> tuple[Route | None, Mapping[str, Any]]:
    if (route := _FIXED.get(path)) is not None:
        return route, {}
    if (match := _MODEL.fullmatch(path)) is not None:
        found = match.groupdict()
        # Triton has a path for the trace settings of a model, not for those of a version.
        if found["version"] is not None and found["action"] == "trace/setting":
            return None, found
        return _OF_MODEL[found["action"]], found
    for pattern, routes in _OTHERS:
        if (match := pattern.fullmatch(path)) is not None:
            found = match.groupdict()
            return routes[found["action"]], found
    return None, {}


_known = lru_cache(MAX_KNOWN_PATHS)(_look_up)


def _answer_to(error: RequestError) -> Answer:
    answer = error_answer(error.status, str(error))
    if error.is_final:
        answer.headers.append((b"x-should-retry", b"false"))
    elif isinstance(error, UnsupportedCodingError):
        answer.headers.append((b"accept-encoding", b"gzip, deflate"))
    return answer
