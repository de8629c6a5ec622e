"""What a gRPC status, or the text of an error in a stream, says of a request."""

import re

import grpc
from grpc import aio

from disconnect_watch.backends.infer import Code, InferError
from disconnect_watch.errors import cut

__all__ = ["error_of_text", "failure_of", "is_refusal", "was_never_sent"]

_CODES = {
    grpc.StatusCode.INVALID_ARGUMENT: Code.INVALID_ARG,
    grpc.StatusCode.OUT_OF_RANGE: Code.INVALID_ARG,
    grpc.StatusCode.NOT_FOUND: Code.NOT_FOUND,
    grpc.StatusCode.ALREADY_EXISTS: Code.ALREADY_EXISTS,
    grpc.StatusCode.UNIMPLEMENTED: Code.UNSUPPORTED,
    grpc.StatusCode.UNAVAILABLE: Code.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED: Code.UNAVAILABLE,
    grpc.StatusCode.CANCELLED: Code.CANCELLED,
    grpc.StatusCode.INTERNAL: Code.INTERNAL,
    grpc.StatusCode.UNKNOWN: Code.UNKNOWN,
}
#: gRPC tells by words alone whether a status came over the wire or is its own (1.85, held by
#: ``test_gateway_loss.py``): of a call for which there was no connection,
_UNCONNECTED = "failed to connect to all addresses"
#: of one whose connection ended,
_LOST = re.compile(
    r"stream removed|socket closed|connection (reset|aborted|timed out)|broken pipe|goaway|recvmsg",
    re.IGNORECASE,
)
#: and of a message that is larger than our own limit.
_OWN_LIMIT = re.compile(r"CLIENT: (Sent|Received) message larger than max")

#: What Triton's core says of a request that it does not take; a model's own words have none
#: of it before them.
_REFUSED = "[request id: "
_LATER = ("Exceeds maximum queue size", "Request timeout expired")


def was_never_sent(error: aio.AioRpcError) -> bool:
    """Whether a call failed before a byte of it left, so that it may be made again elsewhere."""
    return error.code() is grpc.StatusCode.UNAVAILABLE and (
        (error.details() or "").startswith(_UNCONNECTED)
    )


def failure_of(error: aio.AioRpcError, name: str) -> InferError:
    """The error of a call in Triton's own terms.

    Args:
        name: of the Triton that was asked.
    """
    code, details = error.code(), error.details() or ""
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return _too_large(details, name)
    if code is grpc.StatusCode.UNAVAILABLE:
        if was_never_sent(error):
            return InferError(Code.UNAVAILABLE, f"cannot reach {name}: {cut(details)}")
        if _LOST.search(details):
            return InferError(
                Code.UNAVAILABLE,
                f"the connection to {name} was lost during the request ({cut(details)}), "
                "which may have been worked on: it was not sent again",
            )
    if code not in _CODES:
        return InferError(Code.UNAVAILABLE, f"{name} refuses the request: {code.name}: {details}")
    return InferError(_CODES[code], details)


def is_refusal(text: str) -> bool:
    """Whether an error in a stream says that the model was never asked."""
    return text.startswith(_REFUSED)


def error_of_text(text: str) -> InferError:
    """The error in a stream, which comes without a code of its own.

    Triton (2.51) gives it one where ``triton_grpc_error`` goes with the call, but ends the
    stream with it, and crashes if the model goes on to respond.
    """
    if not is_refusal(text):
        return InferError(Code.INTERNAL, text)
    is_for_now = any(reason in text for reason in _LATER)
    return InferError(Code.UNAVAILABLE if is_for_now else Code.INVALID_ARG, text)


def _too_large(details: str, name: str) -> InferError:
    own = _OWN_LIMIT.match(details)
    if own is None:
        return InferError(Code.INVALID_ARG, f"{name} does not take the request: {details}")
    hint = "use --max-message-bytes to increase the limit"
    if own[1] == "Sent":
        return InferError(Code.INVALID_ARG, f"the request is too large: {details}; {hint}")
    return InferError(Code.INTERNAL, f"the answer of {name} is too large: {details}; {hint}")
