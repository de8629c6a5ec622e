"""What can be wrong with a request, as Triton answers it.

The class tells the blame and with it the status; the message goes to the client as
``{"error": message}``. Statuses and messages are Triton's where it has one, malformed
JSON being a 500 included (captures ``gen_bad_json``, ``gen_number``).
"""

from typing import ClassVar

from disconnect_watch.errors import DisconnectWatchError

__all__ = [
    "AbortedError",
    "CancelledByPeer",
    "DeadlineError",
    "FailedError",
    "ForbiddenError",
    "MalformedJSONError",
    "ModelNotFoundError",
    "OverloadedError",
    "ProtocolError",
    "RequestError",
    "ShuttingDownError",
    "UnauthorizedError",
    "UnavailableError",
    "UnsupportedError",
]


class RequestError(DisconnectWatchError):
    """A request that is not answered with a result.

    Attributes:
        status: the HTTP status.
        is_final: whether clients are told not to try again, which their libraries would.
    """

    status: int
    is_final: ClassVar[bool] = False


class ProtocolError(RequestError):
    """The client asked for something that makes no sense."""

    status = 400


class MalformedJSONError(ProtocolError):
    """The body is no JSON, or a tensor's JSON has the wrong type: Triton's internal error."""

    status = 500


class ModelNotFoundError(RequestError):
    """No such model, or no such version of it."""

    status = 404


class UnauthorizedError(RequestError):
    """No key, or one that is not known."""

    status = 401
    headers: ClassVar[dict[str, str]] = {"www-authenticate": "Bearer"}


class ForbiddenError(RequestError):
    """A key that is known, and not for this."""

    status = 403


class OverloadedError(RequestError):
    """The queue is full; later it may not be."""

    status = 503


class ShuttingDownError(OverloadedError):
    """The server ends before the request could."""


class UnavailableError(RequestError):
    """What works on it went away, and comes back."""

    status = 503


class UnsupportedError(RequestError):
    """Asked for something that this server, or this model, does not do."""

    status = 501


class FailedError(RequestError):
    """The model failed, or the engine did."""

    status = 500


class AbortedError(RequestError):
    """The request was aborted by someone else than its client, who is told so.

    Answered as nginx's 499 and marked as not to be retried: client libraries repeat
    a 4xx of their list and every 5xx, and would restart what was just cancelled.
    """

    status = 499
    is_final = True


class DeadlineError(RequestError):
    """The request was not done within the time that it was given."""

    status = 504
    is_final = True


class CancelledByPeer(RequestError):
    """The client left. Logged as 499; nothing is sent, since nobody is there."""

    status = 499
