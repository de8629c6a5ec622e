"""Is it alive, is it ready, what does it serve."""

import importlib.metadata
from collections.abc import Sequence

from disconnect_watch.backends import Tensor
from disconnect_watch.backends.engine_model import config_of
from disconnect_watch.backends.infer import InferError
from disconnect_watch.backends.model_config import config_document
from disconnect_watch.server.errors import ModelNotFoundError, ProtocolError
from disconnect_watch.server.v2.call import Answer, Call, json_answer
from disconnect_watch.server.v2.models import engine_of, find_model

__all__ = ["config", "live", "model_metadata", "model_ready", "ready", "server_metadata"]

try:
    VERSION = importlib.metadata.version("disconnect-watch")
except importlib.metadata.PackageNotFoundError:
    # Run from a source tree that was never installed.
    VERSION = "0"
EXTENSIONS = (
    "classification",
    "sequence",
    "model_repository",
    "model_repository(unload_dependents)",
    "schedule_policy",
    "model_configuration",
    "system_shared_memory",
    "binary_tensor_data",
    "parameters",
    "statistics",
    "trace",
    "logging",
    "generate",
)
_PLAIN = b"text/plain; charset=utf-8"


async def live(call: Call) -> Answer:
    """The loop runs, or this would not be answered."""
    return Answer(content_type=_PLAIN)


async def ready(call: Call) -> Answer:
    """200, or 400 while it drains or what it serves is not ready; with an empty body."""
    return Answer(status=200 if call.frontend.is_ready else 400, content_type=_PLAIN)


async def server_metadata(call: Call) -> Answer:
    """Name, version and the protocol extensions that are served."""
    if (remote := call.frontend.remote) is not None:
        return json_answer(await remote.server_metadata())
    return json_answer({"name": "disconnect_watch", "version": VERSION, "extensions": EXTENSIONS})


async def model_metadata(call: Call) -> Answer:
    """What a model takes and gives."""
    if (engine := engine_of(call)) is not None:
        name, versions, platform = engine.name, [engine.version], engine.platform
        inputs, outputs = engine.inputs, engine.outputs
    else:
        model = find_model(call)
        name, inputs, outputs = model.name, model.inputs, model.outputs
        platform = model.config.platform or model.config.backend
        versions = [model.version] if call.path["version"] else _versions(call, model.name)
    return json_answer(
        {
            "name": name,
            "versions": versions,
            "platform": platform,
            "inputs": _describe(inputs),
            "outputs": _describe(outputs),
        }
    )


async def model_ready(call: Call) -> Answer:
    """200 with an empty body, or 400, for an unknown model too."""
    try:
        is_ready = (engine_of(call) or find_model(call)).is_ready
    except (ModelNotFoundError, InferError):
        is_ready = False
    if not is_ready or call.frontend.stats().is_draining:
        raise ProtocolError("Model version not ready")
    return Answer(content_type=_PLAIN)


async def config(call: Call) -> Answer:
    """A model's configuration, with all that was filled in."""
    if (engine := engine_of(call)) is not None:
        return json_answer(config_document(config_of(engine)))
    return json_answer(config_document(find_model(call).config))


def _versions(call: Call, name: str) -> list[str]:
    models = call.frontend.models
    assert models is not None
    entries = models.index(ready=True)
    return [entry.version for entry in entries if entry.name == name and entry.version]


def _describe(tensors: Sequence[Tensor]) -> list[dict[str, object]]:
    return [
        {"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape}
        for tensor in tensors
    ]
