"""The embedded engine as a Ray actor, and its requests by tokens of the caller.

    engine = ray.remote(EngineActor).remote()
    async for output in generate(engine, "A class is", token=token):
        send(output.text_delta)

The flags of two processes that Ray began are in two tables, and Ray lets the calls of a process
that was killed run to their end. So the caller of each request holds a connection to the actor
for as long as it wants the answer, and the kernel tells the actor when it does not any more.
"""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import ray

from disconnect_watch.backends.engine import EngineBackend
from disconnect_watch.engine import (
    DEFAULT_MODEL,
    AbortResult,
    Engine,
    EngineConfig,
    EngineStats,
    RequestOutput,
    SamplingParams,
)
from disconnect_watch.errors import ClientDisconnected
from disconnect_watch.token import CancelToken, Reason

__all__ = ["EngineActor", "generate"]


class EngineActor:
    """One engine on its thread, in the actor's process: give it to ``ray.remote``.

    Its methods are asynchronous, so that Ray runs as many at a time as ``max_concurrency``
    says, 1,000 by default.
    """

    def __init__(
        self, path: str | Path = DEFAULT_MODEL, config: EngineConfig | None = None
    ) -> None:
        """Load a checkpoint as ``Engine.from_pretrained``, with its errors."""
        engine = Engine.from_pretrained(path, config)
        self._backend = EngineBackend(engine, name=Path(path).name)
        self._server: asyncio.Task[asyncio.Server] | None = None
        #: Of requests whose callers hold a connection.
        self._held: dict[str, CancelToken] = {}

    async def address(self) -> tuple[str, int]:
        """Where callers hold their connections: host and port."""
        if self._server is None:
            host = ray.util.get_node_ip_address()
            self._server = asyncio.create_task(asyncio.start_server(self._hold, host, 0))
        server = await asyncio.shield(self._server)
        host, port = server.sockets[0].getsockname()[:2]
        return host, port

    async def _hold(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Take a line with a request's id; its caller is there until the stream ends."""
        request_id = (await reader.readline()).decode().rstrip("\n")
        token = CancelToken()
        if self._held.setdefault(request_id, token) is not token:
            writer.close()  # whose it is keeps it
            return
        try:
            writer.write(b"\n")
            await reader.read()
        except ConnectionError:
            pass  # killed, with our byte unread
        finally:
            del self._held[request_id]
            token.cancel(Reason.OWNER_CLOSED)
            writer.close()

    async def generate(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        is_held: bool = False,
        **options: Any,
    ) -> AsyncIterator[RequestOutput]:
        """Stream the outputs of one request, the last of which has its outcome.

        Ray cancels it as any task of an asynchronous actor; ``abort`` tells what became of it.

        Args:
            is_held: whether a connection to ``address`` is held for it.
            options: of ``Backend.submit``: ``priority``, ``time_limit``.

        Raises:
            ClientDisconnected: that connection has ended.
        """
        token = self._held.get(request_id) if is_held else CancelToken()
        if token is None:
            raise ClientDisconnected(Reason.OWNER_CLOSED, time.monotonic())
        stream = await self._backend.submit(
            request_id, prompt, params or SamplingParams(), cancel=token, **options
        )
        try:
            async for output in stream:
                yield output
        finally:
            stream.close()

    async def abort(self, request_id: str) -> AbortResult:
        """Cancel a request by its id; returns when it is out and its blocks are free."""
        return await self._backend.abort(request_id)

    async def stats(self) -> EngineStats:
        """Counters and gauges of the engine."""
        return self._backend.stats()


async def generate(
    engine: Any,
    prompt: str | Sequence[int],
    params: SamplingParams | None = None,
    *,
    token: CancelToken,
    request_id: str | None = None,
    **options: Any,
) -> AsyncGenerator[RequestOutput, None]:
    """Stream the outputs of a request to the actor, the last of which has its outcome.

    It is cancelled when the token fires, when this is closed before its end, and when this
    process ends, however it does; with reason OWNER_CLOSED in each case.

    Args:
        engine: the handle of an ``EngineActor``.
        options: of ``EngineActor.generate``.

    Raises:
        ClientDisconnected: the token had fired before.
        RayTaskError, RayActorError: the request was refused; the actor is gone.
    """
    token.raise_if_cancelled()
    request_id = request_id or f"ray-{uuid.uuid4().hex}"

    reader, writer = await asyncio.open_connection(*await engine.address.remote())

    def leave(_: CancelToken) -> None:
        writer.close()

    token.add_callback(leave, loop=asyncio.get_running_loop())
    try:
        writer.write(f"{request_id}\n".encode())
        await reader.readexactly(1)
        outputs = engine.generate.options(num_returns="streaming").remote(
            request_id, prompt, params, is_held=True, **options
        )
        async for reference in outputs:
            yield await reference
    finally:
        token.remove_callback(leave)
        writer.close()
