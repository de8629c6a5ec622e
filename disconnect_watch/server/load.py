"""How full an engine is, in the head of an answer, for proxies that balance by it.

Asked for by ``endpoint-load-metrics-format: text`` or ``json``, as Triton, vLLM and Envoy do.

Source: ORCA (Open Request Cost Aggregation), Triton's "ORCA Header Metrics".
"""

from disconnect_watch.backends import Backend
from disconnect_watch.server.documents import encode

__all__ = ["ASKED_BY", "load_headers"]

ASKED_BY = "endpoint-load-metrics-format"


def load_headers(asked: str | None, engine: Backend) -> dict[str, str]:
    """The header that was asked for; nothing for a format that there is not.

    Args:
        asked: the value of ``ASKED_BY``, None where the request has none.
    """
    form = (asked or "").lower()
    if form not in ("text", "json"):
        return {}
    stats = engine.stats()
    taken = stats.num_blocks_used + stats.num_blocks_retained
    metrics: dict[str, float] = {
        "kv_cache_utilization": round(taken / stats.num_blocks, 4),
        "num_requests_waiting": stats.num_waiting,
    }
    if form == "json":
        value = "JSON " + encode({"named_metrics": metrics}).decode()
    else:
        value = "TEXT " + ", ".join(f"named_metrics.{name}={of}" for name, of in metrics.items())
    return {"endpoint-load-metrics": value}
