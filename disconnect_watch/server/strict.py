"""A model's counters as Triton's would stand, for ``--strict``.

Triton goes on with a request over HTTP whose client has left, and counts it a success:
``failure{reason="CANCELED"}`` stays 0, and so does ``response_stats[].cancel``.

Source: a real Triton whose clients left, its metrics and statistics afterwards.
"""

from dataclasses import replace

from disconnect_watch.backends.statistics import Duration, ModelStatistics, ResponseStatistics

__all__ = ["counted_as_triton"]


def counted_as_triton(of: ModelStatistics) -> ModelStatistics:
    """A copy in which what was cancelled is among the successes.

    A request that a model itself failed with the code CANCELLED stays a failure.
    """
    num_cancelled = of.cancel.count
    if not num_cancelled:
        return of
    failures = dict(of.failures)
    if failures:  # an engine's are not told apart
        failures["CANCELED"] -= num_cancelled
    return replace(
        of,
        success=_sum(of.success, of.cancel),
        cancel=Duration(),
        failures=failures,
        responses={index: _response(each) for index, each in of.responses.items()},
        # Triton has as many of each as successes; what was not computed took no time.
        queue=_sum(of.queue, Duration(num_cancelled)),
        compute_input=_sum(of.compute_input, Duration(num_cancelled)),
        compute_infer=_sum(of.compute_infer, Duration(num_cancelled)),
        compute_output=_sum(of.compute_output, Duration(num_cancelled)),
    )


def _response(of: ResponseStatistics) -> ResponseStatistics:
    return replace(of, success=_sum(of.success, of.cancel), cancel=Duration())


def _sum(a: Duration, b: Duration) -> Duration:
    return Duration(a.count + b.count, a.ns + b.ns)
