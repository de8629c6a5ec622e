"""One generation, from its prompt to its one outcome.

A request is waiting (in the queue, new or preempted), running (it has blocks and is scheduled in
each step) or ended. It is cancelled by its token, which others set, or by a mark of its own; both
may be set by any thread at any time, and are only read by the engine. All else belongs to the
thread that steps the engine.
"""

import time
from typing import Literal

from disconnect_watch.engine.outcome import Outcome, Phase
from disconnect_watch.engine.params import SamplingParams
from disconnect_watch.token import CancelToken, Reason

__all__ = ["Request"]


class Request:
    """The state of one generation.

    Attributes:
        token_ids: prompt, then what was generated.
        num_computed_tokens: how many of them have their keys and values in the cache.
        seed: of the random numbers; survives preemption, so that a recomputed request goes on
            with the tokens it would have had.
        outcome: None until the request has ended.
        seen_at_ns, dropped_at_ns: set by the step that noticed the cancel; 0 before.
    """

    __slots__ = (
        "_marks",
        "cancel",
        "dropped_at_ns",
        "num_computed_tokens",
        "num_prompt_tokens",
        "outcome",
        "params",
        "request_id",
        "seed",
        "seen_at_ns",
        "status",
        "token_ids",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        *,
        params: SamplingParams,
        seed: int,
        cancel: CancelToken | None = None,
    ) -> None:
        self.request_id = request_id
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(prompt_token_ids)
        self.params = params
        self.seed = seed
        self.cancel = cancel
        self.status: Literal["waiting", "running", "ended"] = "waiting"
        self.num_computed_tokens = 0
        self.outcome: Outcome | None = None
        self.seen_at_ns = 0
        self.dropped_at_ns = 0
        self._marks: list[tuple[int, Reason]] = []

    def __repr__(self) -> str:
        return f"<Request {self.request_id!r} {self.status} {len(self.token_ids)} tokens>"

    @property
    def num_generated_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """How many known tokens lack keys and values: 1 in decode, the rest of it in prefill."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def phase(self) -> Phase:
        """What the request is doing; one that recomputes after a preemption is in prefill again."""
        if self.status == "waiting":
            return "waiting"
        if self.num_generated_tokens and self.num_uncomputed_tokens == 1:
            return "decode"
        return "prefill"

    @property
    def is_cancelled(self) -> bool:
        """Whether its token fired or it was marked. Threads: any."""
        return bool(self._marks) or (self.cancel is not None and self.cancel.cancelled)

    def mark_cancelled(self, reason: Reason) -> bool:
        """Ask for the end of this request alone; its token, which others may share, stays as it is.

        Returns:
            True if this was the first mark.

        Threads: any. ``list.append`` is atomic, so that exactly one mark lies at index 0.
        """
        mark = (time.monotonic_ns(), reason)
        self._marks.append(mark)
        return self._marks[0] is mark

    def read_cancel(self) -> tuple[int, Reason]:
        """Return when and why, the earlier of token and mark; only for a cancelled request."""
        causes = self._marks[:1]
        if self.cancel is not None and (reason := self.cancel.reason) is not None:
            # Between the flag and its timestamp the time reads as 0: it was set just now.
            causes.append((self.cancel.cancelled_at_ns or time.monotonic_ns(), reason))
        return min(causes, key=lambda cause: cause[0])

    def acknowledge(self, step: int) -> None:
        """Tell the token, if it has fired, that nothing of this request is left; step from 1."""
        if self.cancel is not None and self.cancel.cancelled:
            self.cancel.ack(step)

    def end(self, outcome: Outcome) -> None:
        """Make the one terminal move."""
        assert self.outcome is None, f"{self.request_id} ended twice"
        self.status = "ended"
        self.outcome = outcome
