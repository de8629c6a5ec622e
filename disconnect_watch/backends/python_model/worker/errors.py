"""Errors as models make them."""

from disconnect_watch.backends.infer import Code, InferError
from disconnect_watch.backends.python_model.messages import CODES

__all__ = ["TritonError", "TritonModelException"]


class TritonModelException(Exception):
    """What the utilities raise."""


class TritonError(Exception):
    """An error that a response carries.

    Args:
        message: what the client is told.
        code: whose fault it is, one of the class's constants.
    """

    UNKNOWN = CODES.index(Code.UNKNOWN)
    INTERNAL = CODES.index(Code.INTERNAL)
    NOT_FOUND = CODES.index(Code.NOT_FOUND)
    INVALID_ARG = CODES.index(Code.INVALID_ARG)
    UNAVAILABLE = CODES.index(Code.UNAVAILABLE)
    UNSUPPORTED = CODES.index(Code.UNSUPPORTED)
    ALREADY_EXISTS = CODES.index(Code.ALREADY_EXISTS)
    CANCELLED = CODES.index(Code.CANCELLED)

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        super().__init__(message)
        if not 0 <= code < len(CODES):
            raise TritonModelException(f"there is no error code {code!r}")
        self._message = str(message)
        self._code = code

    def message(self) -> str:
        """What the client is told."""
        return self._message

    def code(self) -> int:
        """Whose fault it is."""
        return self._code

    def to_infer_error(self) -> InferError:
        """The same, as the server knows it."""
        return InferError(CODES[self._code], self._message)
