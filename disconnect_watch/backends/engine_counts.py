"""An engine's counters in the form of a model's statistics."""

from disconnect_watch.backends.base import Backend
from disconnect_watch.backends.statistics import ModelStatistics

__all__ = ["engine_statistics"]


def engine_statistics(engine: Backend) -> ModelStatistics:
    """What of an engine's counters has a place there; times are in its metrics alone."""
    statistics = ModelStatistics(engine.name, engine.version)
    stats = engine.stats()
    statistics.execution_count = stats.num_steps
    statistics.num_pending = stats.num_waiting
    for (kind, _), count in stats.outcomes.items():
        if kind == "finished":
            statistics.success.count += count
        elif kind == "cancelled":
            statistics.cancel.count += count
        else:
            statistics.fail.count += count
    statistics.failures = {"CANCELED": statistics.cancel.count, "BACKEND": statistics.fail.count}
    statistics.inference_count = statistics.queue.count = statistics.success.count
    for computed in (
        statistics.compute_input,
        statistics.compute_infer,
        statistics.compute_output,
    ):
        computed.count = statistics.success.count
    return statistics
