"""SageMaker's multi-model endpoints: models that SageMaker brings, and takes away again.

    POST /models {"model_name", "url"}     load what lies there
    GET /models, /models/NAME              what is loaded
    POST /models/NAME/invoke               ask it
    DELETE /models/NAME                    unload it

SageMaker puts a model below ``/opt/ml/models`` and names it by a digest; what its
``config.pbtxt`` calls it does not matter. Whoever reaches the port may load what lies there:
in its container that is SageMaker alone.

Source: SageMaker "Create your own container for multi-model endpoints", and Triton's server.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, Self
from urllib.parse import quote, unquote

from disconnect_watch.backends.infer import InferError
from disconnect_watch.backends.model_config import ConfigError, config_document, read_config
from disconnect_watch.backends.versions import versions_in
from disconnect_watch.server.cloud import App, CloudMode, Message, Receive, Refusal, SageMaker, Send
from disconnect_watch.server.documents import decode_object, encode
from disconnect_watch.server.errors import CancelledByPeer, RequestError
from disconnect_watch.server.limits import read_all

__all__ = ["ModelPlaces", "MultiModel"]

#: Where SageMaker puts models.
ROOT = Path("/opt/ml/models")
MAX_BODY_BYTES = 1 << 16
_MODELS = re.compile(r"/models/?(?P<name>[^/]+)?(?P<invoke>/invoke)?")


class ModelPlaces(Protocol):
    """Models that are loaded from wherever they lie."""

    async def load_from(self, name: str, directory: Path, config: dict[str, Any]) -> None:
        """Load a model by that name; returns when it can be asked.

        Raises:
            InferError: it can't be loaded.
        """

    async def unload_from(self, name: str) -> None:
        """Unload it, and forget where it lay; its running requests end first."""


class MultiModel(CloudMode):
    """``/ping`` and ``/models``.

    Args:
        action, health, port: see ``SageMaker``.
        root: nothing that lies elsewhere is loaded.

    Attributes:
        places: what loads the models; to be set before it serves.
    """

    media_type = SageMaker.media_type

    def __init__(
        self, *, action: str = "infer", health: str = "live", port: int = 8080, root: Path = ROOT
    ) -> None:
        SageMaker("", action=action, health=health)  # refuses what makes no sense
        self.port = port
        self.places: ModelPlaces | None = None
        self._action = action
        self._health = f"/v2/health/{health}"
        self._root = root.resolve()
        #: Where each model that is loaded, or is being loaded, lies.
        self._urls: dict[str, str] = {}

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Self:
        """As ``SAGEMAKER_*`` say.

        Raises:
            ValueError: a value makes no sense.
        """
        one = SageMaker.from_environment(
            {"SAGEMAKER_TRITON_DEFAULT_MODEL_NAME": "none", **environment}
        )
        return cls(
            action=environment.get("SAGEMAKER_TRITON_INFERENCE_TYPE", "infer"),
            health=environment.get("SAGEMAKER_TRITON_OVERRIDE_PING_MODE", "live"),
            port=one.port,
        )

    def target(self, scope: Message) -> tuple[str, str] | Refusal:
        """Of what is not about loading; every other path is 400, as Triton has it."""
        if scope["path"] == "/ping":
            return scope["method"], self._health
        match = _MODELS.fullmatch(scope["path"])
        if match is None or not match["name"] or not match["invoke"]:
            return Refusal(400, "Bad Request")
        name = unquote(match["name"])
        if name not in self._urls:
            return Refusal(404, f"model '{name}' is not loaded")
        return scope["method"], f"/v2/models/{quote(name, safe='')}/{self._action}"

    def wrap(self, app: App) -> App:
        """See ``CloudMode.wrap``."""
        ask = super().wrap(app)

        async def in_cloud(scope: Message, receive: Receive, send: Send) -> None:
            match = _MODELS.fullmatch(scope["path"]) if scope["type"] == "http" else None
            if match is None or match["invoke"]:
                await ask(scope, receive, send)
                return
            name = unquote(match["name"]) if match["name"] else None
            try:
                status, document = await self._manage(scope["method"], name, scope, receive)
            except CancelledByPeer:
                return
            except RequestError as error:
                status, document = error.status, {"error": str(error)}
            await _answer(status, document, send)

        return in_cloud

    async def _manage(
        self, method: str, name: str | None, scope: Message, receive: Receive
    ) -> tuple[int, Any]:
        if name is None and method == "GET":
            return 200, {"models": [self._told(each) for each in self._urls]}
        if name is None and method == "POST":
            return await self._load(await _document(scope, receive))
        if name is None or method not in ("GET", "DELETE"):
            return 405, {"error": "Method Not Allowed"}
        if name not in self._urls:
            return 404, {"error": f"model '{name}' is not loaded"}
        if method == "DELETE":
            assert self.places is not None
            await self.places.unload_from(name)
            self._urls.pop(name, None)
            return 200, {}
        return 200, self._told(name)

    def _told(self, name: str) -> dict[str, str]:
        return {"modelName": name, "modelUrl": self._urls[name]}

    async def _load(self, document: dict[str, Any]) -> tuple[int, Any]:
        name, url = document.get("model_name"), document.get("url")
        if not (isinstance(name, str) and name and "/" not in name and isinstance(url, str)):
            return 400, {"error": "give a model_name, without a slash, and a url"}
        if name in self._urls:
            return 409, {"error": f"model '{name}' is loaded already"}
        assert self.places is not None
        self._urls[name] = url
        try:
            directory = self._directory(url)
            config = config_document(read_config(directory)) | {"name": name}
            await self.places.load_from(name, directory, config)
        except MemoryError:
            del self._urls[name]
            return 507, {"error": f"there is no memory for model '{name}'"}
        except (ConfigError, InferError, OSError) as error:
            del self._urls[name]
            return 400, {"error": str(error)}
        except BaseException:
            del self._urls[name]
            raise
        return 200, {}

    def _directory(self, url: str) -> Path:
        """The model's, which lies at the URL or is the one thing in it.

        Raises:
            ConfigError: there is none, or it lies elsewhere.
        """
        path = Path(url).resolve()
        parts = path.relative_to(self._root).parts if path.is_relative_to(self._root) else ()
        if len(parts) not in (2, 3) or parts[1] != "model" or not path.is_dir():
            raise ConfigError(f"no model can lie at '{url}', only below {self._root}/*/model")
        inside = [each for each in path.iterdir() if each.is_dir()]
        if not versions_in(path) and len(inside) == 1:
            return inside[0]
        return path


async def _document(scope: Message, receive: Receive) -> dict[str, Any]:
    announced = next((int(v) for k, v in scope["headers"] if k == b"content-length"), 0)
    return decode_object(bytes(await read_all(receive, announced, MAX_BODY_BYTES)))


async def _answer(status: int, document: Any, send: Send) -> None:
    body = encode(document)
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
