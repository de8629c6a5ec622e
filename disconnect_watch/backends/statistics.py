"""What a model has done, counted as Triton's statistics extension counts it.

Source: Triton's statistics extension. A request is counted in exactly one of success,
fail and cancel.
"""

from dataclasses import dataclass, field

__all__ = ["BatchStatistics", "Duration", "IndexEntry", "ModelStatistics", "ResponseStatistics"]


@dataclass(slots=True)
class Duration:
    """How often something happened, and how long it took in all."""

    count: int = 0
    ns: int = 0

    def add(self, ns: int, count: int = 1) -> None:
        """Count it, with the time that it took together."""
        self.count += count
        self.ns += ns


@dataclass(slots=True)
class ResponseStatistics:
    """Of the responses with one index, among those of a request."""

    compute_infer: Duration = field(default_factory=Duration)
    compute_output: Duration = field(default_factory=Duration)
    success: Duration = field(default_factory=Duration)
    fail: Duration = field(default_factory=Duration)
    empty_response: Duration = field(default_factory=Duration)
    cancel: Duration = field(default_factory=Duration)


@dataclass(slots=True)
class BatchStatistics:
    """Of the executions with one batch size; each count is a number of executions."""

    compute_input: Duration = field(default_factory=Duration)
    compute_infer: Duration = field(default_factory=Duration)
    compute_output: Duration = field(default_factory=Duration)


@dataclass(slots=True)
class ModelStatistics:
    """Of one version of a model. It goes on counting: read it, don't keep it.

    Attributes:
        last_inference_ms: milliseconds since the epoch of the last request; 0 for none.
        inference_count: requests that were worked on, a batch of n as n.
        execution_count: how often the model was called.
        success, fail, cancel: requests by outcome, with their time from arrival to end.
        queue: time of the successful requests until the model got them.
        failures: those that failed or were cancelled, by ``REJECTED``, ``CANCELED``,
            ``BACKEND`` and ``OTHER``, as Triton's metrics spell them.
        responses: by index, of models with any number of responses.
        batches: by batch size.
        num_pending: requests that wait now.
        load_seconds: how long the model took to load.
    """

    name: str
    version: str
    last_inference_ms: int = 0
    inference_count: int = 0
    execution_count: int = 0
    success: Duration = field(default_factory=Duration)
    fail: Duration = field(default_factory=Duration)
    cancel: Duration = field(default_factory=Duration)
    queue: Duration = field(default_factory=Duration)
    compute_input: Duration = field(default_factory=Duration)
    compute_infer: Duration = field(default_factory=Duration)
    compute_output: Duration = field(default_factory=Duration)
    cache_hit: Duration = field(default_factory=Duration)
    cache_miss: Duration = field(default_factory=Duration)
    failures: dict[str, int] = field(default_factory=dict)
    responses: dict[int, ResponseStatistics] = field(default_factory=dict)
    batches: dict[int, BatchStatistics] = field(default_factory=dict)
    num_pending: int = 0
    load_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """One line of a repository's index.

    Attributes:
        version, state, reason: None for a model that was never loaded.
        state: ``READY``, ``UNAVAILABLE``, ``LOADING`` or ``UNLOADING``.
    """

    name: str
    version: str | None = None
    state: str | None = None
    reason: str | None = None
