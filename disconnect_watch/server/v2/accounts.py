"""How a request to a model that takes tensors ended, in the words that engines have for it."""

import time

from disconnect_watch.backends.infer import Code, InferError, InferRequest
from disconnect_watch.engine import Outcome
from disconnect_watch.token import Reason

__all__ = ["outcome_of"]

_FINISHED = Outcome("finished")


def outcome_of(request: InferRequest, error: BaseException | None) -> Outcome | None:
    """The outcome of a request that is over; None if the model did not take it.

    Args:
        error: what it ended with, None for a result.
    """
    if request.phase is None:
        return None
    if error is None:
        return _FINISHED
    token = request.cancel
    if token.reason is not None and not _is_the_models_own(error):
        now_ns = time.monotonic_ns()
        return Outcome(
            "cancelled",
            reason=token.reason,
            phase=request.phase,
            flag_at_ns=token.cancelled_at_ns or now_ns,
            seen_at_ns=now_ns,
            dropped_at_ns=now_ns,
            freed_at_ns=now_ns,
        )
    if isinstance(error, GeneratorExit):
        # Its reader wanted no more of it, and nobody had said so before.
        return Outcome("cancelled", reason=Reason.OWNER_CLOSED, phase=request.phase)
    return Outcome("failed", phase=request.phase, error=str(error))


def _is_the_models_own(error: BaseException) -> bool:
    return isinstance(error, InferError) and error.code is not Code.CANCELLED
