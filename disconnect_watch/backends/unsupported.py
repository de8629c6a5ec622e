"""Fields of a configuration that have no effect here.

A field that would change what a model computes, or what its requests see, is refused; one
that only says how fast, or how much of the machine it takes, is passed over and told.
"""

from collections.abc import Iterable, Iterator
from typing import Any

__all__ = ["passed_over", "refused"]

_REFUSED = {
    "batch_input": "Python models make them themselves",
    "batch_output": "Python models make them themselves",
    "input.is_shape_tensor": "it is TensorRT's",
    "output.is_shape_tensor": "it is TensorRT's",
    "instance_group.passive": "each instance is given requests",
    "instance_group.secondary_devices": "an instance has one device",
    "model_operations.op_library_filename": "Python models import what they need",
    "model_repository_agents.agents": "nothing is done to a model's files before they are loaded",
    "sequence_batching.iterative_sequence": "a request is not scheduled again",
    "sequence_batching.state": "Python models keep their state themselves, by correlation id",
}
_PASSED_OVER = {
    "cc_model_filenames": "the default file is run on every device",
    "dynamic_batching.preserve_ordering": "over HTTP each request has a response of its own",
    "instance_group.host_policy": "processes run where the system puts them",
    "instance_group.profile": "it is TensorRT's",
    "instance_group.rate_limiter": "there is no rate limiter",
    "model_metrics": "histograms are not configured",
    "optimization.cuda": "Python models do this themselves",
    "optimization.execution_accelerators": "Python models do this themselves",
    "optimization.graph": "Python models do this themselves",
    "response_cache.enable": "there is no response cache",
    "sequence_batching.direct.max_queue_delay_microseconds": "a batch of sequences does not wait",
    "sequence_batching.direct.minimum_slot_utilization": "a batch of sequences does not wait",
    "sequence_batching.oldest.max_queue_delay_microseconds": "a batch of sequences does not wait",
    "sequence_batching.oldest.preferred_batch_size": "a batch of sequences does not wait",
    "sequence_batching.oldest.preserve_ordering": "over HTTP each request has its own response",
}
_PASSED_OVER_PARAMETERS = {
    "EXECUTION_ENV_PATH": "processes run the server's own interpreter",
    "TRITON_BATCH_STRATEGY_PATH": "batches are formed by the server alone",
}


def refused(config: Any) -> Iterator[str]:
    """Why a configuration can't be served: a field each, and the reason."""
    yield from _found(config, _REFUSED)
    if config.platform == "ensemble" and any(
        tensor.HasField("reshape") for tensor in (*config.input, *config.output)
    ):
        yield "reshape: an ensemble passes tensors on as they are"


def passed_over(config: Any) -> Iterator[str]:
    """What of a configuration has no effect: a field each, and the reason."""
    yield from _found(config, _PASSED_OVER)
    for name, why in _PASSED_OVER_PARAMETERS.items():
        if name in config.parameters:
            yield f"parameters.{name}: {why}"


def _found(config: Any, fields: dict[str, str]) -> Iterator[str]:
    for path, why in fields.items():
        if _is_set(config, path.split(".")):
            yield f"{path}: {why}"


def _is_set(message: Any, path: list[str]) -> bool:
    """Whether a field somewhere below a message, or below one of several, says anything."""
    name, *rest = path
    given = {field.name: value for field, value in message.ListFields()}
    if name not in given:
        return False
    if not rest:
        return True
    below = given[name]
    messages: Iterable[Any] = (below,) if hasattr(below, "ListFields") else below
    return any(_is_set(each, rest) for each in messages)
