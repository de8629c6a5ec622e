"""Triton's logging and trace settings, from JSON to gRPC's messages and back.

Triton itself says which of them make sense.
"""

from typing import Any

from tritonclient.grpc import service_pb2  # type: ignore[import-untyped]

from disconnect_watch.backends.infer import Code, InferError
from disconnect_watch.errors import cut, shown

__all__ = ["log_document", "log_request", "trace_document", "trace_request"]

_UINT32 = range(1 << 32)


def log_request(changes: dict[str, Any]) -> Any:
    """A ``LogSettingsRequest``.

    Raises:
        InferError: INVALID_ARG, a value is of no type that a setting has.
    """
    request = service_pb2.LogSettingsRequest()
    for key, value in changes.items():
        setting = request.settings[key]
        if isinstance(value, bool):
            setting.bool_param = value
        elif isinstance(value, int) and value in _UINT32:
            setting.uint32_param = value
        elif isinstance(value, str):
            setting.string_param = value
        else:
            raise _unusable(key, value, "true, false, an unsigned integer or a string")
    return request


def log_document(response: Any) -> dict[str, Any]:
    """What a ``LogSettingsResponse`` says."""
    return {
        key: getattr(value, value.WhichOneof("parameter_choice"))
        for key, value in sorted(response.settings.items())
        if value.WhichOneof("parameter_choice") is not None
    }


def trace_request(model: str | None, changes: dict[str, Any]) -> Any:
    """A ``TraceSettingRequest``; null is a setting with no value, which sets it back.

    Raises:
        InferError: INVALID_ARG, a value is of no type that a setting has.
    """
    request = service_pb2.TraceSettingRequest(model_name=model or "")
    for key, value in changes.items():
        values = [] if value is None else value if isinstance(value, list) else [value]
        if any(isinstance(one, bool) or not isinstance(one, str | int) for one in values):
            raise _unusable(key, value, "a string, an array of strings or null")
        request.settings[key].value.extend(map(str, values))
    return request


def trace_document(response: Any) -> dict[str, Any]:
    """What a ``TraceSettingResponse`` says: the levels as an array, the rest as strings."""
    return {
        key: list(setting.value) if key == "trace_level" else "".join(setting.value)
        for key, setting in sorted(response.settings.items())
    }


def _unusable(key: str, value: Any, wanted: str) -> InferError:
    return InferError(
        Code.INVALID_ARG, f"setting '{cut(key)}' is {shown(value)}, it must be {wanted}"
    )
