"""Triton's model repository extension: what there is, load, unload."""

from typing import Any

from disconnect_watch.server.documents import decode_object
from disconnect_watch.server.errors import (
    FailedError,
    OverloadedError,
    ProtocolError,
    UnsupportedError,
)
from disconnect_watch.server.v2.call import Answer, Call, json_answer
from disconnect_watch.server.v2.fields import as_object, as_string
from disconnect_watch.server.v2.models import is_of_repository

__all__ = ["index", "load", "unload"]


async def index(call: Call) -> Answer:
    """Every version of every model, and its state."""
    document = await _document(call)
    ready = document.get("ready", False)
    if not isinstance(ready, bool):
        raise ProtocolError("Invalid value for 'ready': expected a boolean")
    frontend = call.frontend
    entries: list[dict[str, Any]] = [
        {"name": engine.name, "version": engine.version, "state": "READY"}
        if engine.is_ready
        else {"name": engine.name, "version": engine.version, "state": "UNAVAILABLE"}
        for engine in frontend.backends.values()
        if (engine.is_ready or not ready) and not is_of_repository(frontend, engine.name)
    ]
    for entry in frontend.models.index(ready=ready) if frontend.models else ():
        line = {"name": entry.name}
        for key in ("version", "state", "reason"):
            if value := getattr(entry, key):
                line[key] = value
        entries.append(line)
    return json_answer(entries)


async def load(call: Call) -> Answer:
    """Load a model, or load it anew; answered once it serves."""
    parameters = as_object("parameters", (await _document(call)).get("parameters", {}))
    for key, value in parameters.items():
        if key != "config" and not key.startswith("file:"):
            raise FailedError("unexpected error on creating Triton parameter")
        as_string(key, value)
    await _models(call).load(_name(call), parameters)
    return Answer()


async def unload(call: Call) -> Answer:
    """Serve a model no more; answered at once, or when its requests have ended."""
    parameters = as_object("parameters", (await _document(call)).get("parameters", {}))
    dependents = parameters.get("unload_dependents", False)
    if not isinstance(dependents, bool):
        raise ProtocolError("Invalid value for 'unload_dependents': expected a boolean")
    await _models(call).unload(_name(call), unload_dependents=dependents)
    return Answer()


async def _document(call: Call) -> dict[str, Any]:
    body = await call.body()
    return decode_object(bytes(body)) if body else {}


def _name(call: Call) -> str:
    name = call.path["model"]
    assert name is not None
    return name


def _models(call: Call) -> Any:
    if call.path["repository"] is not None:
        raise UnsupportedError("'repository_name' specification is not supported")
    frontend, name = call.frontend, _name(call)
    if frontend.models is None or (
        name in frontend.backends and not is_of_repository(frontend, name)
    ):
        raise OverloadedError("explicit model load / unload is not allowed if polling is enabled")
    return frontend.models
