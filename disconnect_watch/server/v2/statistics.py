"""Triton's statistics extension, with its count of responses that were cancelled."""

from collections.abc import Iterable
from typing import Any

from disconnect_watch.backends.engine_counts import engine_statistics
from disconnect_watch.backends.statistics import (
    BatchStatistics,
    Duration,
    ModelStatistics,
    ResponseStatistics,
)
from disconnect_watch.server.errors import ModelNotFoundError, ProtocolError
from disconnect_watch.server.strict import counted_as_triton
from disconnect_watch.server.v2.call import Answer, Call, json_answer
from disconnect_watch.server.v2.models import engine_of

__all__ = ["all_statistics", "model_statistics"]


async def all_statistics(call: Call) -> Answer:
    """Of every version of every model."""
    frontend = call.frontend
    of_engines = map(engine_statistics, frontend.backends.values())
    found = frontend.models.statistics() if frontend.models else ()
    # An engine of a repository is both.
    of_models = (each for each in found if each.name not in frontend.backends)
    return _answer(call, (*of_models, *of_engines))


async def model_statistics(call: Call) -> Answer:
    """Of one model, or of one version of it."""
    name = call.path["model"]
    try:
        engine = engine_of(call)
    except ModelNotFoundError:
        raise ProtocolError(
            f"requested model version is not available for model '{name}'"
        ) from None
    if engine is not None:
        return _answer(call, [engine_statistics(engine)])
    models = call.frontend.models
    if models is None:
        raise ProtocolError(f"requested model '{name}' is not available")
    return _answer(call, models.statistics(name, call.path["version"]))


def _answer(call: Call, statistics: Iterable[ModelStatistics]) -> Answer:
    if call.frontend.options.strict:
        statistics = map(counted_as_triton, statistics)
    return json_answer({"model_stats": [_model(each) for each in statistics]})


def _model(of: ModelStatistics) -> dict[str, Any]:
    return {
        "name": of.name,
        "version": of.version,
        "last_inference": of.last_inference_ms,
        "inference_count": of.inference_count,
        "execution_count": of.execution_count,
        "inference_stats": {
            "success": _duration(of.success),
            # Triton has no place for cancelled requests but among those that failed.
            "fail": {
                "count": of.fail.count + of.cancel.count,
                "ns": of.fail.ns + of.cancel.ns,
            },
            "queue": _duration(of.queue),
            "compute_input": _duration(of.compute_input),
            "compute_infer": _duration(of.compute_infer),
            "compute_output": _duration(of.compute_output),
            "cache_hit": _duration(of.cache_hit),
            "cache_miss": _duration(of.cache_miss),
        },
        "response_stats": {
            str(index): _response(each) for index, each in sorted(of.responses.items())
        },
        "batch_stats": [_batch(size, each) for size, each in sorted(of.batches.items())],
        "memory_usage": [],
    }


def _response(of: ResponseStatistics) -> dict[str, Any]:
    return {
        "compute_infer": _duration(of.compute_infer),
        "compute_output": _duration(of.compute_output),
        "success": _duration(of.success),
        "fail": _duration(of.fail),
        "empty_response": _duration(of.empty_response),
        "cancel": _duration(of.cancel),
    }


def _batch(size: int, of: BatchStatistics) -> dict[str, Any]:
    return {
        "batch_size": size,
        "compute_input": _duration(of.compute_input),
        "compute_infer": _duration(of.compute_infer),
        "compute_output": _duration(of.compute_output),
    }


def _duration(duration: Duration) -> dict[str, int]:
    return {"count": duration.count, "ns": duration.ns}
