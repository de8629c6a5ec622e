"""The statistics of several Tritons, added up."""

from typing import Any

from disconnect_watch.backends.statistics import (
    BatchStatistics,
    Duration,
    ModelStatistics,
    ResponseStatistics,
)

__all__ = ["added"]

_OF_REQUESTS = (
    "success",
    "fail",
    "queue",
    "compute_input",
    "compute_infer",
    "compute_output",
    "cache_hit",
    "cache_miss",
)
_OF_RESPONSES = (
    "compute_infer",
    "compute_output",
    "success",
    "fail",
    "empty_response",
    "cancel",
)
_OF_BATCHES = ("compute_input", "compute_infer", "compute_output")


def added(sums: ModelStatistics, message: Any) -> ModelStatistics:
    """Add a ``ModelStatistics`` message to the sums of the same model, and return these.

    What was cancelled is among what failed, or succeeded: Triton does not tell.
    """
    sums.last_inference_ms = max(sums.last_inference_ms, message.last_inference)
    sums.inference_count += message.inference_count
    sums.execution_count += message.execution_count
    _add(sums, message.inference_stats, _OF_REQUESTS)
    for index, response in message.response_stats.items():
        _add(sums.responses.setdefault(int(index), ResponseStatistics()), response, _OF_RESPONSES)
    for batch in message.batch_stats:
        _add(sums.batches.setdefault(batch.batch_size, BatchStatistics()), batch, _OF_BATCHES)
    return sums


def _add(sums: Any, message: Any, names: tuple[str, ...]) -> None:
    for name in names:
        duration: Duration = getattr(sums, name)
        more = getattr(message, name)
        duration.add(more.ns, more.count)
