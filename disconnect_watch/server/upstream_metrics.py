"""The ``dw_upstream_*`` metrics: how the servers behind this one are."""

from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from disconnect_watch.backends.models import UpstreamStats

__all__ = ["UpstreamMetrics"]

#: All are there from the start, as 0, so that a rate over the first event is right.
_OUTCOMES = ("finished", "cancelled", "failed")


class UpstreamMetrics(Collector):
    """Turns what is known of upstreams into metric families, at scrape time.

    Threads: those that ``upstreams`` allows.
    """

    def __init__(self, upstreams: Callable[[], Sequence[UpstreamStats]]) -> None:
        self._upstreams = upstreams

    def collect(self) -> Iterator[Metric]:
        """Every family, with a line for each upstream."""
        ready = GaugeMetricFamily(
            "dw_upstream_ready", "Whether the server says that it is ready", labels=["upstream"]
        )
        outstanding = GaugeMetricFamily(
            "dw_upstream_outstanding",
            "Requests that the server has not answered",
            labels=["upstream"],
        )
        requests = CounterMetricFamily(
            "dw_upstream_requests_total",
            "Requests that ended there, by their outcome",
            labels=["upstream", "outcome"],
        )
        for upstream in self._upstreams():
            ready.add_metric([upstream.name], upstream.is_ready)
            outstanding.add_metric([upstream.name], upstream.num_outstanding)
            for outcome in _OUTCOMES:
                count = upstream.outcomes.get(outcome, 0)
                requests.add_metric([upstream.name, outcome], count)
        yield from (ready, outstanding, requests)
