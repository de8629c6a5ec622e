"""One instance of a model: its worker process, and the requests that it has.

While it works on one batch, some more may be sent ahead, so that neither process sleeps for
the other between two short ones. Those have not begun: what becomes of the process does not
concern them.
"""

import asyncio
import itertools
import logging
import signal
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from disconnect_watch.backends.infer import Code, InferError, InferTensor, Parameter
from disconnect_watch.backends.pending import Pending
from disconnect_watch.backends.python_model.calls import CallServer
from disconnect_watch.backends.python_model.messages import (
    Kind,
    pack_tensor,
    packed_alone,
    unpack_error,
    unpack_tensor,
)
from disconnect_watch.backends.python_model.process import WorkerProcess

__all__ = ["Answer", "Instance", "LoadError", "Owner", "Setup"]

_logger = logging.getLogger("disconnect_watch.models")

#: Triton's log levels of models, as those of ``logging``.
_LEVELS = (logging.INFO, logging.WARNING, logging.ERROR, logging.DEBUG)

#: Bytes; of the first tensor in a body, as numpy and torch have it of those that they make.
ALIGNMENT = 64

#: Batches that are sent ahead at most, and nanoseconds that all of them may take: a client that
#: comes next waits for them.
MAX_AHEAD = 7
MAX_AHEAD_NS = 1_000_000

#: As long as the process has so many, others are gathered into one message.
ENOUGH = 2

#: Sequence flags of a request, as models see them.
_START, _END = 1, 2


class LoadError(Exception):
    """A model could not be made; the message is the model's own."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a model made of a request, or a part of it."""

    outputs: list[InferTensor]
    error: InferError | None
    parameters: dict[str, Parameter]


@dataclass(frozen=True, slots=True)
class Setup:
    """What an instance is told to make.

    Attributes:
        directory: of the version.
        name: of the instance.
        kind: ``CPU`` or ``GPU``.
        config: of the model, as JSON.
    """

    directory: str
    repository: str
    filename: str
    model: str
    version: int
    name: str
    kind: str
    device: str
    config: str


class Owner(Protocol):
    """The model that an instance works for."""

    def executed(self, batch: list[Pending], started_ns: int, ended_ns: int) -> None:
        """``execute`` has returned, which was called with these requests."""

    def answered(self, pending: Pending, answer: Answer | None, *, is_final: bool) -> None:
        """A request has one more answer; None with ``is_final`` tells that there are no more."""

    def instance_idle(self) -> None:
        """It can be given a batch."""

    def instance_died(self, instance: "Instance", message: str) -> None:
        """Its process has ended by itself. What it had is failed already."""

    def request_died(self, pending: Pending, error: InferError) -> None:
        """A request was in the process when it ended."""

    def not_begun(self, batches: list[list[Pending]]) -> None:
        """What was sent ahead to the process that has ended, in its order."""


class Instance:
    """One instance.

    Args:
        setup: what to make, ``config`` of which may be completed by the model.
        kill_after: seconds after which the process is ended if all that it has was
            cancelled and it has not stopped; None for never.

    Threads: the loop's only.
    """

    def __init__(
        self,
        setup: Setup,
        owner: Owner,
        calls: CallServer,
        *,
        kill_after: float | None,
    ) -> None:
        self.setup = setup
        self._owner = owner
        self._calls = calls
        self._kill_after = kill_after
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count(1)
        #: The first is what it works on.
        self._batches: deque[list[Pending]] = deque()
        self._unsent: list[Any] = []
        self._num_sent = 0
        self._last_ns = 0
        self._in_flight: dict[int, Pending] = {}
        self._kill_timer: asyncio.TimerHandle | None = None
        self._ready: asyncio.Future[str | None] | None = None
        self._process: WorkerProcess | None = None
        self._is_ready = False
        self._is_closing = False
        self._why_killed = ""

    @property
    def pid(self) -> int | None:
        """Of the process; None before the first start."""
        return self._process.pid if self._process is not None else None

    @property
    def is_ready(self) -> bool:
        """Whether the model is made and its process runs."""
        return self._is_ready

    @property
    def is_idle(self) -> bool:
        """Whether a batch given now would be begun now."""
        return self._is_ready and not self._batches and not self._is_closing

    @property
    def takes_ahead(self) -> bool:
        """Whether it may be given another batch while it works, as what it does is short."""
        num = len(self._batches)
        return (
            0 < num <= MAX_AHEAD
            and 0 < self._last_ns < MAX_AHEAD_NS // num
            and self._is_ready
            and not self._is_closing
        )

    @property
    def num_ahead(self) -> int:
        """Requests that were sent ahead and have not begun."""
        return sum(map(len, self._ahead())) if len(self._batches) > 1 else 0

    def _ahead(self) -> list[list[Pending]]:
        return list(self._batches)[1:]

    def _begun(self) -> Iterator[Pending]:
        """Those that the process has, but for what was sent ahead."""
        if len(self._batches) < 2:
            yield from self._in_flight.values()
            return
        ahead = {pending.number for batch in self._ahead() for pending in batch}
        yield from (one for number, one in self._in_flight.items() if number not in ahead)

    def unheeded(self) -> list[int]:
        """When requests were cancelled that the process still works on."""
        tokens = [pending.request.cancel for pending in self._begun()]
        return [token.cancelled_at_ns for token in tokens if token.cancelled]

    @property
    def num_in_flight(self) -> int:
        """Requests that the process has, cancelled ones included."""
        return len(self._in_flight)

    async def start(self, *, auto_complete: bool = False) -> str | None:
        """Start the process; returns the configuration as the model completed it, if asked to.

        With ``auto_complete`` the model itself is only made by ``initialize``.

        Raises:
            LoadError: the model could not be made; the process has ended.
        """
        self._is_closing = False
        self._ready = self._loop.create_future()
        self._process = WorkerProcess(
            self._loop,
            on_message=self._message,
            on_call=self._call,
            on_exit=self._exited,
        )
        setup = self.setup
        self._process.send(
            Kind.INIT,
            {
                "directory": setup.directory,
                "repository": setup.repository,
                "filename": setup.filename,
                "name": setup.model,
                "version": setup.version,
                "instance": setup.name,
                "kind": setup.kind,
                "device": setup.device,
                "config": setup.config,
                "auto_complete": auto_complete,
            },
        )
        return await self._until_ready()

    async def initialize(self, config: str) -> None:
        """Make the model with its final configuration, after ``start(auto_complete=True)``.

        Raises:
            LoadError: it could not be made; the process has ended.
        """
        assert self._process is not None
        self._ready = self._loop.create_future()
        if self._process.has_ended.is_set():
            raise LoadError(f"the process of '{self.setup.name}' ended while it was loaded")
        self._process.send(Kind.INIT, {"config": config})
        await self._until_ready()

    async def _until_ready(self) -> str | None:
        assert self._ready is not None
        assert self._process is not None
        try:
            return await self._ready
        except BaseException:
            self._is_closing = True
            self._process.kill()
            await self._process.has_ended.wait()
            raise

    def room_for(self, size_bytes: int, tensors_at: int) -> memoryview | None:
        """See ``PythonModel.room_for``."""
        process = self._process
        if process is None or process.has_ended.is_set():
            return None
        skipped = -tensors_at % ALIGNMENT
        try:
            return process.arena.room(size_bytes + skipped)[skipped:].data
        except MemoryError:
            return None

    def execute(self, batch: list[Pending]) -> None:
        """Give it a batch; it must be idle, or take it ahead.

        Raises:
            OverflowError, ValueError: a parameter or name can't be told to another process;
                nothing was sent.
            MemoryError: there is no room for the tensors; nothing was sent.
        """
        process = self._process
        assert process is not None
        arena = process.arena
        now_ns = time.monotonic_ns()
        packed = []
        is_begun = not self._batches
        for pending in batch:
            request = pending.request
            pending.dispatched_ns = now_ns
            if is_begun:
                request.phase = "decode"
            pending.number = next(self._numbers)
            token = request.cancel
            packed.append(
                (
                    pending.number,
                    request.id,
                    request.sequence_id,
                    request.sequence_start * _START + request.sequence_end * _END,
                    request.timeout_us,
                    token.slot,
                    token.generation,
                    request.parameters,
                    request.requested_outputs,
                    [pack_tensor(tensor, arena) for tensor in (*request.inputs, *pending.controls)],
                )
            )
        self._unsent.append(packed_alone(packed))
        for pending in batch:
            self._in_flight[pending.number] = pending
        self._batches.append(batch)
        if is_begun:
            self._send()
        elif len(self._unsent) == 1 and self._num_sent < ENOUGH:
            # With what else comes in this turn of the loop. Later, it is sent as soon as the
            # process has no longer enough to do.
            self._loop.call_soon(self._send)

    def _send(self) -> None:
        if self._unsent and self._process is not None:
            unsent, self._unsent = self._unsent, []
            self._num_sent += len(unsent)
            self._process.send(Kind.EXECUTE, unsent)

    def sweep(self) -> None:
        """Look whether all that it has was cancelled."""
        if self._kill_after is None or not self._in_flight or self._kill_timer is not None:
            return
        due = self._kill_due()
        if due is not None:
            self._kill_timer = self._loop.call_later(
                max(0.0, due - time.monotonic()), self._kill_if_due
            )

    def _kill_due(self) -> float | None:
        """When the process is to be ended; None while somebody waits for it."""
        assert self._kill_after is not None
        tokens = [pending.request.cancel for pending in self._begun()]
        if not tokens or not all(token.cancelled for token in tokens):
            return None
        now = time.monotonic()
        return max(token.cancelled_at or now for token in tokens) + self._kill_after

    def _kill_if_due(self) -> None:
        self._kill_timer = None
        due = self._kill_due()
        if due is None:
            return
        if due > time.monotonic():
            self.sweep()
            return
        assert self._process is not None
        self._why_killed = (
            f"it went on for {self._kill_after} s after all its requests were cancelled"
        )
        self._process.kill()

    async def close(self, grace: float) -> None:
        """End the process, in its own way if that takes no more than ``grace`` seconds.

        What it has is failed. Idempotent.
        """
        self._is_closing = True
        self._is_ready = False
        if self._process is not None:
            await self._process.close(grace)

    def _message(self, message: list[Any]) -> bool:
        """Take a message; returns whether another is to be expected soon."""
        kind = message[0]
        if kind == Kind.DONE:
            self._done(*message[1:])
        elif kind == Kind.RESPONSE:
            _, number, packed, is_final = message
            # Unpacked in any case, since that is what gives the memory back.
            answer = None if packed is None else self._unpack(packed)
            pending = self._in_flight.get(number)
            if pending is not None:
                if is_final:
                    del self._in_flight[number]
                self._owner.answered(pending, answer, is_final=is_final)
        elif kind == Kind.LOG:
            _, level, text = message
            _logger.log(_LEVELS[level], "%s: %s", self.setup.name, text)
        else:
            assert kind == Kind.READY, kind
            self._told_ready(*message[1:])
        return bool(self._batches)

    def _told_ready(self, config: str | None, error: str | None) -> None:
        assert self._ready is not None
        if self._ready.done():
            return
        if error is not None:
            self._ready.set_exception(LoadError(error))
        else:
            self._is_ready = config is None
            self._ready.set_result(config)

    def _done(self, started_ns: int, ended_ns: int, answers: list[Any]) -> None:
        batch = self._batches.popleft()
        self._last_ns = ended_ns - started_ns
        self._num_sent -= 1
        if not self._num_sent:
            self._send()
        if self._batches:
            # They have waited until now.
            for pending in self._batches[0]:
                pending.dispatched_ns = ended_ns
                pending.request.phase = "decode"
        run = [
            pending for pending, packed in zip(batch, answers, strict=True) if packed is not False
        ]
        if run:
            self._owner.executed(run, started_ns, ended_ns)
        for pending, packed in zip(batch, answers, strict=True):
            if packed is None:
                continue  # its sender answers
            self._in_flight.pop(pending.number, None)
            self._owner.answered(
                pending, None if packed is False else self._unpack(packed), is_final=True
            )
        self._owner.instance_idle()
        if self._num_sent < ENOUGH:
            self._send()

    def _unpack(self, packed: list[Any]) -> Answer:
        assert self._process is not None
        outputs, error, parameters = packed
        arena = self._process.arena
        return Answer(
            [unpack_tensor(tensor, arena) for tensor in outputs],
            None if error is None else unpack_error(error),
            parameters,
        )

    def _call(self, message: list[Any]) -> bool:
        assert self._process is not None
        self._calls.begin(self._process, message, self._in_flight.values())
        return False

    def _exited(self, status: int) -> None:
        was_ready, self._is_ready = self._is_ready, False
        if self._kill_timer is not None:
            self._kill_timer.cancel()
            self._kill_timer = None
        assert self._process is not None
        self._calls.end(self._process)
        how = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        message = (
            f"the process of '{self.setup.name}' ended ({self._why_killed or how}) "
            "while it worked on the request"
        )
        self._why_killed = ""
        lost, ahead = list(self._begun()), self._ahead()
        self._in_flight.clear()
        self._batches.clear()
        self._unsent.clear()
        self._num_sent = self._last_ns = 0
        for pending in lost:
            self._owner.request_died(pending, InferError(Code.INTERNAL, message))
        self._owner.not_begun(ahead)
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(
                LoadError(f"the process of '{self.setup.name}' ended ({how}) while it was loaded")
            )
        elif was_ready and not self._is_closing:
            self._owner.instance_died(self, how)
