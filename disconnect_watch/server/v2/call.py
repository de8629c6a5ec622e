"""One request below ``/v2`` and its answer, without a framework in between."""

import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from disconnect_watch.adapters import WHOLE_KEY
from disconnect_watch.backends.infer import Buffer
from disconnect_watch.server.access import RECORD_KEY, RequestRecord
from disconnect_watch.server.documents import encode
from disconnect_watch.server.frontend import Frontend
from disconnect_watch.server.guard import HEADERS_KEY
from disconnect_watch.server.limits import read_all, too_large
from disconnect_watch.server.upload import BODY_KEY, UPLOAD_KEY, Room

__all__ = ["Answer", "Call", "error_answer", "json_answer"]

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

#: Up to so many bytes, one write of a copy is cheaper than several writes.
SMALL = 1 << 16


@dataclass(slots=True)
class Answer:
    """A whole response.

    Attributes:
        pieces: of the body, sent one behind the other.
        is_chunked: leave its length unsaid, as Triton does for ``generate``.
    """

    pieces: list[Buffer] = field(default_factory=list)
    status: int = 200
    content_type: bytes = b"application/json"
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    is_chunked: bool = False

    def as_one(self, state: Mapping[str, Any]) -> Message | None:
        """The one message that it may go in, if it is small; else None: see ``send``.

        Args:
            state: of the request's scope, which says whether it may go whole.
        """
        pieces = self.pieces
        if len(pieces) != 1 or self.is_chunked or WHOLE_KEY not in state:
            return None
        body = pieces[0]
        size = len(body)
        if size > SMALL:
            return None
        return {
            "type": "http.response.start",
            "status": self.status,
            "headers": [
                (b"content-type", self.content_type),
                *self.headers,
                (b"content-length", b"%d" % size),
            ],
            WHOLE_KEY: body,
        }

    async def send(self, send: Send, state: Mapping[str, Any]) -> None:
        """Send it, a large piece as it is.

        Args:
            state: of the request's scope, which says whether it may go whole.
        """
        pieces = self.pieces
        size = sum(map(len, pieces))
        if len(pieces) > 1 and size <= SMALL:
            pieces = [b"".join(pieces)]
        headers = [(b"content-type", self.content_type), *self.headers]
        head = {"type": "http.response.start", "status": self.status, "headers": headers}
        if not self.is_chunked:
            headers.append((b"content-length", b"%d" % size))
            if size <= SMALL and WHOLE_KEY in state:
                head[WHOLE_KEY] = pieces[0] if pieces else b""
                await send(head)
                return
        await send(head)
        for piece in pieces[:-1]:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        last = pieces[-1] if pieces else b""
        if self.is_chunked:
            # A last piece with nothing in it ends the chunks.
            await send({"type": "http.response.body", "body": last, "more_body": True})
            last = b""
        await send({"type": "http.response.body", "body": last, "more_body": False})


def json_answer(value: object) -> Answer:
    """A document, status 200."""
    return Answer([encode(value)])


def error_answer(status: int, message: str) -> Answer:
    """An error in Triton's form."""
    return Answer([encode({"error": message})], status)


class Call:
    """A request as its handler sees it.

    Attributes:
        path: what its route found in the path: a model, a version, a region.
        record: with the token that fires when the client leaves.
    """

    __slots__ = ("_headers", "_receive", "frontend", "path", "record", "scope", "send")

    def __init__(
        self,
        scope: MutableMapping[str, Any],
        receive: Receive,
        send: Send,
        *,
        frontend: Frontend,
        path: Mapping[str, str | None],
    ) -> None:
        self.scope = scope
        self.send = send
        self.frontend = frontend
        self.path = path
        state = scope["state"]
        self.record: RequestRecord = state[RECORD_KEY]
        self._headers: Mapping[bytes, bytes] = state[HEADERS_KEY]
        self._receive = receive

    @property
    def method(self) -> str:
        """As the client wrote it."""
        method: str = self.scope["method"]
        return method

    def header(self, name: bytes) -> bytes | None:
        """The first header of this name, which is to be given in lower case."""
        return self._headers.get(name)

    def coding(self) -> str:
        """The body's ``Content-Encoding``, empty for none."""
        # RFC 9110 8.4.1: names of codings are case-insensitive.
        coding = self._headers.get(b"content-encoding")
        return coding.decode("latin-1").strip().lower() if coding else ""

    def body_at_hand(self) -> Buffer | None:
        """The whole body, if it came with the head or soon after; else None: see ``body``."""
        take = self.scope["state"].get(BODY_KEY)
        body: bytes | None = None if take is None else take(self._receive)
        if body is None:
            return None
        if len(body) > self.frontend.options.max_body_bytes:
            raise too_large(f"{len(body)} bytes", self.frontend.options.max_body_bytes)
        self.record.received_ns = time.monotonic_ns()
        return body

    def body(self, room: Room | None = None) -> Coroutine[Any, Any, Buffer]:
        """The whole body, as it came.

        Args:
            room: where it is best put, if it is large.
        """
        return read_all(
            self._receive,
            int(self._headers.get(b"content-length", 0)),
            self.frontend.options.max_body_bytes,
            record=self.record,
            upload=self.scope["state"].get(UPLOAD_KEY),
            room=room,
        )
