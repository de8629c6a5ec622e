"""What becomes of a request that did not finish."""

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

__all__ = ["error_of", "error_of_reason", "raise_unless_finished"]


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
