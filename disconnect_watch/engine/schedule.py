"""The plan of a step, and what a runner makes of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from disconnect_watch.engine.outcome import Drawn, Phase
from disconnect_watch.engine.remote import KVLoad
from disconnect_watch.engine.request import Request

__all__ = ["LayerCheck", "Runner", "Schedule", "ScheduledRow"]


@dataclass(frozen=True, slots=True)
class ScheduledRow:
    """One request's share of a step: its tokens in the half-open range [start, stop).

    Attributes:
        phase: prefill or decode, as it was when the step was scheduled.
        block_ids: where its keys and values lie, in the order of its tokens.
        num_draws: how many tokens the step may sample, each from the one before; there are blocks
            for all of them. More than one only where every row of the step has a single token.
    """

    request: Request
    start: int
    stop: int
    phase: Phase
    block_ids: list[int]
    num_draws: int = 1

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start

    @property
    def is_sampled(self) -> bool:
        """Whether the step reaches the last known token, and so yields the next one."""
        return self.stop == len(self.request.token_ids)


@dataclass(frozen=True, slots=True)
class Schedule:
    """The plan of one step.

    Attributes:
        rows: who takes part, in the order above.
        preempted: who was sent back to the queue to make room, and the blocks that freed.
        loads: of those who were admitted and whose prompts another engine has computed.
    """

    rows: list[ScheduledRow]
    preempted: list[tuple[Request, list[int]]]
    loads: list[KVLoad] = field(default_factory=list)


#: Given the index of the layer about to run and the rows that live, returns those that died since.
#: Nothing is made of them any more, and what can be left of their work is; if none stays, the
#: forward ends.
LayerCheck = Callable[[int, Sequence[ScheduledRow]], Sequence[ScheduledRow]]


class Runner(Protocol):
    """What computes the rows of a step.

    Attributes:
        layer_tokens: tokens that each layer computed since the list was cleared, in order.
    """

    layer_tokens: list[int]

    @property
    def acked_step(self) -> int:
        """The last step of which nothing runs any more, nor of any before it."""

    def run(
        self, rows: Sequence[ScheduledRow], *, step: int, layer_check: LayerCheck
    ) -> dict[str, Drawn]:
        """Compute the rows' tokens, and sample from those rows that reach their last one.

        A step that failed may be run again in parts.

        Args:
            rows: at least one.
            step: number of the step, which never falls.
            layer_check: called before each layer.

        Returns:
            What was drawn by request key, for rows that were sampled and not dropped: a token, up
            to ``num_draws`` of them if that is more, or the error instead.
        """
