"""Members of JSON objects, taken out with Triton's words for what they are not.

Its messages name the type that was expected in terms of its JSON library, and come as an
internal error (500) behind the field's name; programs match on them.
"""

from typing import Any

from disconnect_watch.errors import cut, shown
from disconnect_watch.server.errors import MalformedJSONError, ProtocolError

__all__ = ["as_array", "as_bool", "as_object", "as_string", "as_unsigned", "parameter", "require"]

_MAX_UNSIGNED = (1 << 64) - 1


def require(field: str, owner: dict[str, Any]) -> Any:
    """The member of an object that must have it."""
    try:
        return owner[field]
    except KeyError:
        raise MalformedJSONError(
            f"Unable to parse '{field}': attempt to access non-existing object member '{field}'"
        ) from None


def as_string(field: str, value: Any) -> str:
    """A member that must be a string."""
    if not isinstance(value, str):
        raise _wrong(field, "string")
    return value


def as_bool(field: str, value: Any) -> bool:
    """A member that must be true or false."""
    if not isinstance(value, bool):
        raise _wrong(field, "boolean")
    return value


def as_unsigned(field: str, value: Any) -> int:
    """A member that must be an unsigned integer of 64 bits; a float never is one."""
    if type(value) is not int or not 0 <= value <= _MAX_UNSIGNED:
        raise _wrong(field, "unsigned-integer")
    return value


def as_array(field: str, value: Any) -> list[Any]:
    """A member that must be an array."""
    if not isinstance(value, list):
        raise _wrong(field, "array")
    return value


def as_object(field: str, value: Any) -> dict[str, Any]:
    """A member that must be an object."""
    if not isinstance(value, dict):
        raise _wrong(field, "object")
    return value


def parameter(key: str, value: Any) -> str | int | bool | float:
    """A request parameter of the client's own.

    Raises:
        ProtocolError: of no type that a model could get, or reserved.
    """
    if key.startswith("triton_"):
        raise ProtocolError(
            "parameter keys starting with 'triton_' are reserved for Triton usage "
            "and should not be specified."
        )
    if not isinstance(value, str | int | float):
        raise ProtocolError(
            f"parameter '{cut(key)}' has invalid type. "
            "It should be either 'int', 'bool', or 'string'."
        )
    if type(value) is int and not -(1 << 63) <= value < 1 << 63:
        raise ProtocolError(
            f"parameter '{cut(key)}' is {shown(value)}, it must fit a signed integer of 64 bits"
        )
    return value


def _wrong(field: str, wanted: str) -> MalformedJSONError:
    return MalformedJSONError(
        f"Unable to parse '{field}': attempt to access JSON non-{wanted} as {wanted}"
    )
