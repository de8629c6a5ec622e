"""Cancel tokens for the continuous batching of transformers.

    async for output in generate(manager, input_ids, token):
        send(output.generated_tokens)

transformers drops a cancelled request between two steps of its batch and tells nobody: who
waits for the request's outputs waits for ever. Here it is told with ``ClientDisconnected``.

What is used of transformers beyond its documented surface (5.24, held by
``tests/integration/test_hooks_transformers.py``): ``manager.output_router.result_handlers``,
where the handler of a cancelled request would stay; the manager's queues, and the
scheduler's ``active_requests``, ``waiting_requests`` and ``_requests_to_cancel``, which say
when it is out.
"""

import asyncio
import uuid
from collections.abc import AsyncGenerator
from typing import Any

from transformers.generation.continuous_batching import ContinuousBatchingManager
from transformers.generation.continuous_batching.requests import GenerationOutput

from disconnect_watch.token import CancelToken

__all__ = ["generate"]

#: Seconds between two looks at whether a cancelled request is out: less than a step takes.
_LOOK_EVERY = 0.005


async def generate(
    manager: ContinuousBatchingManager,
    input_ids: list[int],
    token: CancelToken,
    *,
    request_id: str | None = None,
    **options: Any,
) -> AsyncGenerator[GenerationOutput, None]:
    """Stream the outputs of one request; cancel it with its token, or by closing this.

    Args:
        manager: started.
        request_id: its name, of no other that runs; None makes one up.
        options: of ``manager.add_request``, such as ``max_new_tokens``.

    Raises:
        ClientDisconnected: the token fired; the request is out and its cache blocks are free.
        RuntimeError: the request failed, or the manager has stopped.
    """
    token.raise_if_cancelled()
    if request_id is None:
        request_id = f"dw-{uuid.uuid4().hex}"
    news: asyncio.Queue[GenerationOutput | None] = asyncio.Queue()

    def wake(_: CancelToken) -> None:
        news.put_nowait(None)

    is_over = False
    manager.register_result_handler(request_id, news.put_nowait)
    token.add_callback(wake, loop=asyncio.get_running_loop())
    try:
        manager.add_request(input_ids, request_id=request_id, streaming=True, **options)
        while not is_over:
            output = await news.get()
            token.raise_if_cancelled()
            assert output is not None
            is_over = output.is_finished() or output.error is not None
            if output.error is not None:
                raise RuntimeError(f"request {request_id}: {output.error}")
            yield output
    finally:
        token.remove_callback(wake)
        try:
            if not is_over:
                await _cancel(manager, request_id)
        finally:
            # The step at hand may have had an output for it until here.
            manager.output_router.result_handlers.pop(request_id, None)


async def _cancel(manager: ContinuousBatchingManager, request_id: str) -> None:
    """Cancel the request, and wait until it is out."""
    manager.cancel_request(request_id)
    while manager.is_running() and not _is_out(manager, request_id):
        await asyncio.sleep(_LOOK_EVERY)
        if manager.cancel_queue.empty() and _is_scheduled(manager, request_id):
            # One that overtook its request, between two queues being emptied, did nothing.
            manager.cancel_request(request_id)


def _is_out(manager: ContinuousBatchingManager, request_id: str) -> bool:
    return (
        manager.input_queue.empty()
        and manager.cancel_queue.empty()
        and not _is_scheduled(manager, request_id)
        # What its thread makes as it starts; until then all is before it.
        and manager.batch_processor is not None
        # Emptied once the blocks are free.
        and request_id not in manager.batch_processor.scheduler._requests_to_cancel
    )


def _is_scheduled(manager: ContinuousBatchingManager, request_id: str) -> bool:
    if manager.batch_processor is None:
        return False
    scheduler = manager.batch_processor.scheduler
    return request_id in scheduler.active_requests or request_id in scheduler.waiting_requests
