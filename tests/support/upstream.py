"""A server for clients that leave: it writes down every request, and how it ended.

What it answers is the first name of the path:

    /wait/NAME     nothing, until it may finish
    /half/NAME     the head and half of a body of known length, then as above
    /stream/NAME   an event stream, an event each ``TICK`` seconds until it may finish
    /page          an empty page, at once

``/v1/chat/completions`` and ``/v2/models/NAME/infer`` answer in the words of their
protocols: a stream where the request's JSON asks for one, else like ``/wait``.
"""

import asyncio
import contextlib
import itertools
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from disconnect_watch.adapters import TOKEN_KEY
from disconnect_watch.adapters.uvicorn import http_tools
from disconnect_watch.token import CancelToken
from disconnect_watch.watcher import Watcher
from tests.support.net import wait_until
from tests.support.serve import ThreadedServer, serving_app
from tests.support.tls import PEM

__all__ = ["TICK", "Call", "Upstream", "body_of", "upstream"]

TICK = 0.005
_FIRST_HALF = b"half of an answer, " * 8
_EVENT = b"data: tick,\n\n"
_LAST_EVENT = b"data: [DONE]\n\n"


@dataclass
class Call:
    """One request that reached the application.

    Attributes:
        client: address of who sent it: of the proxy, where there is one.
        body: what the client sent.
        may_finish: set it, and the answer is sent to its end.
        num_sent: pieces of the answer so far, the head not counted.
        outcome: "whole" or "stopped"; empty while it is answered.
    """

    path: str
    token: CancelToken
    client: tuple[str, int]
    body: bytes = b""
    may_finish: threading.Event = field(default_factory=threading.Event)
    num_sent: int = 0
    outcome: str = ""

    @property
    def reason(self) -> str:
        """How its client left, in capitals; empty while it is there."""
        return self.token.reason.name if self.token.reason is not None else ""


def body_of(path: str) -> bytes:
    """The end of the whole answer to a path, by which a client knows that it has all."""
    return _LAST_EVENT if path.startswith("/stream/") else f"the end of {path}".encode()


class Upstream:
    """The application and its ledger.

    Attributes:
        calls: all requests, in the order in which they came.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.server: ThreadedServer
        self._numbers = itertools.count()

    @property
    def port(self) -> int:
        return self.server.port

    def name(self, answer: str) -> str:
        """A new path of that kind of answer."""
        return f"/{answer}/{next(self._numbers)}"

    def find(self, path: str) -> Call | None:
        return next((call for call in self.calls if call.path == path), None)

    def wait_for(self, path: str, *, num: int = 1) -> Call:
        """The ``num``-th request for a path, as soon as it is there."""

        def found() -> list[Call]:
            return [call for call in self.calls if call.path == path]

        wait_until(lambda: len(found()) >= num)
        return found()[num - 1]

    def settle(self) -> None:
        """Let every answer end, and close the connections that are kept for later requests."""
        connections = self.server.server.server_state.connections

        def close() -> None:
            for protocol in list(connections):
                protocol.shutdown()

        def is_settled() -> bool:
            # Again and again: behind an answer that ends another request may begin.
            for call in list(self.calls):
                call.may_finish.set()
            self.server.loop.call_soon_threadsafe(close)
            return not connections and all(call.outcome for call in list(self.calls))

        wait_until(is_settled)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        call = Call(scope["path"], scope["state"][TOKEN_KEY], tuple(scope["client"]))
        self.calls.append(call)
        while True:
            message = await receive()
            call.body += message.get("body", b"")
            if not message.get("more_body"):
                break
        is_whole = False
        try:
            is_whole = await _Answer(call, send).give()
        finally:
            call.outcome = "whole" if is_whole else "stopped"


class _Answer:
    """Sends one answer, as long as its client is there."""

    def __init__(self, call: Call, send: Any) -> None:
        self._call = call
        self._send = send

    async def give(self) -> bool:
        """Whether all of it went out."""
        kind = self._call.path.split("/")[1]
        if kind == "page":
            self._call.may_finish.set()
            return await self._plain(b"<!doctype html>", media_type="text/html")
        if kind == "stream":
            return await self._stream(_EVENT, _LAST_EVENT)
        if kind == "half":
            return await self._plain(body_of(self._call.path), first=_FIRST_HALF)
        if kind == "wait":
            return await self._plain(body_of(self._call.path))
        asked = json.loads(self._call.body)
        if kind == "v1":
            return await self._chat(asked)
        return await self._infer(asked)

    async def _chat(self, asked: dict[str, Any]) -> bool:
        """OpenAI's chat completions, as much of them as its SDK needs."""
        common = {"id": "chatcmpl-1", "created": 0, "model": asked["model"]}
        if asked.get("stream"):
            choice = {"index": 0, "delta": {"content": "tick "}, "finish_reason": None}
            chunk = {**common, "object": "chat.completion.chunk", "choices": [choice]}
            return await self._stream(f"data: {json.dumps(chunk)}\n\n".encode(), _LAST_EVENT)
        message = {"role": "assistant", "content": "all"}
        choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
        answer = {**common, "object": "chat.completion", "choices": choices}
        return await self._plain(json.dumps(answer).encode(), media_type="application/json")

    async def _infer(self, asked: dict[str, Any]) -> bool:
        """KServe's infer, with the inputs for outputs."""
        outputs = [{**given, "name": f"{given['name']}_OUT"} for given in asked["inputs"]]
        answer = {"model_name": "slow", "model_version": "1", "outputs": outputs}
        return await self._plain(json.dumps(answer).encode(), media_type="application/json")

    async def _plain(
        self, last: bytes, *, first: bytes = b"", media_type: str = "text/plain"
    ) -> bool:
        size = str(len(first) + len(last)).encode()
        headers = [(b"content-type", media_type.encode()), (b"content-length", size)]
        if first:
            await self._start(headers)
            await self._piece(first)
        if not await self._until_it_may_finish():
            return False
        if not first:
            await self._start(headers)
        await self._piece(last, is_last=True)
        return True

    async def _stream(self, event: bytes, last: bytes) -> bool:
        await self._start([(b"content-type", b"text/event-stream")])
        if not await self._until_it_may_finish(event):
            return False
        await self._piece(last, is_last=True)
        return True

    async def _until_it_may_finish(self, event: bytes = b"") -> bool:
        """Wait, sending an event now and again; False as soon as the client has left."""
        deadline = time.monotonic() + 40
        while not self._call.may_finish.is_set():
            if self._call.token.cancelled:
                return False
            assert time.monotonic() < deadline, f"{self._call.path} was never let go"
            if event:
                await self._piece(event)
            await asyncio.sleep(TICK)
        return not self._call.token.cancelled

    async def _start(self, headers: list[tuple[bytes, bytes]]) -> None:
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _piece(self, body: bytes, *, is_last: bool = False) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": not is_last})
        self._call.num_sent += 1


@contextlib.contextmanager
def upstream(*, tls: bool = False) -> Iterator[Upstream]:
    """A server on a free port of loopback, with a watcher of its own."""
    app = Upstream()
    options: dict[str, Any] = {"ssl_certfile": PEM, "ssl_keyfile": PEM} if tls else {}
    with (
        Watcher() as watcher,
        serving_app(app, protocol=http_tools(watcher=watcher), **options) as app.server,
    ):
        yield app
        app.settle()
        wait_until(lambda: watcher.stats().num_connections == 0)
