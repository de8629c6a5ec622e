"""What the engine tells about itself: a record of each step, and its numbers so far.

In records of steps, the second and later answers to a request ``"id"`` are ``"id#1"`` and so on.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from disconnect_watch.engine.outcome import Phase

__all__ = ["Counts", "EngineStats", "StaleEvent", "StepNotes", "StepRecord"]

StaleEvent = Literal["abort", "token", "error", "ack"]


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What one step did, in the order of these fields.

    Attributes:
        step: its number, from 1.
        aborted: requests that were found cancelled before anything was scheduled.
        preempted: requests that went back to the queue.
        scheduled: number of tokens planned, by request.
        layer_tokens: number of tokens that each layer computed; fewer entries than the model has
            layers if every row died on the way.
        dropped: requests that left within the forward, with the layer before which that was
            seen. One of few tokens is computed to the end with others, and nothing made of it.
        withheld: requests that were found cancelled when the forward had returned.
        finished, failed: requests that ended so.
        freed_block_ids: every block that went back to the pool since the record before.
    """

    step: int
    aborted: tuple[str, ...]
    preempted: tuple[str, ...]
    scheduled: Mapping[str, int]
    layer_tokens: tuple[int, ...]
    dropped: Mapping[str, int]
    withheld: tuple[str, ...]
    finished: tuple[str, ...]
    failed: tuple[str, ...]
    freed_block_ids: tuple[int, ...]


@dataclass(slots=True)
class StepNotes:
    """What a step notes down on its way to a ``StepRecord``, which explains the fields."""

    aborted: list[str] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    dropped: dict[str, int] = field(default_factory=dict)
    withheld: list[str] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def record(
        self,
        *,
        step: int,
        scheduled: Mapping[str, int],
        layer_tokens: Iterable[int],
        freed_block_ids: Iterable[int],
    ) -> StepRecord:
        """Return the record of the step."""
        return StepRecord(
            step=step,
            aborted=tuple(self.aborted),
            preempted=tuple(self.preempted),
            scheduled=scheduled,
            layer_tokens=tuple(layer_tokens),
            dropped=self.dropped,
            withheld=tuple(self.withheld),
            finished=tuple(self.finished),
            failed=tuple(self.failed),
            freed_block_ids=tuple(freed_block_ids),
        )


@dataclass(slots=True)
class Counts:
    """Totals since the start; ``EngineStats`` explains them."""

    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    num_wasted_tokens: int = 0
    stale_events: Counter[StaleEvent] = field(default_factory=Counter)
    outcomes: Counter[tuple[str, Phase | None]] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Numbers of one moment between two steps.

    ``num_blocks`` is the sum of the four kinds. Counters count from the start of the engine.

    Attributes:
        num_waiting, num_running: each answer of a request that wants several counts.
        num_blocks_cached: kept for their content, and given to others as soon as none are free.
        num_blocks_retained: no request has them, but a step that runs, or a transfer, may still
            touch them.
        num_prompt_tokens: of accepted requests.
        num_cached_tokens: of prompts, found in the cache and not computed again.
        num_generated_tokens: handed out.
        num_wasted_tokens: sampled and withheld.
        stale_events: what came too late and was ignored, by what it was: an abort of a request that
            had ended already; a token of one, or its end by an error; an ack of an older step than
            was acknowledged before.
        outcomes: how many requests ended so, by kind and phase (None for ``finished``).
        arithmetic: what computes a forward: ``"native"`` and the set of instructions, ``"torch"``,
            or ``"triton"`` and where.
        missing: a sentence for each thing that this machine or model lacks for the best of it.
        num_spared_tokens: of those who were cancelled, what their answers might still have had.
        busy_seconds: spent in steps.
        num_loaded_tokens: of prompts, computed by another engine and fetched from it.
        num_failed_loads: prompts that could not be fetched, and were computed here.
        num_blocks_held: that transfers have: retained, or used by a request that loads them.
    """

    num_waiting: int
    num_running: int
    num_blocks: int
    num_blocks_used: int
    num_blocks_cached: int
    num_blocks_free: int
    num_blocks_retained: int
    num_steps: int
    num_requests: int
    num_preemptions: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int
    num_wasted_tokens: int
    stale_events: Mapping[StaleEvent, int]
    outcomes: Mapping[tuple[str, Phase | None], int] = field(default_factory=dict)
    arithmetic: str = "none"
    missing: tuple[str, ...] = ()
    num_spared_tokens: int = 0
    busy_seconds: float = 0.0
    num_loaded_tokens: int = 0
    num_failed_loads: int = 0
    num_blocks_held: int = 0

    @property
    def num_stale_events(self) -> int:
        """All of them."""
        return sum(self.stale_events.values())

    @property
    def num_blocks_available(self) -> int:
        """How many blocks a request could have now, free and cached."""
        return self.num_blocks_free + self.num_blocks_cached
