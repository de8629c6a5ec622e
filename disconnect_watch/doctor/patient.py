"""A handler that waits for its client to leave, by one means, and says when it heard of it."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any
from urllib.parse import parse_qs

from disconnect_watch.adapters import TOKEN_KEY

__all__ = ["PATH", "Means", "Patient", "Visit"]

#: Nobody's own.
PATH = "/.disconnect-watch/doctor"

_PERIOD = 0.002

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class Means(StrEnum):
    """How an application can hear that its client left."""

    TOKEN = "cancel token"
    RECEIVE = "await receive()"
    POLL = "request.is_disconnected()"


@dataclass(slots=True)
class Visit:
    """One client's request.

    Attributes:
        headers: of the request, names in lower case.
        has_token: whether a watch had put a token into its scope.
        heard_at: when the handler heard that the client left, ``time.monotonic``.
    """

    means: Means
    has_begun: bool = False
    has_token: bool = False
    heard_at: float | None = None
    http_version: str = ""
    headers: list[tuple[str, str]] = field(default_factory=list)


class Patient:
    """The handler, an ASGI application; each request names its visit by number.

    Attributes:
        visits: by number.
        is_over: set it, and nobody waits any more.
    """

    def __init__(self) -> None:
        self.visits: dict[str, Visit] = {}
        self.is_over = False

    def expect(self, means: Means) -> tuple[str, Visit]:
        """Expect one more visit; returns the path to ask for."""
        visit = Visit(means)
        number = str(len(self.visits))
        self.visits[number] = visit
        return f"{PATH}?visit={number}", visit

    def visit_of(self, scope: Message) -> Visit | None:
        """The visit that a request is; None for one that nobody expects."""
        query = parse_qs(scope["query_string"].decode())
        return self.visits.get(query.get("visit", [""])[0])

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        visit = self.visit_of(scope)
        if visit is not None and not visit.has_begun:
            try:
                await self._wait(visit, scope, receive)
            except asyncio.CancelledError:
                # An adapter's way of telling, unless the server ends.
                if not self.is_over:
                    visit.heard_at = time.monotonic()
                raise
        with contextlib.suppress(OSError):
            await send({"type": "http.response.start", "status": 204, "headers": []})
            await send({"type": "http.response.body", "body": b""})

    async def _wait(self, visit: Visit, scope: Message, receive: Receive) -> None:
        visit.http_version = scope["http_version"]
        visit.headers = [
            (name.decode("latin-1").lower(), value.decode("latin-1"))
            for name, value in scope["headers"]
        ]
        token = scope.get("state", {}).get(TOKEN_KEY)
        visit.has_token = token is not None
        visit.has_begun = True
        match visit.means:
            case Means.TOKEN:
                has_heard = await self._by_token(token)
            case Means.RECEIVE:
                has_heard = await self._by_receive(receive)
            case Means.POLL:
                has_heard = await self._by_polling(scope, receive)
        if has_heard:
            visit.heard_at = time.monotonic()

    async def _by_token(self, token: Any) -> bool:
        while not self.is_over:
            if token is not None and token.cancelled:
                return True
            await asyncio.sleep(_PERIOD)
        return False

    async def _by_receive(self, receive: Receive) -> bool:
        async def wait_for_the_end() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        waiting = asyncio.create_task(wait_for_the_end())
        try:
            while not self.is_over:
                if waiting.done():
                    return True
                await asyncio.sleep(_PERIOD)
            return False
        finally:
            waiting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await waiting

    async def _by_polling(self, scope: Message, receive: Receive) -> bool:
        from starlette.requests import Request

        request = Request(scope, receive)
        while not self.is_over:
            if await request.is_disconnected():
                return True
            await asyncio.sleep(_PERIOD)
        return False
