"""``/v1/models``: what can be asked, by the names that it is asked by."""

from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from starlette.requests import Request
from starlette.responses import Response

from disconnect_watch.errors import cut
from disconnect_watch.server.openai.common import json_response
from disconnect_watch.server.openai.errors import UnknownModelError
from disconnect_watch.server.openai.text_models import text_model_names

if TYPE_CHECKING:
    from disconnect_watch.server.frontend import Frontend

__all__ = ["list_models", "retrieve_model"]


async def list_models(request: Request) -> Response:
    """All models that these endpoints serve."""
    return json_response({"object": "list", "data": list((await _models(request)).values())})


async def retrieve_model(request: Request) -> Response:
    """One of them."""
    name = unquote(request.path_params["model"])
    model = (await _models(request)).get(name)
    if model is None:
        raise UnknownModelError(f"the model '{cut(name)}' does not exist, see /v1/models")
    return json_response(model)


async def _models(request: Request) -> dict[str, dict[str, Any]]:
    frontend: Frontend = request.app.state.frontend
    names = [unquote(name) for name in frontend.backends]
    if frontend.embedder is not None:
        names.append(frontend.embedder.name)
    names += [name for name in await text_model_names(frontend) if name not in names]
    return {
        name: {
            "id": name,
            "object": "model",
            "created": frontend.started_at,
            "owned_by": "disconnect_watch",
        }
        for name in names
    }
