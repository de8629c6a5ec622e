"""Errors as OpenAI's API tells them, and which of its words stand for ours.

Source: openai-python 3.57, ``_exceptions.py``: the class is chosen by the status alone, and
``param`` and ``code`` are shown where they are there.
"""

from typing import Any

from disconnect_watch.server.errors import ProtocolError, RequestError

__all__ = ["InvalidFieldError", "UnknownModelError", "error_document"]

#: By status: what kind of error, and the code if the status has one of its own.
_KINDS: dict[int, tuple[str, str | None]] = {
    400: ("invalid_request_error", None),
    401: ("authentication_error", "invalid_api_key"),
    403: ("permission_error", None),
    404: ("not_found_error", None),
    409: ("conflict_error", None),
    429: ("rate_limit_error", "rate_limit_exceeded"),
    499: ("cancelled", "request_cancelled"),
    503: ("overloaded_error", None),
    504: ("timeout", "deadline_exceeded"),
}


class InvalidFieldError(ProtocolError):
    """A field of the request makes no sense, or asks for what is not there.

    Attributes:
        param: the field.
    """

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


class UnknownModelError(RequestError):
    """No model of that name is served for what was asked."""

    status = 404
    code = "model_not_found"
    param = "model"


def error_document(status: int, message: str, error: Exception | None = None) -> dict[str, Any]:
    """The body of an answer, or the data of an event, that tells of an error.

    Args:
        error: what happened, where it has a ``param`` or a ``code`` of its own.
    """
    kind, code = _KINDS.get(
        status, ("server_error" if status >= 500 else "invalid_request_error", None)
    )
    return {
        "error": {
            "message": message,
            "type": kind,
            "param": getattr(error, "param", None),
            "code": getattr(error, "code", code),
        }
    }
