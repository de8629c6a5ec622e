"""The ``dw_*`` metrics: read from the watcher and the engine when somebody asks.

A request costs nothing here. Counters and gauges are the engine's and the watcher's
own, copied at the scrape; only the three histograms are fed as it goes, once per
cancelled request, on the engine's thread.
"""

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import get_args

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from disconnect_watch.backends.models import UpstreamStats
from disconnect_watch.backends.statistics import ModelStatistics
from disconnect_watch.engine import EngineStats, Outcome
from disconnect_watch.engine.outcome import Phase
from disconnect_watch.server.frontend import FrontendStats
from disconnect_watch.server.model_metrics import render_models
from disconnect_watch.server.upstream_metrics import UpstreamMetrics
from disconnect_watch.token import Reason
from disconnect_watch.watcher import WatcherStats

__all__ = ["CONTENT_TYPE", "Metrics"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

#: How many requests ended so, by kind and phase.
Outcomes = Mapping[tuple[str, Phase | None], int]

#: A finished request has sampled its last token; the engine names no phase for it.
OUTCOMES = (
    ("finished", "decode"),
    *((kind, phase) for kind in ("cancelled", "failed") for phase in get_args(Phase)),
)

#: Seconds. From a flag check in a busy loop to a whole prefill on a slow CPU.
BUCKETS = (
    *(mantissa * 10.0**exponent for exponent in range(-5, 0) for mantissa in (1.0, 2.5, 5.0)),
    1.0,
    2.5,
    5.0,
)


class Metrics:
    """The registry of one application; two applications in a process do not mix.

    Args:
        engine: reads the engine's counters; None where there is no engine.
        watcher: reads the watcher's; None in the process of an engine alone, as of ``frontend``.
        frontend: counts the requests that are cancelled and not ended.
        models: reads what models that take tensors have done.
        upstreams: reads how the servers behind this one are; None where there are none.
        outcomes: reads how requests ended that no engine worked on, by kind and phase.
        signals: reads how often requests were asked to end by other means than their
            connections.
        gather: renders those of several processes; None where this is the only one.

    Threads: ``observe`` from any, ``render`` from those that the three readers allow.
    """

    def __init__(
        self,
        *,
        engine: Callable[[], EngineStats | None] | None,
        watcher: Callable[[], WatcherStats] | None,
        frontend: Callable[[], FrontendStats] | None,
        models: Callable[[], Sequence[ModelStatistics]] = tuple,
        upstreams: Callable[[], Sequence[UpstreamStats]] | None = None,
        outcomes: Callable[[], Outcomes] = dict,
        signals: Callable[[], Mapping[Reason, int]] = dict,
        gather: Callable[[], Awaitable[bytes]] | None = None,
    ) -> None:
        self._models = models
        self._gather = gather
        self.registry = CollectorRegistry()
        self._detect = self._histogram(
            "dw_detect_seconds",
            "From the cancel flag being stored to the engine's first look that saw it",
        )
        self._drop = self._histogram(
            "dw_cancel_to_drop_seconds",
            "From the cancel flag being stored to the request being out of the batch",
        )
        self._free = self._histogram(
            "dw_cancel_to_free_seconds",
            "From the cancel flag being stored to the request's KV blocks being free",
        )
        self.registry.register(Snapshot(engine, watcher, frontend, outcomes, signals))
        if upstreams is not None:
            self.registry.register(UpstreamMetrics(upstreams))

    def _histogram(self, name: str, documentation: str) -> Histogram:
        return Histogram(name, documentation, buckets=BUCKETS, registry=self.registry)

    def observe(self, request_id: str, outcome: Outcome) -> None:
        """Put a cancelled request's delays into the histograms; others have none."""
        if outcome.kind != "cancelled" or not outcome.flag_at_ns:
            return
        for histogram, at_ns in (
            (self._detect, outcome.seen_at_ns),
            (self._drop, outcome.dropped_at_ns),
            (self._free, outcome.freed_at_ns),
        ):
            histogram.observe(max(0, at_ns - outcome.flag_at_ns) / 1e9)

    async def text(self) -> bytes:
        """What a scrape is answered: ``render``, of all processes together if there are several."""
        return self.render() if self._gather is None else await self._gather()

    def render(self) -> bytes:
        """Everything in Prometheus' text format, of type ``CONTENT_TYPE``."""
        return generate_latest(self.registry) + render_models(self._models())


class Snapshot(Collector):
    """Turns the two ``stats()`` into metric families, at scrape time.

    Every combination of labels is there from the start, as 0, so that a rate over
    the first event is right.
    """

    def __init__(
        self,
        engine: Callable[[], EngineStats | None] | None,
        watcher: Callable[[], WatcherStats] | None,
        frontend: Callable[[], FrontendStats] | None,
        outcomes: Callable[[], Outcomes],
        signals: Callable[[], Mapping[Reason, int]],
    ) -> None:
        self._engine = engine
        self._watcher = watcher
        self._frontend = frontend
        self._outcomes = outcomes
        self._signals = signals

    def collect(self) -> Iterator[Metric]:
        stats = self._engine() if self._engine is not None else None
        num_stale = 0 if stats is None else stats.num_stale_events
        if self._watcher is None:
            yield _stale_metric(num_stale)
        else:
            yield from self._watcher_metrics(self._watcher(), num_stale_of_engine=num_stale)
        yield self._request_metric({} if stats is None else stats.outcomes)
        if stats is not None:
            yield from self._engine_metrics(stats)
        if self._frontend is not None:
            yield from self._frontend_metrics(self._frontend())

    def _frontend_metrics(self, frontend: FrontendStats) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "dw_unacked_cancels",
            "Requests whose cancel flag is set and whose outcome is not known yet",
            frontend.num_unacked,
        )
        yield GaugeMetricFamily(
            "dw_overdue_cancels",
            "Cancels that have had no effect within their bound; the server is not ready",
            frontend.num_overdue,
        )
        yield CounterMetricFamily(
            "dw_late_cancels_total",
            "Cancels that had their effect, and had it behind their bound",
            frontend.num_late,
        )

    def _watcher_metrics(
        self, stats: WatcherStats, *, num_stale_of_engine: int
    ) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "dw_connections", "Connections that are watched now", stats.num_connections
        )
        yield GaugeMetricFamily(
            "dw_watches_armed", "Requests whose connection is watched now", stats.num_armed
        )
        signals = CounterMetricFamily(
            "dw_signals_total",
            "Connections that ended, idle ones too, by the source that told first; and requests "
            "that were asked to end otherwise",
            labels=["source"],
        )
        asked = self._signals()
        for reason, count in stats.num_signals.items():
            signals.add_metric([reason.value], count + asked.get(reason, 0))
        yield signals
        yield _stale_metric(stats.num_stale_events + num_stale_of_engine)
        yield GaugeMetricFamily(
            "dw_blind_connections",
            "Connections whose unread bytes hide a disconnect from the poller",
            stats.num_blind,
        )

    def _request_metric(self, of_engine: Outcomes) -> Metric:
        requests = CounterMetricFamily(
            "dw_requests_total",
            "Requests by their one final outcome and the phase it came in",
            labels=["outcome", "phase"],
        )
        counts = dict.fromkeys(OUTCOMES, 0)
        for outcomes in (of_engine, self._outcomes()):
            for (kind, phase), count in outcomes.items():
                counts[kind, phase or "decode"] += count
        for labels, count in counts.items():
            requests.add_metric(labels, count)
        return requests

    def _engine_metrics(self, stats: EngineStats) -> Iterator[Metric]:
        yield _gauges(
            "dw_requests",
            "Requests in the engine now",
            "state",
            {"waiting": stats.num_waiting, "running": stats.num_running},
        )
        yield _gauges(
            "dw_kv_blocks",
            "KV cache blocks now",
            "state",
            {
                "used": stats.num_blocks_used,
                "cached": stats.num_blocks_cached,
                "free": stats.num_blocks_free,
                "retained": stats.num_blocks_retained,
            },
        )
        tokens = CounterMetricFamily(
            "dw_tokens_total",
            "Tokens computed: of prompts, generated, and computed for a request already cancelled",
            labels=["kind"],
        )
        tokens.add_metric(["prompt"], stats.num_prompt_tokens)
        tokens.add_metric(["generated"], stats.num_generated_tokens)
        tokens.add_metric(["wasted"], stats.num_wasted_tokens)
        yield tokens


def _stale_metric(count: int) -> Metric:
    return CounterMetricFamily(
        "dw_stale_events_total",
        "What came too late and was dropped: kernel events of connections that were detached "
        "before; aborts, tokens, errors and acks of requests that had ended",
        count,
    )


def _gauges(name: str, documentation: str, label: str, values: dict[str, int]) -> Metric:
    family = GaugeMetricFamily(name, documentation, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family
