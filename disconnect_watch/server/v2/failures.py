"""What a model's error, or the end of a request by its token, is answered."""

from disconnect_watch.adapters import LEAVES
from disconnect_watch.backends.infer import Code, InferError
from disconnect_watch.server.errors import (
    AbortedError,
    CancelledByPeer,
    RequestError,
)
from disconnect_watch.server.outcome import error_of_reason
from disconnect_watch.token import CancelToken, Reason

__all__ = ["STATUS", "ModelError", "failure_of"]

STATUS = {
    Code.UNKNOWN: 400,
    Code.INTERNAL: 500,
    Code.NOT_FOUND: 404,
    Code.INVALID_ARG: 400,
    Code.UNAVAILABLE: 503,
    Code.UNSUPPORTED: 501,
    Code.ALREADY_EXISTS: 400,
    Code.CANCELLED: 400,
}


class ModelError(RequestError):
    """What a model, or who runs it, said of a request."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def failure_of(error: InferError, token: CancelToken, *, strict: bool) -> RequestError:
    """The answer to a request that ended in an error.

    Args:
        token: the request's. Who is gone is answered nothing, whatever came of the work.
        strict: answer what was cancelled 400, as Triton does, instead of 499.
    """
    reason = token.reason
    if reason in LEAVES:
        return CancelledByPeer(f"the client left: {reason}")
    if error.code is not Code.CANCELLED or strict:
        return ModelError(error.message, STATUS[error.code])
    if reason in (Reason.DEADLINE, Reason.SHUTDOWN):
        return error_of_reason(reason)
    return AbortedError(error.message)
