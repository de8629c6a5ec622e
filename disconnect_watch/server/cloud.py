"""The paths of SageMaker and of Vertex AI, in front of those below ``/v2``.

Both clouds ask a container for a health path and one for inference, and have a media type
of their own in the place of ``Inference-Header-Content-Length``. What comes by them is
answered by the routes that are there anyway, and cancelled in the same way.

Source: SageMaker "Custom inference code", Vertex AI "Custom container requirements", and
Triton's servers for both.
"""

import re
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Self

from disconnect_watch.server.documents import encode

__all__ = ["App", "CloudMode", "Message", "Receive", "Refusal", "SageMaker", "Send", "VertexAI"]

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

_LENGTH = b"inference-header-content-length"
_ACTIONS = ("infer", "generate", "generate_stream")


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request is not passed on."""

    status: int
    message: str


class CloudMode:
    """One cloud's paths; ``wrap`` puts them before an application.

    Attributes:
        port: where the cloud expects the server.
    """

    port = 8080
    media_type = ""

    def wrap(self, app: App) -> App:
        """The application with these paths, and without all others."""

        async def in_cloud(scope: Message, receive: Receive, send: Send) -> None:
            target = self.target(scope)
            if isinstance(target, Refusal):
                await _refuse(target, send)
                return
            scope["method"], scope["path"] = target
            length = self._header_length(scope)
            if length is not None:
                scope["headers"] = [*scope["headers"], (_LENGTH, length)]
            await app(scope, receive, self._with_media_type(send))

        return in_cloud

    def target(self, scope: Message) -> tuple[str, str] | Refusal:
        """Method and path of the route that answers a request."""
        raise NotImplementedError

    def _header_length(self, scope: Message) -> bytes | None:
        kind = _header(scope, b"content-type").decode("latin-1")
        pattern = rf"{re.escape(self.media_type)}\s*;\s*json-header-size=([0-9]+)"
        match = re.fullmatch(pattern, kind.strip())
        return None if match is None else match[1].encode()

    def _with_media_type(self, send: Send) -> Send:
        async def send_on(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = dict(message["headers"])
                length = headers.pop(_LENGTH, None)
                if length is not None:
                    kind = f"{self.media_type};json-header-size={length.decode()}"
                    headers[b"content-type"] = kind.encode()
                    message["headers"] = list(headers.items())
            await send(message)

        return send_on


class SageMaker(CloudMode):
    """``/ping`` and ``/invocations``, by the environment that SageMaker sets.

    Args:
        model: that ``/invocations`` asks.
        action: ``infer``, ``generate`` or ``generate_stream``.
        health: ``ready`` or ``live``.

    Raises:
        ValueError: no such action or health.
    """

    media_type = "application/vnd.sagemaker-triton.binary+json"

    def __init__(
        self, model: str, *, action: str = "infer", health: str = "ready", port: int = 8080
    ) -> None:
        if action not in _ACTIONS:
            raise ValueError(
                f"SAGEMAKER_TRITON_INFERENCE_TYPE is {action!r}, "
                f"it must be one of {', '.join(_ACTIONS)}"
            )
        if health not in ("ready", "live"):
            raise ValueError(
                f"SAGEMAKER_TRITON_PING_MODE is {health!r}, it must be 'ready' or 'live'"
            )
        self.port = port
        self._invoke = f"/v2/models/{model}/{action}"
        self._health = f"/v2/health/{health}"

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Self:
        """As ``SAGEMAKER_*`` say.

        Raises:
            ValueError: the default model is missing, or a value makes no sense.
        """
        model = environment.get("SAGEMAKER_TRITON_DEFAULT_MODEL_NAME", "")
        if not model:
            raise ValueError(
                "SAGEMAKER_TRITON_DEFAULT_MODEL_NAME is not set: name the model for /invocations"
            )
        return cls(
            model,
            action=environment.get("SAGEMAKER_TRITON_INFERENCE_TYPE", "infer"),
            health=environment.get("SAGEMAKER_TRITON_PING_MODE", "ready"),
            port=_port(environment, "SAGEMAKER_BIND_TO_PORT"),
        )

    def target(self, scope: Message) -> tuple[str, str] | Refusal:
        """Every other path is 400, as Triton has it."""
        if scope["path"] == "/ping":
            return scope["method"], self._health
        if scope["path"] == "/invocations":
            return scope["method"], self._invoke
        return Refusal(400, "Bad Request")


class VertexAI(CloudMode):
    """A health and a predict route, by the environment that Vertex AI sets.

    The header ``X-Vertex-Ai-Triton-Redirect`` of a prediction asks for another path below
    ``/v2``, of those that change nothing.

    Args:
        model: that a prediction without the header asks.
        predict, health: paths.
    """

    media_type = "application/vnd.vertex-ai-triton.binary+json"

    #: What a redirect may ask for, and by which method it is asked.
    _redirects = (
        ("GET", re.compile(r"metrics|v2|v2/models/stats|v2/health/(live|ready)")),
        ("GET", re.compile(r"v2/models/[^/]+(/versions/[0-9]+)?(/(ready|config|stats))?")),
        ("POST", re.compile(r"v2/models/[^/]+(/versions/[0-9]+)?/infer|v2/repository/index")),
        ("GET", re.compile(r"v2/(system|cuda)sharedmemory(/region/[^/]+)?/status")),
    )
    _forbidden = re.compile(
        r"v2/((system|cuda)sharedmemory(/region/[^/]+)?/(un)?register"
        r"|repository/models/[^/]+/(un)?load)"
    )

    def __init__(self, model: str, *, predict: str, health: str, port: int = 8080) -> None:
        self.port = port
        self._model = model
        self._predict = predict
        self._health = health

    @classmethod
    def from_environment(cls, environment: Mapping[str, str], *, model: str) -> Self:
        """As ``AIP_*`` say.

        Raises:
            ValueError: a route is missing, or the port is none.
        """
        routes = [environment.get(f"AIP_{name}_ROUTE", "") for name in ("PREDICT", "HEALTH")]
        if not all(routes):
            raise ValueError(
                "AIP_PREDICT_ROUTE and AIP_HEALTH_ROUTE must be set, as Vertex AI does"
            )
        predict, health = routes
        return cls(model, predict=predict, health=health, port=_port(environment, "AIP_HTTP_PORT"))

    def target(self, scope: Message) -> tuple[str, str] | Refusal:
        """Every other path is 400, as Triton has it."""
        path, method = scope["path"], scope["method"]
        if path == self._health:
            return method, "/v2/health/ready"
        if path != self._predict:
            return Refusal(400, "Bad Request")
        redirect = _header(scope, b"x-vertex-ai-triton-redirect").decode("latin-1")
        if not redirect:
            return method, f"/v2/models/{self._model}/infer"
        if method != "POST":
            return Refusal(405, "Method Not Allowed")
        if self._forbidden.fullmatch(redirect):
            return Refusal(403, "Forbidden")
        for asked_by, pattern in self._redirects:
            if pattern.fullmatch(redirect):
                return asked_by, f"/{redirect}"
        return Refusal(400, "Bad Request")


def _header(scope: Message, name: bytes) -> bytes:
    for key, value in scope["headers"]:
        if key == name:
            found: bytes = value
            return found
    return b""


def _port(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "8080")
    if not (text.isascii() and text.isdigit() and int(text) < 1 << 16):
        raise ValueError(f"{name} is {text!r}, it must be a port")
    return int(text)


async def _refuse(refusal: Refusal, send: Send) -> None:
    body = encode({"error": refusal.message})
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
