"""The server's side of models that ask other models."""

import asyncio
from collections.abc import Callable, Collection
from contextlib import aclosing
from typing import Any

from disconnect_watch.backends.infer import (
    Code,
    InferError,
    InferRequest,
    InferResponse,
    ServedModel,
)
from disconnect_watch.backends.pending import Pending
from disconnect_watch.backends.python_model.messages import pack_error, pack_tensor, unpack_tensor
from disconnect_watch.backends.python_model.process import WorkerProcess
from disconnect_watch.backends.python_model.worker.calls import READY_FLAG
from disconnect_watch.token import CancelToken

__all__ = ["CallServer", "Find"]

#: Finds a model by its name and version; None takes the latest.
Find = Callable[[str, str | None], ServedModel]


class CallServer:
    """Runs the calls of worker processes.

    A call that a model makes while it executes one request is a part of that request: it
    has the request's token, and so a client that leaves ends both.

    Threads: the loop's only.
    """

    def __init__(self, find: Find) -> None:
        self._find = find
        self._tasks: dict[WorkerProcess, set[asyncio.Task[None]]] = {}

    def begin(
        self, process: WorkerProcess, message: list[Any], in_flight: Collection[Pending]
    ) -> None:
        """Run the call of a message."""
        tasks = self._tasks.setdefault(process, set())
        task = asyncio.ensure_future(self._run(process, message, tuple(in_flight)))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    def end(self, process: WorkerProcess) -> None:
        """Cancel the calls of a process that has ended."""
        for task in self._tasks.pop(process, ()):
            task.cancel()

    async def _run(
        self, process: WorkerProcess, message: list[Any], in_flight: tuple[Pending, ...]
    ) -> None:
        number = message[1]
        try:
            await self._answer(process, message, in_flight)
        except InferError as error:
            process.reply(number, ((), pack_error(error), {}), True)
        except Exception as error:
            wrapped = InferError(Code.INTERNAL, f"the call failed: {error}")
            process.reply(number, ((), pack_error(wrapped), {}), True)
            raise

    async def _answer(
        self, process: WorkerProcess, message: list[Any], in_flight: tuple[Pending, ...]
    ) -> None:
        _, number, name, version, request_id, sequence, flags, timeout, flag, *rest = message
        parameters, requested, inputs = rest
        model = self._find(name, None if version < 0 else str(version))
        if flags & READY_FLAG:
            process.reply(number, None, True)
            return
        request = InferRequest(
            id=request_id,
            inputs=[unpack_tensor(tensor, process.arena) for tensor in inputs],
            requested_outputs=requested,
            parameters=parameters,
            sequence_id=sequence,
            sequence_start=bool(flags & 1),
            sequence_end=bool(flags & 2),
            timeout_us=timeout,
            cancel=_token_of(flag, in_flight),
        )
        del message, rest, inputs
        is_last = False
        async with aclosing(model.infer(request)) as responses:
            async for response in responses:
                is_last = response.is_final
                process.reply(number, _packed(response, process), is_last)
        if not is_last:
            process.reply(number, None, True)


def _token_of(flag: list[int] | None, in_flight: tuple[Pending, ...]) -> CancelToken:
    if flag is not None:
        for pending in in_flight:
            token = pending.request.cancel
            if [token.slot, token.generation] == flag:
                return token
    return CancelToken()


def _packed(response: InferResponse, process: WorkerProcess) -> Any:
    if response.error is None and not response.outputs and response.is_final:
        return None
    error = None if response.error is None else pack_error(response.error)
    outputs = [pack_tensor(tensor, process.arena) for tensor in response.outputs]
    return outputs, error, response.parameters
