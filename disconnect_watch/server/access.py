"""The outermost layer: a request id in every head, one log line for every request.

The line says in ``hops_ms`` how long each part of the way took, as far as the request came:
``receive`` to the end of its body, ``admit`` into a queue, ``first`` to the first output, ``work``
to the outcome, and ``answer`` until the last byte was handed to the connection.
"""

# What a closure says of its types would be worked out for each request.
from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from disconnect_watch.adapters import LEAVES, TOKEN_KEY
from disconnect_watch.server.ids import new_id
from disconnect_watch.server.outcome import joined
from disconnect_watch.token import CancelToken, Reason

if TYPE_CHECKING:
    import asyncio

    from disconnect_watch.engine import AbortResult, Outcome
    from disconnect_watch.server.disagg.parts import Part

__all__ = ["RECORD_KEY", "AccessLog", "RequestRecord"]

#: Where in ``scope["state"]`` a request's record is.
RECORD_KEY = "disconnect_watch.record"

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

logger = logging.getLogger("disconnect_watch.access")


class Work(Protocol):
    """What can be aborted."""

    async def abort(self) -> AbortResult:
        """End it; returns when its blocks are free."""


@dataclass(slots=True)
class RequestRecord:
    """What the log line of one request will say.

    Attributes:
        request_id: see ``new_id``.
        token: fires when its client leaves.
        status: what the client was sent; 499 if it left before the head, 0 before either.
        outcome: of the work, for a request that reached some.
        owner: who may cancel it, by the name of a key; empty for nobody in particular.
        client_id: its client's own name for it, among the requests of the owner.
        timeout: seconds from its beginning after which nobody wants its answer.
        signals: by what it was asked to end, other than its connection.
        works: what runs for it, in an engine or beside, and has not ended.
        part: what this node does of it, if it is parted between nodes.
        waiters: futures of those who wait until it is over.
        received_ns, admitted_ns, first_ns, settled_ns: on ``time.monotonic_ns``: when its body was
            whole, it was queued, its first output came, and its outcome; 0 for never.
    """

    token: CancelToken
    request_id: str = field(default_factory=new_id)
    status: int = 0
    outcome: Outcome | None = None
    owner: str = ""
    client_id: str = ""
    timeout: float | None = None
    signals: frozenset[Reason] = frozenset()
    works: set[Work] = field(default_factory=set)
    part: Part | None = None
    waiters: list[asyncio.Future[None]] = field(default_factory=list)
    received_ns: int = 0
    admitted_ns: int = 0
    first_ns: int = 0
    settled_ns: int = 0
    _started_ns: int = field(default_factory=time.monotonic_ns)

    @property
    def has_left(self) -> bool:
        """Whether the client is known to be gone."""
        return self.token.reason in LEAVES

    def time_left(self, timeout: float | None) -> float | None:
        """Of the seconds that its client gives it, by whatever way, those that are left now."""
        limits = [limit for limit in (timeout, self.timeout) if limit is not None]
        if not limits:
            return None
        if (limit := min(limits)) < 0:
            return limit  # for the engine to refuse
        return max(0.0, limit - (time.monotonic_ns() - self._started_ns) / 1e9)

    def detached(self) -> RequestRecord:
        """A record for what goes on without the client: as old as this one, with its limits."""
        return RequestRecord(
            CancelToken(),
            request_id=self.request_id,
            owner=self.owner,
            client_id=self.client_id,
            timeout=self.timeout,
            _started_ns=self._started_ns,
        )

    def first_output(self) -> None:
        """Note when something came of it, unless that was noted."""
        self.first_ns = self.first_ns or time.monotonic_ns()

    def add_outcome(self, outcome: Outcome) -> None:
        """Take the outcome of one part of it; what is told is that of all so far."""
        self.outcome = outcome if self.outcome is None else joined(self.outcome, outcome)
        self.settled_ns = time.monotonic_ns()

    def fields(self) -> dict[str, object]:
        """The line's fields; those of the work only if the request reached some."""
        now_ns = time.monotonic_ns()
        line: dict[str, object] = {
            "request_id": self.request_id,
            "status": self.status,
            "ms": round((now_ns - self._started_ns) / 1e6, 3),
            "hops_ms": self._hops_ms(now_ns),
        }
        if self.owner:
            line["owner"] = self.owner
        if self.outcome is not None:
            line |= {
                "outcome": self.outcome.kind,
                "reason": self.outcome.reason or self.outcome.finish_reason,
                "phase": self.outcome.phase,
                "tokens": self.outcome.num_generated_tokens,
                "wasted": self.outcome.num_wasted_tokens,
                "block_seconds": round(self.outcome.block_ns / 1e9, 6),
            }
        elif self.status >= 400 and self.token.reason is not None:
            # An answer without a body is complete with its head: who leaves then has it all.
            line["reason"] = self.token.reason
        return line

    def _hops_ms(self, now_ns: int) -> dict[str, float]:
        hops: dict[str, float] = {}
        last_ns = self._started_ns
        for name, at_ns in (
            ("receive", self.received_ns),
            ("admit", self.admitted_ns),
            ("first", self.first_ns),
            ("work", self.settled_ns),
            ("answer", now_ns),
        ):
            if at_ns:
                hops[name] = round((at_ns - last_ns) / 1e6, 3)
                last_ns = at_ns
        return hops


class AccessLog:
    """ASGI middleware around the whole application, its error pages included.

    It also gives the routes the path as the client wrote it: Triton does not decode
    percent escapes in model names.
    """

    def __init__(self, app: App) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        state = scope.get("state")
        if state is None:
            state = scope["state"] = {}
        token = state.get(TOKEN_KEY)
        if token is None:
            # A server without our protocol class: then nothing tells of a leave.
            token = CancelToken()
        record = state[RECORD_KEY] = RequestRecord(token)
        raw_path = scope.get("raw_path")
        scope["path"] = (scope["path"].encode() if raw_path is None else raw_path).decode("latin-1")
        awaits_continue = False
        for name, _ in scope["headers"]:
            if name == b"expect":
                awaits_continue = True

        # Plain functions, which hand on the server's awaitables: a coroutine of our own
        # around each would be felt.
        def receive_body() -> Awaitable[Message]:
            nonlocal awaits_continue
            awaits_continue = False
            return receive()

        def send_head(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                # Most tokens are not set, and that is asked for faster.
                has_left = token.cancelled and record.has_left
                record.status = 499 if has_left else message["status"]
                headers = [
                    *message.get("headers", ()),
                    (b"x-request-id", record.request_id.encode()),
                ]
                if awaits_continue:
                    # RFC 9110 10.1.1: the client may now leave out the body that it
                    # announced, and nobody knows where its next request begins.
                    headers.append((b"connection", b"close"))
                message["headers"] = headers
            return send(message)

        try:
            await self.app(scope, receive_body if awaits_continue else receive, send_head)
        finally:
            if not record.status:
                record.status = 499 if record.has_left else 500
            if logger.isEnabledFor(logging.INFO):
                _log(scope, record)


def _log(scope: Scope, record: RequestRecord) -> None:
    # As logger.info, which would look through the stack for who calls it: always we.
    arguments = (scope["method"], scope["path"])
    line = logger.makeRecord(
        logger.name, logging.INFO, __file__, 0, "%s %s", arguments, None, extra=record.fields()
    )
    logger.handle(line)
