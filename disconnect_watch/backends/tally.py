"""Counting what becomes of requests, each exactly once."""

import time

from disconnect_watch.backends.infer import InferResponse
from disconnect_watch.backends.pending import Pending
from disconnect_watch.backends.statistics import (
    BatchStatistics,
    ModelStatistics,
    ResponseStatistics,
)

__all__ = ["Tally"]


class Tally:
    """Keeps a model's statistics.

    Threads: the loop's only.
    """

    def __init__(self, statistics: ModelStatistics) -> None:
        self._statistics = statistics

    def executed(self, batch: list[Pending], started_ns: int, ended_ns: int) -> None:
        """The model was called."""
        for pending in batch:
            pending.started_ns = started_ns
            pending.ended_ns = ended_ns
        statistics = self._statistics
        now_ns = time.monotonic_ns()
        size = sum(pending.batch_size for pending in batch)
        statistics.execution_count += 1
        statistics.inference_count += size
        statistics.last_inference_ms = time.time_ns() // 1_000_000
        of_size = statistics.batches.get(size)
        if of_size is None:
            of_size = statistics.batches[size] = BatchStatistics()
        of_size.compute_input.add(started_ns - batch[0].dispatched_ns)
        of_size.compute_infer.add(ended_ns - started_ns)
        of_size.compute_output.add(now_ns - ended_ns)

    def response(self, pending: Pending, response: InferResponse) -> None:
        """One of any number of responses has come."""
        index = pending.num_responses
        pending.num_responses += 1
        one = self._statistics.responses.get(index)
        if one is None:
            one = self._statistics.responses[index] = ResponseStatistics()
        took_ns = time.monotonic_ns() - (pending.started_ns or pending.dispatched_ns)
        if response.error is not None:
            one.fail.add(took_ns)
        elif not response.outputs:
            one.empty_response.add(took_ns)
        else:
            one.compute_infer.add(took_ns)
            one.compute_output.add(0)
            one.success.add(took_ns)

    def success(self, pending: Pending) -> None:
        """It was answered."""
        pending.outcome = "success"
        statistics = self._statistics
        now_ns = time.monotonic_ns()
        started_ns = pending.started_ns or pending.dispatched_ns
        ended_ns = pending.ended_ns or now_ns
        statistics.success.add(now_ns - pending.arrived_ns)
        statistics.queue.add(pending.dispatched_ns - pending.arrived_ns)
        statistics.compute_input.add(started_ns - pending.dispatched_ns)
        statistics.compute_infer.add(ended_ns - started_ns)
        statistics.compute_output.add(now_ns - ended_ns)

    def fail(self, pending: Pending, why: str) -> None:
        """It was refused or failed."""
        pending.outcome = "fail"
        self._statistics.fail.add(time.monotonic_ns() - pending.arrived_ns)
        self._count_failure(why)

    def cancel(self, pending: Pending) -> None:
        """It was cancelled; the response that it would have had next was, too."""
        pending.outcome = "cancel"
        took_ns = time.monotonic_ns() - pending.arrived_ns
        self._statistics.cancel.add(took_ns)
        one = self._statistics.responses.setdefault(pending.num_responses, ResponseStatistics())
        one.cancel.add(took_ns)
        self._count_failure("CANCELED")

    def _count_failure(self, why: str) -> None:
        failures = self._statistics.failures
        failures[why] = failures.get(why, 0) + 1
