"""Which model a path names: one that takes tensors, or an engine, which takes text."""

from disconnect_watch.backends import Backend
from disconnect_watch.backends.infer import ServedModel
from disconnect_watch.server.errors import ModelNotFoundError, UnsupportedError
from disconnect_watch.server.frontend import Frontend
from disconnect_watch.server.v2.call import Call

__all__ = ["engine_of", "find_model", "is_of_repository"]


def engine_of(call: Call) -> Backend | None:
    """The engine that a path names, None if it names none.

    Raises:
        ModelNotFoundError: it names a version that the engine is not.
    """
    name, version = call.path["model"], call.path["version"]
    assert name is not None
    if name not in call.frontend.backends:
        return None
    return call.frontend.find(name, version)


def is_of_repository(frontend: Frontend, name: str) -> bool:
    """Whether a repository holds the model of that name."""
    models = frontend.models
    return models is not None and any(entry.name == name for entry in models.index())


def find_model(call: Call) -> ServedModel:
    """The model that a path names, which takes tensors.

    Raises:
        ModelNotFoundError, InferError: there is none, in Triton's words.
        UnsupportedError: it is an engine.
    """
    name, version = call.path["model"], call.path["version"]
    assert name is not None
    if engine_of(call) is not None:
        raise UnsupportedError(f"model '{name}' takes text, ask it by generate_stream")
    models = call.frontend.models
    if models is None:
        raise ModelNotFoundError(f"Request for unknown model: '{name}' is not found")
    return models.find(name, version)
