"""KServe v2: is it alive, is it ready, what does it serve."""

import importlib.metadata
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response

from disconnect_watch.backends import Backend, Tensor
from disconnect_watch.server.documents import encode
from disconnect_watch.server.errors import ModelNotFoundError, ProtocolError

if TYPE_CHECKING:
    from disconnect_watch.server.frontend import Frontend

__all__ = [
    "live",
    "model_metadata",
    "model_ready",
    "ready",
    "server_metadata",
]

try:
    VERSION = importlib.metadata.version("disconnect-watch")
except importlib.metadata.PackageNotFoundError:
    # Run from a source tree that was never installed.
    VERSION = "0"
EXTENSIONS = ("generate", "parameters")


async def live(request: Request) -> Response:
    """The loop runs, or this would not be answered."""
    return Response(media_type="text/plain")


async def ready(request: Request) -> Response:
    """200, or 400 while it drains or since the engine died; both with an empty body."""
    frontend: Frontend = request.app.state.frontend
    return Response(status_code=200 if frontend.is_ready else 400, media_type="text/plain")


async def server_metadata(request: Request) -> Response:
    """Name, version and the protocol extensions that are served."""
    return _json({"name": "disconnect_watch", "version": VERSION, "extensions": EXTENSIONS})


async def model_metadata(request: Request) -> Response:
    """What a model takes and gives."""
    backend = _find(request)
    return _json(
        {
            "name": backend.name,
            "versions": [backend.version],
            "platform": backend.platform,
            "inputs": [_describe(tensor) for tensor in backend.inputs],
            "outputs": [_describe(tensor) for tensor in backend.outputs],
        }
    )


async def model_ready(request: Request) -> Response:
    """200 with an empty body, or 400, for an unknown model too."""
    frontend: Frontend = request.app.state.frontend
    try:
        is_ready = _find(request).is_ready and not frontend.stats().is_draining
    except ModelNotFoundError:
        is_ready = False
    if not is_ready:
        raise ProtocolError("Model version not ready")
    return Response(media_type="text/plain")


def _find(request: Request) -> Backend:
    frontend: Frontend = request.app.state.frontend
    return frontend.find(request.path_params["model"], request.path_params.get("version"))


def _describe(tensor: Tensor) -> dict[str, object]:
    return {"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape}


def _json(value: object) -> Response:
    return Response(encode(value), media_type="application/json")
