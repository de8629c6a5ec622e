"""How a model asks another model of the server.

A call goes out as one message and its responses come back as many, on a socket of their
own, which a thread reads that is started with the first call: a model that asks nobody
pays nothing.
"""

import asyncio
import itertools
import queue
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from disconnect_watch.backends.infer import InferTensor, Parameter
from disconnect_watch.backends.python_model.arena import Arena
from disconnect_watch.backends.python_model.messages import (
    MAX_PACKET_BYTES,
    Kind,
    decode,
    encode,
    pack_tensor,
    unpack_tensor,
)
from disconnect_watch.backends.python_model.worker.errors import TritonError, TritonModelException
from disconnect_watch.backends.python_model.worker.responses import InferenceResponse
from disconnect_watch.backends.python_model.worker.tensors import Tensor

__all__ = [
    "Call",
    "Caller",
    "exec_async",
    "exec_blocking",
    "install",
    "is_model_ready",
    "model_directory",
]


@dataclass(frozen=True, slots=True)
class Call:
    """One request to another model."""

    model_name: str
    model_version: int = -1
    request_id: str = ""
    correlation_id: int | str = 0
    flags: int = 0
    timeout: int = 0
    parameters: dict[str, Parameter] = field(default_factory=dict)
    requested: list[str] = field(default_factory=list)
    inputs: list[InferTensor] = field(default_factory=list)


#: What a call's responses are given to: None behind the last.
Sink = Callable[[InferenceResponse | None], object]


class Caller:
    """The way to the other models.

    Args:
        sock: to the server, for calls alone.
        directory: of the version that runs.

    Attributes:
        flag: slot and generation of the one request that is being executed, whose cancel
            then ends its calls too; None while there are several.

    Threads: any.
    """

    def __init__(self, sock: socket.socket, arena: Arena, directory: str) -> None:
        self._sock = sock
        self._arena = arena
        self.directory = directory
        self.flag: tuple[int, int] | None = None
        self._ids = itertools.count()
        self._lock = threading.Lock()
        self._sinks: dict[int, Sink] = {}
        self._thread: threading.Thread | None = None

    def begin(self, call: Call, sink: Sink) -> None:
        """Send a call, whose responses ``sink`` is given on the thread that reads them."""
        number = next(self._ids)
        packet = encode(
            self._arena,
            Kind.CALL,
            number,
            call.model_name,
            call.model_version,
            call.request_id,
            call.correlation_id,
            call.flags,
            call.timeout,
            self.flag,
            call.parameters,
            call.requested,
            [pack_tensor(tensor, self._arena) for tensor in call.inputs],
        )
        with self._lock:
            self._sinks[number] = sink
            if self._thread is None:
                self._thread = threading.Thread(target=self._read, name="calls", daemon=True)
                self._thread.start()
        self._sock.sendall(packet)

    def _read(self) -> None:
        buffer = bytearray(2 * MAX_PACKET_BYTES)
        view = memoryview(buffer)
        while size := self._sock.recv_into(buffer):
            _, number, response, is_final = decode(self._arena, view[:size])
            with self._lock:
                sink = self._sinks[number]
                if is_final:
                    del self._sinks[number]
            if response is not None:
                sink(_response_of(response, self._arena))
            if is_final:
                sink(None)
        with self._lock:
            sinks, self._sinks = self._sinks, {}
        for sink in sinks.values():
            sink(InferenceResponse([], TritonError("the server is gone")))
            sink(None)


def _response_of(packed: list[Any], arena: Arena) -> InferenceResponse:
    outputs, error, parameters = packed
    return InferenceResponse(
        [Tensor.of_wire(unpack_tensor(tensor, arena)) for tensor in outputs],
        TritonError(error[1], error[0]) if error else None,
        parameters,
    )


_caller: Caller | None = None


def install(caller: Caller) -> None:
    """Make this process's models call through ``caller``."""
    global _caller
    _caller = caller


def _installed() -> Caller:
    if _caller is None:
        raise TritonModelException("models can be asked from a worker process only")
    return _caller


def model_directory() -> str:
    """The directory of the version that runs."""
    return _installed().directory


def exec_blocking(
    call: Call, is_decoupled: bool
) -> InferenceResponse | Iterator[InferenceResponse]:
    """Ask, and block the thread until the answer is there."""
    responses: queue.SimpleQueue[InferenceResponse | None] = queue.SimpleQueue()
    _installed().begin(call, responses.put)
    if is_decoupled:
        return iter(responses.get, None)
    return _only(list(iter(responses.get, None)))


async def exec_async(
    call: Call, is_decoupled: bool
) -> InferenceResponse | AsyncIterator[InferenceResponse]:
    """Ask, and let the loop go on until the answer is there."""
    loop = asyncio.get_running_loop()
    responses: asyncio.Queue[InferenceResponse | None] = asyncio.Queue()
    _installed().begin(
        call, lambda response: loop.call_soon_threadsafe(responses.put_nowait, response)
    )
    each = _each(responses)
    if is_decoupled:
        return each
    return _only([response async for response in each])


async def _each(
    responses: "asyncio.Queue[InferenceResponse | None]",
) -> AsyncIterator[InferenceResponse]:
    while (response := await responses.get()) is not None:
        yield response


def _only(responses: list[InferenceResponse]) -> InferenceResponse:
    if len(responses) == 1:
        return responses[0]
    return InferenceResponse(
        [],
        TritonError(
            f"the model answered with {len(responses)} responses, ask it with decoupled=True"
        ),
    )


def is_model_ready(model_name: str, model_version: str = "") -> bool:
    """Whether a model could be asked now: a call without inputs that is never made."""
    responses: queue.SimpleQueue[InferenceResponse | None] = queue.SimpleQueue()
    version = int(model_version or -1)
    _installed().begin(Call(model_name, version, flags=READY_FLAG), responses.put)
    answers = list(iter(responses.get, None))
    return not any(answer.has_error() for answer in answers)


#: A flag that no request has: the server only says whether the model is ready.
READY_FLAG = 1 << 31
