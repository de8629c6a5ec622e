"""One model at work: requests in, responses out."""

import asyncio
import inspect
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from disconnect_watch.backends.python_model.messages import pack_error, pack_tensor, unpack_tensor
from disconnect_watch.backends.python_model.worker.errors import TritonError, TritonModelException
from disconnect_watch.backends.python_model.worker.link import Link
from disconnect_watch.backends.python_model.worker.loading import describe
from disconnect_watch.backends.python_model.worker.requests import InferenceRequest
from disconnect_watch.backends.python_model.worker.responses import (
    InferenceResponse,
    InferenceResponseSender,
)

__all__ = ["Runner"]

#: What ``execute`` is called with: index in the batch, request, and what answers it.
Running = Sequence[tuple[int, InferenceRequest, InferenceResponseSender]]


class Runner:
    """Executes batches.

    Args:
        model: made and initialized.
        instance: its name, for errors.

    Threads: the worker's main thread; senders answer from any.
    """

    def __init__(
        self, model: Any, link: Link, *, name: str, version: int, instance: str, is_decoupled: bool
    ) -> None:
        self._model = model
        self._link = link
        self._name = name
        self._version = version
        self._instance = instance
        self._is_decoupled = is_decoupled
        self._loop: asyncio.AbstractEventLoop | None = None

    def execute(self, packed: list[Any]) -> None:
        """Run a batch, and tell of it: an answer a request, or None where a sender answers.

        What was cancelled before it came here is left out, and has False for an answer.
        """
        link = self._link
        answers: list[Any] = [None] * len(packed)
        running: list[tuple[int, InferenceRequest, InferenceResponseSender]] = []
        for index, one in enumerate(packed):
            is_set = link.flag_reader(one[5], one[6])
            if is_set():
                answers[index] = False
                # Whose memory goes back all the same.
                for tensor in one[-1]:
                    unpack_tensor(tensor, link.arena)
                continue
            sender = InferenceResponseSender(
                self._sending(one[0], one[8]), is_set, is_decoupled=self._is_decoupled
            )
            running.append((index, self._request(one, is_set, sender), sender))
        started_ns = time.monotonic_ns()
        if running:
            link.caller.flag = (packed[0][5], packed[0][6]) if len(packed) == 1 else None
            self._run(running, packed, answers)
            link.caller.flag = None
        ended_ns = time.monotonic_ns()
        running.clear()  # and with it the inputs, so that their memory goes back with this answer
        link.send_done(started_ns, ended_ns, answers)

    def _request(
        self, one: list[Any], is_set: Callable[[], bool], sender: InferenceResponseSender
    ) -> InferenceRequest:
        _, request_id, correlation_id, flags, timeout, _, _, parameters, requested, inputs = one
        return InferenceRequest.of_wire(
            request_id=request_id,
            correlation_id=correlation_id,
            wires=[unpack_tensor(tensor, self._link.arena) for tensor in inputs],
            requested=requested,
            model_name=self._name,
            model_version=self._version,
            flags=flags,
            timeout=timeout,
            parameters=parameters,
            is_set=is_set,
            sender=sender,
        )

    def _sending(
        self, number: int, requested: list[str]
    ) -> Callable[[InferenceResponse | None, bool], None]:
        def send(response: InferenceResponse | None, is_final: bool) -> None:
            answer = None if response is None else self._pack(response, requested)
            self._link.send_response(number, answer, is_final)

        return send

    def _pack(self, response: InferenceResponse, requested: list[str]) -> tuple[Any, ...]:
        error = response.error()
        if error is not None:
            return (), pack_error(error.to_infer_error()), response.parameters()
        arena = self._link.arena
        outputs = [
            pack_tensor(tensor.to_wire(), arena)
            for tensor in response.output_tensors()
            if not requested or tensor.name() in requested
        ]
        return outputs, None, response.parameters()

    def _run(
        self,
        running: Running,
        packed: list[Any],
        answers: list[Any],
    ) -> None:
        requests = [request for _, request, _ in running]
        try:
            result = self._model.execute(requests)
            if inspect.isawaitable(result):
                if self._is_decoupled:
                    self._background().call_soon_threadsafe(self._detach, result, tuple(running))
                    return
                result = asyncio.run(_awaited(result))
            self._take(result, running, packed, answers)
        except Exception as error:
            self._fail(running, answers, self._failure(error))

    def _take(
        self,
        result: Any,
        running: Running,
        packed: list[Any],
        answers: list[Any],
    ) -> None:
        """What ``execute`` returned, as answers."""
        if self._is_decoupled:
            if result is not None:
                raise TritonModelException(
                    f"Python model '{self._instance}' is using the decoupled mode and the execute "
                    "function must return None."
                )
            return
        if result is None and all(sender.is_taken for _, _, sender in running):
            return
        if not isinstance(result, list | tuple) or len(result) != len(running):
            got = len(result) if isinstance(result, list | tuple) else type(result).__name__
            raise TritonModelException(
                f"Number of InferenceResponse objects do not match the number of "
                f"InferenceRequest objects. Expected {len(running)}, got {got}"
            )
        for (index, _, sender), response in zip(running, result, strict=True):
            if response is None and sender.is_taken:
                continue  # it is answered by its sender
            if not isinstance(response, InferenceResponse):
                raise TritonModelException(
                    f"Expected an 'InferenceResponse' object in the execute function return list, "
                    f"found type '{type(response)}'."
                )
            answers[index] = self._packed_or_error(response, packed[index][8])
            sender.finish()

    def _packed_or_error(self, response: InferenceResponse, requested: list[str]) -> Any:
        """A response that can't be sent fails its own request alone."""
        try:
            return self._pack(response, requested)
        except Exception as error:
            return self._pack(InferenceResponse([], self._failure(error)), requested)

    def _failure(self, error: Exception) -> TritonError:
        return TritonError(
            f"Failed to process the request(s) for model '{self._instance}', message: "
            f"{describe(error)}"
        )

    def _fail(
        self,
        running: Running,
        answers: list[Any] | None,
        error: TritonError,
    ) -> None:
        """Answer with an error whatever has no last answer yet."""
        response = InferenceResponse([], error)
        for index, _, sender in running:
            if sender.is_finished:
                continue
            if answers is not None and not self._is_decoupled and not sender.is_taken:
                answers[index] = self._pack(response, [])
                sender.finish()
            else:
                sender.send(response, flags=1)

    def _background(self) -> asyncio.AbstractEventLoop:
        """The loop on which coroutines of a decoupled model go on after ``execute``."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="execute", daemon=True).start()
        return self._loop

    def _detach(
        self,
        result: Any,
        running: Running,
    ) -> None:
        task = asyncio.ensure_future(_awaited(result))
        self._tasks.add(task)
        task.add_done_callback(lambda done: self._ended(done, running))

    _tasks: "set[asyncio.Future[Any]]" = set()  # noqa: RUF012  the loop keeps weak references only

    def _ended(
        self,
        task: "asyncio.Future[Any]",
        running: Running,
    ) -> None:
        self._tasks.discard(task)
        error = task.exception()
        if isinstance(error, Exception):
            self._fail(running, None, self._failure(error))


async def _awaited(result: Any) -> Any:
    return await result
