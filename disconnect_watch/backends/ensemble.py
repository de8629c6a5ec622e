"""Models made of other models: the outputs of one are the inputs of the next.

A step starts as soon as what it needs is there. While one step runs alone it has the
request's own token, so a client that leaves ends it as if it were asked itself; steps
that run beside each other have tokens of their own, since one that fails ends the others
and not the request.

Source: Triton's model configuration, "Ensemble Models".
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from disconnect_watch.backends.infer import (
    Code,
    InferError,
    InferRequest,
    InferResponse,
    InferTensor,
    ServedModel,
)
from disconnect_watch.backends.labels import read_labels
from disconnect_watch.backends.model_config import ConfigError, inputs_of, outputs_of
from disconnect_watch.backends.pending import LiveSet, Pending, cancelled_error
from disconnect_watch.backends.statistics import ModelStatistics
from disconnect_watch.backends.sweeper import Sweeper
from disconnect_watch.backends.tally import Tally
from disconnect_watch.backends.validate import Validator
from disconnect_watch.token import CancelToken, Reason

__all__ = ["EnsembleModel"]


@dataclass(frozen=True, slots=True)
class _Step:
    """One step: which model, and what its tensors are called in the ensemble."""

    model: str
    version: str | None
    inputs: dict[str, str]
    outputs: dict[str, str]


class EnsembleModel:
    """One version of an ensemble.

    Args:
        config: complete and checked.
        find: finds the models of the steps, each time one is asked.

    Threads: the loop's only.
    """

    def __init__(
        self,
        config: Any,
        directory: Path,
        version: int,
        *,
        sweeper: Sweeper,
        find: Callable[[str, str | None], ServedModel],
    ) -> None:
        self.config = config
        self.name: str = config.name
        self.version = str(version)
        self.statistics = ModelStatistics(self.name, self.version)
        self.inputs = inputs_of(config)
        self.outputs = outputs_of(config)
        self._labels = read_labels(config, directory)
        self._steps = [
            _Step(
                step.model_name,
                None if step.model_version < 1 else str(step.model_version),
                dict(step.input_map),
                dict(step.output_map),
            )
            for step in config.ensemble_scheduling.step
        ]
        self._find = find
        self._sweeper = sweeper
        self._loop = asyncio.get_running_loop()
        self._validator = Validator(config)
        self._tally = Tally(self.statistics)
        self._live = LiveSet(self._loop)
        self._is_running = False
        self._is_draining = False

    @property
    def is_decoupled(self) -> bool:
        """Whether its last step is."""
        return bool(self.config.model_transaction_policy.decoupled)

    @property
    def is_ready(self) -> bool:
        """Whether all its models are."""
        if not self._is_running or self._is_draining:
            return False
        try:
            return all(self._find(step.model, step.version).is_ready for step in self._steps)
        except InferError:
            return False

    def labels(self, output: str) -> Sequence[str]:
        """The names of the classes of an output; those of the step that makes it, if need be."""
        if output in self._labels:
            return self._labels[output]
        for step in self._steps:
            for own, name in step.outputs.items():
                if name == output:
                    return self._find(step.model, step.version).labels(own)
        return ()

    async def load(self, *, auto_complete: bool = True) -> None:
        """See that the steps fit together.

        Raises:
            ConfigError: they don't; the message says where.
        """
        began = time.monotonic()
        made = {tensor.name for tensor in self.inputs}
        if not self._steps:
            raise ConfigError(f"must specify 'step' for ensemble '{self.name}'")
        for step in self._steps:
            made |= self._check_step(step, made)
        for tensor in self.outputs:
            if tensor.name not in made:
                raise ConfigError(
                    f"ensemble '{self.name}': no step makes the output '{tensor.name}'"
                )
        self._check_order()
        self.statistics.load_seconds = time.monotonic() - began
        self._is_running = True

    def _check_step(self, step: _Step, made: set[str]) -> set[str]:
        where = f"ensemble '{self.name}', step '{step.model}'"
        try:
            model = self._find(step.model, step.version)
        except InferError as error:
            raise ConfigError(f"{where}: {error.message}") from error
        inputs = {tensor.name: tensor for tensor in model.inputs}
        outputs = {tensor.name for tensor in model.outputs}
        for kind, mapped, known in (
            ("input", step.inputs, set(inputs)),
            ("output", step.outputs, outputs),
        ):
            if unknown := set(mapped) - known:
                raise ConfigError(f"{where}: the model has no {kind} '{min(unknown)}'")
        required = {name for name, tensor in inputs.items() if not tensor.is_optional}
        if missing := required - set(step.inputs):
            raise ConfigError(f"{where}: the input '{min(missing)}' is not mapped")
        if twice := made & set(step.outputs.values()):
            raise ConfigError(f"{where}: the tensor '{min(twice)}' is made twice")
        return set(step.outputs.values())

    def _check_order(self) -> None:
        """See that every step comes to run, and that one of many responses is the last."""
        made = {tensor.name for tensor in self.inputs}
        left = list(self._steps)
        while left:
            able = [step for step in left if made >= set(step.inputs.values())]
            if not able:
                raise ConfigError(
                    f"ensemble '{self.name}': the step '{left[0].model}' waits for a tensor that "
                    "no step before it makes"
                )
            for step in able:
                is_decoupled = self._find(step.model, step.version).is_decoupled
                if is_decoupled and len(left) > 1:
                    raise ConfigError(
                        f"ensemble '{self.name}': the step '{step.model}' is decoupled, "
                        "it must come behind all others"
                    )
                if is_decoupled:
                    self.config.model_transaction_policy.decoupled = True
                made |= set(step.outputs.values())
            left = [step for step in left if step not in able]

    async def infer(self, request: InferRequest) -> AsyncGenerator[InferResponse, None]:
        """See ``ServedModel.infer``."""
        if not self._is_running or self._is_draining:
            raise InferError(
                Code.UNAVAILABLE,
                f"Request for unknown model: '{self.name}' version {self.version} is not at "
                "ready state",
            )
        pending = Pending(request, self._validator.check(request), None, self._loop)
        pending.dispatched_ns = pending.arrived_ns
        request.phase = "decode"
        self._live.add(pending)
        try:
            async with aclosing(self._run(request)) as responses:
                async for response in responses:
                    self._count(pending, response)
                    yield response
        except InferError as error:
            if pending.outcome is None:
                if error.code is Code.CANCELLED and request.cancel.cancelled:
                    self._tally.cancel(pending)
                else:
                    self._tally.fail(pending, "OTHER")
            raise
        finally:
            if pending.outcome is None:
                request.cancel.cancel(Reason.ABORTED)
                self._tally.cancel(pending)
            self._live.discard(pending)

    def _count(self, pending: Pending, response: InferResponse) -> None:
        if self.is_decoupled:
            self._tally.response(pending, response)
        if not response.is_final:
            return
        if response.error is not None and not self.is_decoupled:
            self._tally.fail(pending, "BACKEND")
            return
        now_ns = time.monotonic_ns()
        self._tally.executed([pending], pending.arrived_ns, now_ns)
        self._tally.success(pending)

    async def _run(self, request: InferRequest) -> AsyncGenerator[InferResponse, None]:
        pool = {tensor.name: tensor for tensor in request.inputs}
        # What nobody gave and nobody makes: an optional input of the ensemble.
        absent = {tensor.name for tensor in self.inputs} - set(pool)
        left = list(self._steps)
        while left:
            able = [
                step
                for step in left
                if all(name in pool or name in absent for name in step.inputs.values())
            ]
            left = [step for step in left if step not in able]
            if request.cancel.cancelled:
                raise cancelled_error(request)
            if len(able) == 1 and not left and self.is_decoupled:
                async with aclosing(self._stream(able[0], request, pool)) as responses:
                    async for response in responses:
                        yield response
                return
            failed = await self._run_beside(able, request, pool)
            absent |= {name for step in able for name in step.outputs.values() if name not in pool}
            if failed is not None:
                yield self._response(request, {}, failed)
                return
        yield self._response(request, pool, None)

    async def _run_beside(
        self, steps: list[_Step], request: InferRequest, pool: dict[str, InferTensor]
    ) -> InferError | None:
        """Run steps that need nothing of each other; returns the error of the first that failed."""
        if len(steps) == 1:
            return await self._run_step(steps[0], request, pool, request.cancel)
        tokens = [CancelToken() for _ in steps]

        def follow() -> None:
            reason = request.cancel.reason
            if reason is not None:
                for token in tokens:
                    token.cancel(reason)

        self._sweeper.add(follow)
        tasks = [
            asyncio.ensure_future(self._run_step(step, request, pool, token))
            for step, token in zip(steps, tokens, strict=True)
        ]
        try:
            follow()
            for task in asyncio.as_completed(tasks):
                failed = await task
                if failed is not None:
                    return failed
            return None
        except InferError:
            if request.cancel.cancelled:
                raise cancelled_error(request) from None
            raise
        finally:
            self._sweeper.remove(follow)
            for running in tasks:
                running.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _run_step(
        self,
        step: _Step,
        request: InferRequest,
        pool: dict[str, InferTensor],
        token: CancelToken,
    ) -> InferError | None:
        """Run one step, and put what it makes into the pool."""
        async with aclosing(self._ask(step, request, pool, token)) as responses:
            async for response in responses:
                if response.error is not None:
                    return self._within(response.error)
                for tensor in response.outputs:
                    name = step.outputs.get(tensor.name)
                    if name is not None:
                        pool[name] = tensor.told(name=name)
        return None

    async def _stream(
        self, step: _Step, request: InferRequest, pool: dict[str, InferTensor]
    ) -> AsyncGenerator[InferResponse, None]:
        """Run the last step, whose responses are those of the ensemble."""
        async with aclosing(self._ask(step, request, pool, request.cancel)) as responses:
            async for response in responses:
                made = {
                    step.outputs[tensor.name]: tensor.told(name=step.outputs[tensor.name])
                    for tensor in response.outputs
                    if tensor.name in step.outputs
                }
                error = None if response.error is None else self._within(response.error)
                own = self._response(request, made if not made else pool | made, error)
                own.is_final = response.is_final
                yield own

    def _ask(
        self,
        step: _Step,
        request: InferRequest,
        pool: dict[str, InferTensor],
        token: CancelToken,
    ) -> AsyncGenerator[InferResponse, None]:
        try:
            model = self._find(step.model, step.version)
        except InferError as error:
            raise self._within(error) from error
        return model.infer(
            InferRequest(
                id=request.id,
                inputs=[
                    pool[name].told(name=own) for own, name in step.inputs.items() if name in pool
                ],
                requested_outputs=list(step.outputs),
                parameters=request.parameters,
                sequence_id=request.sequence_id,
                sequence_start=request.sequence_start,
                sequence_end=request.sequence_end,
                priority=request.priority,
                timeout_us=request.timeout_us,
                cancel=token,
            )
        )

    def _within(self, error: InferError) -> InferError:
        return InferError(error.code, f"in ensemble '{self.name}', {error.message}")

    def _response(
        self, request: InferRequest, pool: dict[str, InferTensor], error: InferError | None
    ) -> InferResponse:
        wanted = request.requested_outputs or [tensor.name for tensor in self.outputs]
        return InferResponse(
            self.name,
            self.version,
            request.id,
            outputs=[pool[name] for name in wanted if name in pool],
            error=error,
        )

    async def drain(self, grace: float) -> None:
        """Take no more requests, and let those that were taken end within ``grace`` seconds."""
        self._is_draining = True
        await self._live.drain(grace)

    async def close(self, grace: float = 5.0) -> None:
        """End what runs. Idempotent."""
        self._is_running = False
        for pending in self._live:
            pending.request.cancel.cancel(Reason.SHUTDOWN)
