"""Triton's own metrics of its models, under Triton's names.

They are written as text here: prometheus-client would append ``_total`` to the name of
every counter, and Triton's have none. A request that was cancelled counts as a failure with
the reason ``CANCELED``, which Triton has a place for and never fills.

Source: Triton's metrics page, "Inference Request Metrics".
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

from disconnect_watch.backends.statistics import ModelStatistics

__all__ = ["render_models"]

_REASONS = ("REJECTED", "CANCELED", "BACKEND", "OTHER")

#: Name, what it is, how it is read; durations in microseconds.
_COUNTERS: tuple[tuple[str, str, Callable[[ModelStatistics], int]], ...] = (
    (
        "nv_inference_request_success",
        "Number of successful inference requests, all batch sizes",
        lambda of: of.success.count,
    ),
    (
        "nv_inference_count",
        "Number of inferences performed (does not include cached requests)",
        lambda of: of.inference_count,
    ),
    (
        "nv_inference_exec_count",
        "Number of model executions performed (does not include cached requests)",
        lambda of: of.execution_count,
    ),
    (
        "nv_inference_request_duration_us",
        "Cumulative inference request duration in microseconds (includes cached requests)",
        lambda of: of.success.ns // 1000,
    ),
    (
        "nv_inference_queue_duration_us",
        "Cumulative inference queuing duration in microseconds (includes cached requests)",
        lambda of: of.queue.ns // 1000,
    ),
    (
        "nv_inference_compute_input_duration_us",
        "Cumulative compute input duration in microseconds (does not include cached requests)",
        lambda of: of.compute_input.ns // 1000,
    ),
    (
        "nv_inference_compute_infer_duration_us",
        "Cumulative compute inference duration in microseconds (does not include cached requests)",
        lambda of: of.compute_infer.ns // 1000,
    ),
    (
        "nv_inference_compute_output_duration_us",
        "Cumulative inference compute output duration in microseconds "
        "(does not include cached requests)",
        lambda of: of.compute_output.ns // 1000,
    ),
)
_GAUGES: tuple[tuple[str, str, Callable[[ModelStatistics], float]], ...] = (
    (
        "nv_inference_pending_request_count",
        "Instantaneous number of pending requests awaiting execution per-model.",
        lambda of: of.num_pending,
    ),
    (
        "nv_model_load_duration_secs",
        "Model load time in seconds",
        lambda of: of.load_seconds,
    ),
)


def render_models(statistics: Sequence[ModelStatistics]) -> bytes:
    """The metrics of models in Prometheus' text format."""
    if not statistics:
        return b""
    lines: list[str] = []
    for name, documentation, counter in _COUNTERS:
        lines += _head(name, documentation, "counter")
        lines += (f"{name}{{{_labels(of)}}} {counter(of)}" for of in statistics)
    name = "nv_inference_request_failure"
    lines += _head(name, "Number of failed inference requests, all batch sizes", "counter")
    lines += _failures(name, statistics)
    for name, documentation, gauge in _GAUGES:
        lines += _head(name, documentation, "gauge")
        lines += (f"{name}{{{_labels(of)}}} {gauge(of)}" for of in statistics)
    return ("\n".join(lines) + "\n").encode()


def _head(name: str, documentation: str, kind: str) -> tuple[str, str]:
    return f"# HELP {name} {documentation}", f"# TYPE {name} {kind}"


def _failures(name: str, statistics: Iterable[ModelStatistics]) -> Iterator[str]:
    for of in statistics:
        for reason in _REASONS:
            # Every reason is there from the start, so that a rate over the first one is right.
            count = of.failures.get(reason, 0)
            yield f'{name}{{{_labels(of)},reason="{reason}"}} {count}'


def _labels(of: ModelStatistics) -> str:
    return f'model="{_escape(of.name)}",version="{_escape(of.version)}"'


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
