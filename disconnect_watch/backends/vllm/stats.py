"""What vLLM tells of its engine, in our words."""

from collections import Counter
from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase

from disconnect_watch.engine import EngineStats, Outcome

__all__ = ["Gauges"]


class Gauges(StatLoggerBase):  # type: ignore[misc] # without vLLM it is Any
    """Takes vLLM's numbers after each step, and counts what we see ourselves.

    vLLM does not tell of its cached blocks: they count as free, as it counts them itself.
    """

    def __init__(self, vllm_config: Any = None, engine_index: int = 0) -> None:
        self.config = vllm_config
        self.num_requests = 0
        self.outcomes: Counter[tuple[str, Any]] = Counter()
        self._num_steps = self._num_prompt = self._num_generated = self._num_preemptions = 0
        self._num_cached = 0
        self._scheduler: Any = None

    def record(self, scheduler_stats: Any, iteration_stats: Any, *args: Any, **kwargs: Any) -> None:
        """Called by vLLM, once a step."""
        self._num_steps += 1
        self._scheduler = scheduler_stats or self._scheduler
        if iteration_stats is not None:
            self._num_preemptions += iteration_stats.num_preempted_reqs

    def log_engine_initialized(self) -> None:
        """Called by vLLM."""

    def count(self, outcome: Outcome) -> None:
        """A request has ended."""
        self.outcomes[outcome.kind, outcome.phase] += 1
        self._num_prompt += outcome.num_prompt_tokens
        self._num_cached += outcome.num_cached_tokens
        self._num_generated += outcome.num_generated_tokens

    def stats(self) -> EngineStats:
        """The numbers of now. Threads: any."""
        scheduler, cache = self._scheduler, getattr(self.config, "cache_config", None)
        num_blocks = getattr(cache, "num_gpu_blocks", None) or 0
        usage = 0.0 if scheduler is None else scheduler.kv_cache_usage
        num_used = min(num_blocks, round(usage * num_blocks))
        return EngineStats(
            num_waiting=0 if scheduler is None else scheduler.num_waiting_reqs,
            num_running=0 if scheduler is None else scheduler.num_running_reqs,
            num_blocks=num_blocks,
            num_blocks_used=num_used,
            num_blocks_cached=0,
            num_blocks_free=num_blocks - num_used,
            num_blocks_retained=0,
            num_steps=self._num_steps,
            num_requests=self.num_requests,
            num_preemptions=self._num_preemptions,
            num_prompt_tokens=self._num_prompt,
            num_cached_tokens=self._num_cached,
            num_generated_tokens=self._num_generated,
            num_wasted_tokens=0,
            stale_events={},
            outcomes=dict(self.outcomes),
            arithmetic="vllm",
        )
