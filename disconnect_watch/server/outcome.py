"""What becomes of a request that did not finish."""

from dataclasses import replace

from disconnect_watch.adapters import LEAVES
from disconnect_watch.engine import Outcome
from disconnect_watch.server.errors import (
    AbortedError,
    CancelledByPeer,
    DeadlineError,
    FailedError,
    RequestError,
    ShuttingDownError,
)
from disconnect_watch.token import Reason

__all__ = ["error_of", "error_of_reason", "joined", "raise_unless_finished"]

#: The worst of several is that of all; see ``Outcome.phase`` for the order of the others.
_KINDS = ("finished", "cancelled", "failed")
_TIMES = ("flag_at_ns", "seen_at_ns", "dropped_at_ns", "freed_at_ns")
_NUMBERS = (
    "num_prompt_tokens",
    "num_cached_tokens",
    "num_generated_tokens",
    "num_wasted_tokens",
    "num_blocks_freed",
    "block_ns",
)
_PHASES = (None, "waiting", "prefill", "decode")


def raise_unless_finished(outcome: Outcome) -> None:
    """Raise what a request with this outcome is answered, unless it is a result.

    Raises:
        RequestError: see ``error_of``.
    """
    if outcome.kind != "finished":
        raise error_of(outcome)


def error_of(outcome: Outcome) -> RequestError:
    """What a request that did not finish is answered."""
    if outcome.kind == "failed":
        return FailedError(outcome.error or "the model failed")
    assert outcome.reason is not None
    return error_of_reason(outcome.reason)


def error_of_reason(reason: Reason) -> RequestError:
    """What a request that was cancelled for this reason is answered."""
    if reason in LEAVES:
        return CancelledByPeer(f"the client left: {reason}")
    if reason is Reason.SHUTDOWN:
        return ShuttingDownError("the server is shutting down, the request was cancelled")
    if reason is Reason.DEADLINE:
        return DeadlineError("the time that the request was given is over, it was cancelled")
    return AbortedError(f"the request was cancelled: {reason}")


def joined(one: Outcome, other: Outcome) -> Outcome:
    """The outcome of a request that two generations were made for.

    Kind, reason and error are those of the worse one, the phase is that of the one that was
    further, times are the last, and numbers are sums.
    """
    worse = max(one, other, key=lambda outcome: _KINDS.index(outcome.kind))
    phases = [each.phase for each in (one, other) if each.kind == worse.kind]
    return replace(
        worse,
        phase=max(phases, key=_PHASES.index),
        **{name: max(getattr(one, name), getattr(other, name)) for name in _TIMES},
        **{name: getattr(one, name) + getattr(other, name) for name in _NUMBERS},
    )
