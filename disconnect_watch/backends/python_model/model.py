"""A model in Python, its instances, and the way of a request through them."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

from disconnect_watch.backends.infer import Code, InferError, InferRequest, InferResponse
from disconnect_watch.backends.labels import read_labels
from disconnect_watch.backends.model_config import (
    ConfigError,
    check,
    complete,
    config_document,
    from_document,
    inputs_of,
    outputs_of,
    parameters_of,
)
from disconnect_watch.backends.pending import LiveSet, Pending, cancelled_error
from disconnect_watch.backends.python_model.calls import CallServer
from disconnect_watch.backends.python_model.instance import Answer, Instance, LoadError, Setup
from disconnect_watch.backends.request_queue import RequestQueue, expired_error
from disconnect_watch.backends.reshape import Reshaper
from disconnect_watch.backends.sequences import SequenceQueue
from disconnect_watch.backends.statistics import ModelStatistics
from disconnect_watch.backends.sweeper import Sweeper
from disconnect_watch.backends.tally import Tally
from disconnect_watch.backends.unsupported import passed_over
from disconnect_watch.backends.validate import Validator, prefix_of
from disconnect_watch.backends.warmup import warmup_requests
from disconnect_watch.token import Reason

__all__ = ["PythonModel"]

_logger = logging.getLogger("disconnect_watch.models")

#: Seconds before a process that died is started again, and died again, and so on.
RESTART_DELAYS = (0.0, 0.5, 2.0, 10.0, 30.0)
#: A process that ran for so many seconds has not died "again".
STABLE_AFTER = 60.0


class PythonModel:
    """One version of a model, served by as many processes as its configuration says.

    Args:
        config: complete and checked; replaced by what the model makes of it.
        directory: of the model; the version's lies in it.
        kill_after: seconds, see ``Instance``; the configuration's parameter ``kill_after``
            comes first.

    Threads: the loop's only.
    """

    def __init__(
        self,
        config: Any,
        directory: Path,
        version: int,
        *,
        sweeper: Sweeper,
        calls: CallServer,
        kill_after: float | None = None,
    ) -> None:
        self.config = config
        self.name: str = config.name
        self.version = str(version)
        self.statistics = ModelStatistics(self.name, self.version)
        self._directory = directory
        self._sweeper = sweeper
        self._calls = calls
        self._default_kill_after = kill_after
        self._instances: list[Instance] = []
        self._restarts: dict[Instance, tuple[int, float]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ns = 0
        self._is_running = False
        self._is_draining = False
        self._loop = asyncio.get_running_loop()
        self._tally = Tally(self.statistics)
        self._live = LiveSet(self._loop)
        self._configure()

    def _configure(self) -> None:
        """Take over what the configuration says."""
        self.is_decoupled: bool = self.config.model_transaction_policy.decoupled
        self.inputs = inputs_of(self.config)
        self.outputs = outputs_of(self.config)
        self._labels = read_labels(self.config, self._directory)
        self._validator = Validator(self.config)
        self._reshaper = Reshaper(self.config)
        self._queue: RequestQueue | SequenceQueue = (
            SequenceQueue(self.config)
            if self.config.HasField("sequence_batching")
            else RequestQueue(self.config)
        )

    async def load(self, *, auto_complete: bool = True) -> None:
        """Start the instances.

        Raises:
            LoadError: the model could not be made.
            ConfigError: what it made of its configuration makes no sense.
        """
        began = time.monotonic()
        try:
            first, *others = self._setups(self.config)
            instance = self._instance(first)
            completed = await instance.start(auto_complete=auto_complete)
            if completed is not None:
                self._complete(completed)
                first, *others = self._setups(self.config)
                instance.setup = first
                await instance.initialize(first.config)
            async with asyncio.TaskGroup() as group:
                for setup in others:
                    group.create_task(self._start(self._instance(setup)))
            await self._warm_up()
        except BaseExceptionGroup as errors:
            await self.close(0)
            raise errors.exceptions[0] from errors
        except InferError as error:  # of a warm-up that does not fit, or whose process died
            await self.close(0)
            raise LoadError(error.message) from error
        except BaseException:
            await self.close(0)
            raise
        for field in passed_over(self.config):
            _logger.warning("model '%s' is served without %s", self.name, field)
        self._sweeper.add(self._sweep)
        self._is_running = True
        self.statistics.load_seconds = time.monotonic() - began

    def _complete(self, document: str) -> None:
        config = from_document(document)
        complete(config, self.name)
        check(config, self.name)
        self.config = config
        self._configure()

    def _setups(self, config: Any) -> list[Setup]:
        text = json.dumps(config_document(config))
        setups = []
        for group in config.instance_group:
            if group.kind == group.KIND_GPU:
                kind, devices = "GPU", [str(gpu) for gpu in group.gpus] or ["0"]
            else:
                kind, devices = "CPU", ["0"]
            for device in devices:
                for index in range(group.count):
                    suffix = f"_gpu{device}" if kind == "GPU" else ""
                    setups.append(
                        Setup(
                            directory=str(self._directory / self.version),
                            repository=str(self._directory),
                            filename=config.default_model_filename,
                            model=self.name,
                            version=int(self.version),
                            name=f"{group.name}_{index}{suffix}",
                            kind=kind,
                            device=device,
                            config=text,
                        )
                    )
        return setups

    def _instance(self, setup: Setup) -> Instance:
        given = parameters_of(self.config).get("kill_after")
        try:
            kill_after = self._default_kill_after if given is None else float(given)
        except ValueError:
            raise ConfigError(
                f"parameter 'kill_after' of model '{self.name}' is '{given}', "
                "it must be a number of seconds"
            ) from None
        instance = Instance(setup, self, self._calls, kill_after=kill_after)
        self._instances.append(instance)
        return instance

    async def _start(self, instance: Instance) -> None:
        await instance.start()

    async def _warm_up(self) -> None:
        """Run the samples on each instance; none of it is counted."""
        self._tally = Tally(ModelStatistics(self.name, self.version))
        for request in warmup_requests(self.config, self._directory):
            size = self._validator.check(request)
            for instance in self._instances:
                pending = Pending(self._reshaper.request(request), size, None, self._loop)
                instance.execute([pending])
                response = await pending.next()
                while not response.is_final:
                    response = await pending.next()
                if response.error is not None:
                    raise LoadError(f"warm-up '{request.id}' failed: {response.error.message}")
        self._tally = Tally(self.statistics)

    @property
    def is_ready(self) -> bool:
        """Whether it takes requests and a process is there to work on them."""
        return self._is_taking and any(instance.is_ready for instance in self._instances)

    @property
    def _is_taking(self) -> bool:
        return self._is_running and not self._is_draining

    @property
    def pids(self) -> list[int]:
        """Of the processes."""
        return [instance.pid for instance in self._instances if instance.pid is not None]

    @property
    def num_live(self) -> int:
        """Requests that have no outcome yet, and those cancelled that a process still has."""
        return len(self._live) + sum(instance.num_in_flight for instance in self._instances)

    def unheeded(self) -> list[int]:
        """When requests were cancelled that a process still works on."""
        return [at for instance in self._instances for at in instance.unheeded()]

    def labels(self, output: str) -> Sequence[str]:
        """The names of the classes of an output."""
        return self._labels.get(output, ())

    def room_for(self, size_bytes: int, tensors_at: int) -> memoryview | None:
        """See ``LendsMemory``; of several processes it is one with the least to do."""
        if not self._instances:
            return None
        instance = min(self._instances, key=lambda one: one.num_in_flight)
        return instance.room_for(size_bytes, tensors_at)

    async def infer(self, request: InferRequest) -> AsyncGenerator[InferResponse, None]:
        """See ``ServedModel.infer``."""
        pending = self._admit(request)
        try:
            while True:
                response = await pending.next()
                yield response
                if response.is_final:
                    return
        finally:
            if pending.outcome is None:
                request.cancel.cancel(Reason.ABORTED)
                self._cancel(pending)

    def _admit(self, request: InferRequest) -> Pending:
        if not self._is_taking:
            raise InferError(
                Code.UNAVAILABLE,
                f"Request for unknown model: '{self.name}' version {self.version} is not at "
                "ready state",
            )
        batch_size = self._validator.check(request)
        request = self._reshaper.request(request)
        key = self._validator.batch_key(request) if self._queue.is_batching else None
        pending = Pending(request, batch_size, key, self._loop)
        request.phase = "waiting"
        if request.cancel.cancelled:
            self._tally.cancel(pending)
            raise cancelled_error(request)
        try:
            self._queue.push(pending)
        except InferError:
            request.phase = None
            self._tally.fail(pending, "REJECTED")
            raise
        self._live.add(pending)
        self._pump()
        return pending

    def _pump(self) -> None:
        """Give what waits to instances that are idle."""
        queue = self._queue
        now_ns = time.monotonic_ns()
        for pending in queue.expire(now_ns):
            self._end(pending, expired_error(pending), "REJECTED")
        due_ns = 0
        if len(queue):
            for index, instance in enumerate(self._instances):
                if instance.is_idle:
                    batch, due_ns = self._take(now_ns, index)
                    if batch:
                        self._execute(instance, batch)
            if queue.is_plain and len(self._instances) == 1:
                self._send_ahead(self._instances[0], now_ns)
        self._count_pending()
        deadline_ns = queue.next_deadline_ns()
        if deadline_ns and (not due_ns or deadline_ns < due_ns):
            due_ns = deadline_ns
        self._arm(due_ns, now_ns)

    def _send_ahead(self, instance: Instance, now_ns: int) -> None:
        """What waits for the only instance anyway waits in its process, if not for long."""
        while len(self._queue) and instance.takes_ahead:
            batch, _ = self._take(now_ns, 0)
            if batch:
                self._execute(instance, batch)

    def _count_pending(self) -> None:
        num_pending = len(self._queue)
        for instance in self._instances:
            num_pending += instance.num_ahead
        self.statistics.num_pending = num_pending

    def _execute(self, instance: Instance, batch: list[Pending]) -> None:
        try:
            instance.execute(batch)
        except (MemoryError, OverflowError, ValueError) as error:
            for pending in batch:
                message = f"{prefix_of(pending.request)}the request can't be sent: {error}"
                self._end(pending, InferError(Code.INVALID_ARG, message), "OTHER")

    def _take(self, now_ns: int, instance: int) -> tuple[list[Pending], int]:
        """The next batch, without those that were cancelled while they waited."""
        while True:
            batch, due_ns = self._queue.take(now_ns, instance)
            live = [pending for pending in batch if not pending.request.cancel.cancelled]
            for pending in batch:
                if pending.request.cancel.cancelled:
                    self._cancel(pending)
            if live or not batch:
                return live, due_ns

    def _arm(self, due_ns: int, now_ns: int) -> None:
        """Pump again at that time, if nothing else does before."""
        if due_ns == self._timer_ns:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._timer_ns = due_ns
        if due_ns:
            self._timer = self._loop.call_later(max(0, due_ns - now_ns) / 1e9, self._ring)

    def _ring(self) -> None:
        self._timer = None
        self._timer_ns = 0
        self._pump()

    def _sweep(self) -> None:
        """Some flag was set: end what it was of."""
        for pending in [live for live in self._live if live.request.cancel.cancelled]:
            self._cancel(pending)
        for instance in self._instances:
            instance.sweep()

    def _cancel(self, pending: Pending) -> None:
        """A request that was cancelled ends here, wherever it stands."""
        if pending.outcome is not None:
            return
        self._queue.remove(pending)
        self._live.discard(pending)
        self._tally.cancel(pending)
        pending.fail(cancelled_error(pending.request))
        self._count_pending()

    def _end(self, pending: Pending, error: InferError, why: str) -> None:
        if pending.outcome is not None:
            return
        self._live.discard(pending)
        self._tally.fail(pending, why)
        pending.fail(error)

    def executed(self, batch: list[Pending], started_ns: int, ended_ns: int) -> None:
        """See ``Owner``."""
        self._tally.executed(batch, started_ns, ended_ns)

    def answered(self, pending: Pending, answer: Answer | None, *, is_final: bool) -> None:
        """See ``Owner``."""
        if pending.request.cancel.cancelled:
            self._cancel(pending)
            return
        response = InferResponse(self.name, self.version, pending.request.id, is_final=is_final)
        if answer is not None:
            response.error, response.parameters = answer.error, answer.parameters
            try:
                response.outputs = self._reshaper.outputs(answer.outputs)
            except InferError as error:
                response.error = error
        if self.is_decoupled:
            self._tally.response(pending, response)
        else:
            # A sender may say that it was the last after it has sent it.
            if pending.held is not None:
                response = pending.held
                response.is_final = is_final
            if not is_final:
                pending.held = response
                return
        if is_final:
            self._live.discard(pending)
            if response.error is not None and not self.is_decoupled:
                self._tally.fail(
                    pending, "CANCELED" if response.error.code is Code.CANCELLED else "BACKEND"
                )
            else:
                self._tally.success(pending)
        pending.give(response)

    def instance_idle(self) -> None:
        """See ``Owner``."""
        self._pump()

    def request_died(self, pending: Pending, error: InferError) -> None:
        """See ``Owner``."""
        if pending.request.cancel.cancelled:
            self._cancel(pending)
        else:
            self._end(pending, error, "BACKEND")

    def not_begun(self, batches: list[list[Pending]]) -> None:
        """See ``Owner``."""
        live = [pending for batch in batches for pending in batch if pending.outcome is None]
        if live:
            assert isinstance(self._queue, RequestQueue)  # nothing else is sent ahead
            self._queue.put_back(live)
            self._count_pending()

    def instance_died(self, instance: Instance, how: str) -> None:
        """See ``Owner``."""
        _logger.error("%s ended (%s), it is started again", instance.setup.name, how)
        for pending in self._queue.lose(self._instances.index(instance)):
            self._end(
                pending,
                InferError(
                    Code.INTERNAL,
                    f"the process of '{instance.setup.name}' ended ({how}), and what it knew of "
                    "the sequence is lost",
                ),
                "BACKEND",
            )
        task = asyncio.ensure_future(self._restart(instance))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _restart(self, instance: Instance) -> None:
        """Start an instance again, the sooner the rarer that was needed."""
        num, at = self._restarts.get(instance, (0, 0.0))
        if time.monotonic() - at > STABLE_AFTER:
            num = 0
        while self._is_running:
            await asyncio.sleep(RESTART_DELAYS[min(num, len(RESTART_DELAYS) - 1)])
            num += 1
            self._restarts[instance] = num, time.monotonic()
            try:
                await instance.start()
            except LoadError as error:
                _logger.error("%s could not be started again: %s", instance.setup.name, str(error))
            else:
                self._pump()
                return

    async def drain(self, grace: float) -> None:
        """Take no more requests, and let those that were taken end within ``grace`` seconds."""
        self._is_draining = True
        await self._live.drain(grace)

    async def close(self, grace: float = 5.0) -> None:
        """End what runs, and the processes. Idempotent.

        Args:
            grace: seconds that a process has to end in its own way.
        """
        if self._is_running:
            self._sweeper.remove(self._sweep)
        self._is_running = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for pending in self._live:
            pending.request.cancel.cancel(Reason.SHUTDOWN)
            self._cancel(pending)
        await asyncio.gather(*(instance.close(grace) for instance in self._instances))
