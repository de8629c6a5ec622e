"""The looks of vLLM's model runner: in each layer of a step, before its attention.

Attention, since that is called by Python whether the rest of the model is compiled or not; graphs
of CUDA, which call nothing, run to their end.

A step is given up where that is less work than to go on: what is left of it, for all its tokens,
against the whole of it for those whose clients are there, who must begin anew.

Threads: the worker's.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any

from disconnect_watch.backends.hooks.vllm._look import Look, flags_of

__all__ = ["dead_of", "install"]

logger = logging.getLogger("vllm.disconnect_watch")

#: In the output of a step that was given up: the ids of those for whom.
_DEAD = "disconnect_watch_dead"


def dead_of(output: Any) -> list[str] | None:
    """For whom the step with that output was given up; None where it was not."""
    dead: list[str] | None = getattr(output, _DEAD, None)
    return dead


class GivenUp(Exception):
    """Leaves the forward pass."""

    def __init__(self, dead: list[str]) -> None:
        super().__init__(f"{len(dead)} requests of the step were cancelled")
        self.dead = dead


class Step:
    """One forward pass, looked at from within.

    Args:
        look: the flags of its requests.
        num_tokens: of each request.
        num_layers: in which ``before_layer`` is called.
    """

    def __init__(self, look: Look, num_tokens: dict[str, int], num_layers: int) -> None:
        self._look = look
        self._num_tokens = num_tokens
        self._total = sum(num_tokens.values())
        self._num_layers = self._num_left = num_layers

    def before_layer(self) -> None:
        """Look, and give the step up if that is the less work.

        Raises:
            GivenUp: it is.
        """
        if self._look.has_fired():
            dead = self._look.fired()
            num_live = self._total - sum(self._num_tokens[request_id] for request_id in dead)
            if num_live * self._num_layers < self._total * self._num_left:
                raise GivenUp(dead)
        self._num_left -= 1


class _Looks:
    """The looks within one model runner's steps.

    Attributes:
        step: the one that runs, None for a dummy one.
    """

    def __init__(self, runner: Any) -> None:
        self.step: Step | None = None
        self._runner = runner
        self._ids: list[str] = []
        self._look = Look({})
        layers = _attention_layers(runner)
        why_not = _why_not(runner, layers)
        self._num_layers = 0 if why_not else len(layers)
        if why_not:
            logger.info("clients that leave are looked for between two steps alone: %s", why_not)
            return
        for layer in layers:
            layer.impl.forward = self._looking(layer.impl.forward)

    def begin(self, scheduler_output: Any) -> Step | None:
        """The step that is to run; None where none of its requests names a flag."""
        ids = list(scheduler_output.num_scheduled_tokens)
        if not ids or not self._num_layers:
            return None
        if ids != self._ids or scheduler_output.scheduled_new_reqs:
            new = {new.req_id: new for new in scheduler_output.scheduled_new_reqs}
            known = self._runner.requests
            self._ids = ids
            self._look = Look(
                {
                    request_id: flags_of((new.get(request_id) or known[request_id]).sampling_params)
                    for request_id in ids
                }
            )
        return Step(self._look, scheduler_output.num_scheduled_tokens, self._num_layers)

    def _looking(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def look_and_go_on(*args: Any, **kwargs: Any) -> Any:
            if self.step is not None:
                self.step.before_layer()
            return forward(*args, **kwargs)

        return look_and_go_on


def install() -> None:
    """Wrap ``GPUModelRunner.execute_model``, which is also the CPU's. Idempotent."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    original = GPUModelRunner.execute_model
    if hasattr(original, "_disconnect_watch"):
        return

    @functools.wraps(original)
    def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        looks = getattr(self, "_disconnect_watch", None)
        if looks is None:
            looks = self._disconnect_watch = _Looks(self)
        looks.step = looks.begin(scheduler_output)
        try:
            return original(self, scheduler_output, *args, **kwargs)
        except GivenUp as given_up:
            return _given_up(given_up.dead)
        finally:
            looks.step = None

    execute_model._disconnect_watch = True  # type: ignore[attr-defined]
    GPUModelRunner.execute_model = execute_model


def _given_up(dead: list[str]) -> Any:
    from vllm.v1.outputs import ModelRunnerOutput

    output = ModelRunnerOutput(req_ids=[], req_id_to_index={})
    # In its dict, so that it goes along to the scheduler's process.
    setattr(output, _DEAD, dead)
    return output


def _attention_layers(runner: Any) -> list[Any]:
    layers = runner.compilation_config.static_forward_context.values()
    return [layer for layer in layers if hasattr(layer, "impl")]


def _why_not(runner: Any, layers: list[Any]) -> str | None:
    """Why a step of this runner may not be given up; None where it may."""
    config = runner.vllm_config
    parallel = config.parallel_config
    if parallel.world_size > 1 or parallel.data_parallel_size > 1:
        return "several workers, who must all do the same"
    if config.scheduler_config.async_scheduling:
        return "asynchronous scheduling, which plans the next step meanwhile"
    if config.speculative_config is not None:
        return "speculative decoding"
    if config.kv_transfer_config is not None:
        return "a connector, which is told of each step"
    if len(layers) < len(runner.compilation_config.static_forward_context) or not layers:
        return "layers that keep a state and cannot be run twice"
    if not all(hasattr(layer.impl, "forward") for layer in layers):
        return "attention of another kind"
    return None
