"""Triton's logging and trace extensions: settings that can be changed while it serves."""

from typing import Any

from disconnect_watch.backends.infer import InferError
from disconnect_watch.errors import cut
from disconnect_watch.server.documents import decode_object
from disconnect_watch.server.errors import (
    ModelNotFoundError,
    OverloadedError,
    ProtocolError,
    UnsupportedError,
)
from disconnect_watch.server.v2.call import Answer, Call, json_answer
from disconnect_watch.server.v2.fields import as_bool, as_unsigned
from disconnect_watch.server.v2.models import engine_of, find_model

__all__ = ["logging_settings", "trace_settings"]

_FORMATS = ("default", "ISO8601")


async def logging_settings(call: Call) -> Answer:
    """What is logged; a POST changes it first."""
    settings, remote = call.frontend.log_settings, call.frontend.remote
    document = decode_object(bytes(await call.body())) if call.method == "POST" else {}
    if remote is not None:
        return json_answer(await remote.log_settings(document))
    if call.method == "POST":
        if document.get("log_file") is not None:
            raise UnsupportedError("log file location can not be updated through network protocol")
        changes: dict[str, Any] = {}
        for key in ("log_info", "log_warning", "log_error"):
            if key in document:
                changes[key] = as_bool(key, document[key])
        if "log_verbose_level" in document:
            changes["log_verbose_level"] = as_unsigned(
                "log_verbose_level", document["log_verbose_level"]
            )
        if "log_format" in document:
            if document["log_format"] not in _FORMATS:
                raise OverloadedError(
                    f"invalid argument for --log_format, got: {cut(str(document['log_format']))}"
                )
            changes["log_format"] = document["log_format"]
        settings.change(changes)
    return json_answer(settings.as_dict())


async def trace_settings(call: Call) -> Answer:
    """How a model, or all, are traced; a POST changes it first."""
    model = call.path.get("model")
    settings, remote = call.frontend.trace_settings, call.frontend.remote
    document = decode_object(bytes(await call.body())) if call.method == "POST" else {}
    if remote is not None:
        return json_answer(await remote.trace_settings(model, document))
    if model is not None:
        try:
            if engine_of(call) is None:
                find_model(call)
        except (ModelNotFoundError, InferError):
            raise ProtocolError(f"Request for unknown model : {cut(model)}") from None
    if call.method == "POST":
        settings.change(model, document)
    return json_answer(settings.of(model))
