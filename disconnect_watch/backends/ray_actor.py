"""The embedded engine as a Ray actor, and its requests by tokens of the caller.

    engine = ray.remote(EngineActor).remote()
    async for output in generate(engine, "A class is", token=token):
        send(output.text_delta)

The flags of two processes that Ray began are in two tables: a cancel is a call of the actor,
which its engine has within a step of receiving it.
"""

import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from pathlib import Path
from typing import Any

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
from disconnect_watch.token import CancelToken

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

    async def generate(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        **options: Any,
    ) -> AsyncIterator[RequestOutput]:
        """Stream the outputs of one request, the last of which has its outcome.

        Ray cancels it as any task of an asynchronous actor; ``abort`` tells what became of it.

        Args:
            options: of ``Backend.submit``: ``priority``, ``time_limit``.
        """
        token = CancelToken()
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

    It is aborted when the token fires, or when this is closed before its end.

    Args:
        engine: the handle of an ``EngineActor``.
        options: of ``EngineActor.generate``.

    Raises:
        ClientDisconnected: the token had fired before.
        RayTaskError, RayActorError: the request was refused; the actor is gone.
    """
    token.raise_if_cancelled()
    request_id = request_id or f"ray-{uuid.uuid4().hex}"

    def abort(_: CancelToken | None = None) -> None:
        engine.abort.remote(request_id)

    outputs = engine.generate.options(num_returns="streaming").remote(
        request_id, prompt, params, **options
    )
    token.add_callback(abort)
    has_ended = False
    try:
        async for reference in outputs:
            output: RequestOutput = await reference
            has_ended = output.outcome is not None
            yield output
    finally:
        token.remove_callback(abort)
        if not has_ended:
            abort()
