"""What a node keeps for others, as metrics."""

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from disconnect_watch.disagg import ReleaseKind, RetainedStats

__all__ = ["TransferMetrics"]


class TransferMetrics(Collector):
    """Turns a store's ``stats`` into metric families, at scrape time.

    The blocks themselves are in ``dw_kv_blocks{state="retained"}``, with those that a step may
    still touch.
    """

    def __init__(self, stats: Callable[[], RetainedStats]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        yield GaugeMetricFamily(
            "dw_kv_transfers", "Prompts that are kept for decode nodes now", stats.num_transfers
        )
        yield GaugeMetricFamily("dw_kv_retained_blocks", "Blocks that these have", stats.num_blocks)
        yield GaugeMetricFamily(
            "dw_kv_pinned_blocks", "Of these, those that are being copied", stats.num_pinned_blocks
        )
        yield GaugeMetricFamily(
            "dw_kv_tombstones",
            "Releases whose request has not come yet",
            stats.num_tombstones,
        )
        leases = GaugeMetricFamily(
            "dw_kv_leases", "Transfers that are at most so many seconds old", labels=["le"]
        )
        for seconds, count in stats.leases_by_age:
            leases.add_metric(["+Inf" if seconds == float("inf") else f"{seconds:g}"], count)
        yield leases
        released = CounterMetricFamily(
            "dw_kv_released_total",
            "Transfers by what let them go: the decode node, an abort, the lease",
            labels=["kind"],
        )
        for kind in ReleaseKind:
            released.add_metric([kind.value], stats.num_released.get(kind, 0))
        yield released
        yield CounterMetricFamily(
            "dw_kv_block_seconds_total",
            "For how long blocks were kept, summed over them",
            stats.block_ns / 1e9,
        )
        yield CounterMetricFamily(
            "dw_kv_stranded_block_seconds_total",
            "Of these, for how long nobody wanted them any more",
            stats.stranded_block_ns / 1e9,
        )
