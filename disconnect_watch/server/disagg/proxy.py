"""Sends a request to a prefill node and to a decode node, and the answer of the latter back.

The body goes to both as it came. The prefill node keeps its answer open for as long as it keeps
blocks, and the decode node answers the client through here; so whoever leaves here has left both,
and if this process dies its connections tell them. Each is told by name, too.
"""

import asyncio
import logging
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import quote

import aiohttp
import msgspec
from yarl import URL

from disconnect_watch.adapters.asgi import CancelOnDisconnect
from disconnect_watch.server.access import (
    RECORD_KEY,
    AccessLog,
    App,
    Message,
    Receive,
    RequestRecord,
    Scope,
    Send,
)
from disconnect_watch.server.answers import error_response
from disconnect_watch.server.disagg.messages import PREFILL_HEADER, TICKET_HEADER, Prefilled
from disconnect_watch.server.disagg.nodes import Node, NodeLostError, NodePool
from disconnect_watch.server.documents import encode
from disconnect_watch.server.guard import Gatekeeper, Guard
from disconnect_watch.server.reverse_proxy import failure, passed

__all__ = ["PdProxy"]

logger = logging.getLogger("disconnect_watch.pd_proxy")

#: What is parted; all else is a decode node's alone.
_PARTED = re.compile(
    r"/v1/(?:chat/)?completions|/v2/models/[^/]+(?:/versions/[0-9]+)?/generate(?:_stream)?"
)
#: Ours to say: a client must not bring a ticket, nor another's key.
_OURS = frozenset({b"authorization", b"x-api-key", b"x-kv-prefill", b"x-kv-ticket"})
#: What can go wrong with a node before it has answered.
_FAILURES = (aiohttp.ClientError, NodeLostError, TimeoutError)


class _Left(Exception):
    """The client left while it sent its request."""


class _Answered(Exception):
    """A node has refused the request: that is the answer to it."""

    def __init__(self, response: aiohttp.ClientResponse, body: bytes) -> None:
        super().__init__(response.status)
        self.response = response
        self.body = body


@dataclass(slots=True)
class _Asked:
    """One request of a client, and who was asked."""

    scope: Scope
    body: bytes
    name: str
    prefill: Node | None = None
    decode: Node | None = None


class PdProxy:
    """An ASGI application before nodes that prefill and decode; an asynchronous context manager.

    To be run inside ``CancelOnDisconnect``: a request whose task is cancelled closes both of its
    connections, at whatever point it is.

    Args:
        prefill, decode: URLs of nodes.
        key: of role service, by which the nodes know this proxy.
        probe_seconds: between two questions to a node, and for its answer.
        gatekeeper: knows the proxy's own clients; None lets all in.
        max_body_bytes: of one request, which is kept until both nodes have it.

    Raises:
        ValueError: no node of a kind, or no URL of one.
    """

    def __init__(
        self,
        prefill: NodePool,
        decode: NodePool,
        *,
        key: str,
        probe_seconds: float = 1.0,
        gatekeeper: Gatekeeper | None = None,
        max_body_bytes: int = 1 << 26,
    ) -> None:
        self.prefill = prefill
        self.decode = decode
        self._key = key
        self._probe_seconds = probe_seconds
        self._gatekeeper = gatekeeper or Gatekeeper()
        self._max_body_bytes = max_body_bytes
        self._session: aiohttp.ClientSession
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=4.0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=5.0),
            skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        for pool in (self.prefill, self.decode):
            self._spawn(pool.watch(self._session, every=self._probe_seconds))
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._session.close()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[App]:
        """The proxy as ``serve`` takes it: logged, guarded, each request ended with its client."""
        async with self:
            yield CancelOnDisconnect(AccessLog(Guard(self, self._gatekeeper)))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["path"] == "/health":
            await self._health(send)
            return
        record: RequestRecord = scope["state"][RECORD_KEY]
        has_begun = False

        async def begin(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        asked = None
        try:
            asked = _Asked(scope, await self._body(receive), record.request_id)
            await self._answer(asked, begin)
        except _Left:
            return
        except _Answered as answered:
            await begin(_head(answered.response))
            await send({"type": "http.response.body", "body": answered.body})
        except _FAILURES as error:
            if record.has_left:
                return
            if has_begun:
                # Nothing that was cut short may look complete: no last chunk.
                logger.warning("an answer ended half-way: %s", error)
                return
            node = asked.decode if asked is not None else None
            await failure(scope, error, node.url if node else "a decode node")(scope, receive, send)
        except ValueError as error:
            await error_response(scope["path"], 413, str(error))(scope, receive, send)

    async def _answer(self, asked: _Asked, send: Send) -> None:
        """Have one request worked on, and pass the answer on.

        Whatever ends it before its end is told to those that work on it.
        """
        is_parted = asked.scope["method"] == "POST" and _PARTED.fullmatch(asked.scope["path"])
        try:
            async with AsyncExitStack() as held:
                prefilled = await self._prefill(asked, held) if is_parted else None
                node, response = await self._decode(asked, prefilled, held)
                with node.depended_on():
                    await send(_head(response))
                    async for data in response.content.iter_any():
                        await send({"type": "http.response.body", "body": data, "more_body": True})
        except _Answered:
            raise  # nobody works on it
        except BaseException:
            self._spawn(self._tell_nodes(asked))
            raise
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _prefill(self, asked: _Asked, held: AsyncExitStack) -> Prefilled | None:
        """Have the prompt computed; None if nobody could, and whoever decodes has to.

        Raises:
            _Answered: it makes no sense to the node.
        """
        for node in self.prefill.candidates():
            asked.prefill = node
            # What an attempt holds is let go of before the next.
            async with AsyncExitStack() as attempt:
                try:
                    attempt.enter_context(node.busy())
                    response = await self._ask(node, asked, {PREFILL_HEADER: "1"}, attempt)
                    with node.depended_on():
                        if response.status == 200:
                            line = await response.content.readline()
                            prefilled = msgspec.json.decode(line, type=Prefilled)
                            held.push_async_exit(attempt.pop_all())
                            return prefilled if prefilled.first_token is not None else None
                        body = await response.read()
                except _FAILURES as error:
                    logger.warning("a prefill at %s failed: %s", node.url, error)
                    continue
                except msgspec.MsgspecError:
                    logger.warning("%s answered a prefill by what is none, see --role", node.url)
                    continue
                if 400 <= response.status < 500 and response.status not in (401, 403, 429):
                    raise _Answered(response, body)
                logger.warning("a prefill at %s was answered %d", node.url, response.status)
        asked.prefill = None
        return None

    async def _decode(
        self, asked: _Asked, prefilled: Prefilled | None, held: AsyncExitStack
    ) -> tuple[Node, aiohttp.ClientResponse]:
        headers = {} if prefilled is None else {TICKET_HEADER: prefilled.header()}
        error: Exception = NodeLostError("no decode node is ready")
        for node in self.decode.candidates():
            asked.decode = node
            async with AsyncExitStack() as attempt:
                try:
                    attempt.enter_context(node.busy())
                    response = await self._ask(node, asked, headers, attempt)
                except aiohttp.ClientConnectorError as refused:
                    # It has seen nothing of the request; another one may have all of it.
                    error = refused
                    continue
                held.push_async_exit(attempt.pop_all())
                return node, response
        raise error

    async def _ask(
        self, node: Node, asked: _Asked, more: dict[str, str], held: AsyncExitStack
    ) -> aiohttp.ClientResponse:
        scope = asked.scope
        headers = [
            (name.decode("latin-1"), value.decode("latin-1"))
            for name, value in passed(scope["headers"])
            if name not in _OURS
        ]
        headers += [
            ("x-request-id", asked.name),
            ("authorization", f"Bearer {self._key}"),
            *more.items(),
        ]
        query = scope["query_string"].decode("latin-1")
        path = scope["path"] + (f"?{query}" if query else "")
        try:
            with node.depended_on():
                response = await self._session.request(
                    scope["method"],
                    URL(node.url + path, encoded=True),
                    headers=headers,
                    data=asked.body or None,
                    allow_redirects=False,
                )
        except aiohttp.ClientConnectorError:
            node.refused()
            raise
        # Closes the connection unless the answer has come to its end.
        held.callback(response.close)
        return response

    async def _tell_nodes(self, asked: _Asked) -> None:
        """Cancel a request by its name at both nodes, which the end of its connections does too."""
        calls: list[tuple[Node, str, Any]] = []
        if asked.prefill is not None:
            calls.append((asked.prefill, "/v1/kv/release", {"name": asked.name}))
            calls.append((asked.prefill, f"/v1/requests/{quote(asked.name)}/cancel", None))
        if asked.decode is not None:
            calls.append((asked.decode, f"/v1/requests/{quote(asked.name)}/cancel", None))
        limit = aiohttp.ClientTimeout(total=5.0)
        for answer in await asyncio.gather(
            *(
                self._session.post(
                    node.url + path,
                    json=document,
                    headers={"authorization": f"Bearer {self._key}"},
                    timeout=limit,
                )
                for node, path, document in calls
            ),
            return_exceptions=True,
        ):
            if isinstance(answer, aiohttp.ClientResponse):
                answer.release()
            else:
                logger.info("a node could not be told of a cancel: %s", answer)

    async def _body(self, receive: Receive) -> bytes:
        body = bytearray()
        while True:
            message: Message = await receive()
            if message["type"] == "http.disconnect":
                raise _Left
            body += message.get("body", b"")
            if len(body) > self._max_body_bytes:
                raise ValueError(f"the body has more than {self._max_body_bytes} bytes")
            if not message.get("more_body"):
                return bytes(body)

    async def _health(self, send: Send) -> None:
        """200 while a request could be answered, and how each node is."""
        document = {
            "status": "ready" if self.decode.candidates() else "no decode node is ready",
            "prefill": {node.url: node.is_there for node in self.prefill.nodes},
            "decode": {node.url: node.is_there for node in self.decode.nodes},
        }
        status = 200 if self.decode.candidates() else 503
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": encode(document)})

    def _spawn(self, work: Any) -> None:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _head(response: aiohttp.ClientResponse) -> Message:
    return {
        "type": "http.response.start",
        "status": response.status,
        "headers": passed(response.raw_headers),
    }
