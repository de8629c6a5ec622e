"""The application: routes, and what becomes of an error."""

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.convertors import Convertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from disconnect_watch.server.abort import (
    abort_request,
    abort_requests,
    cancel_all,
    cancel_many,
    cancel_one,
)
from disconnect_watch.server.access import AccessLog, App
from disconnect_watch.server.answers import error_response
from disconnect_watch.server.cloud import CloudMode
from disconnect_watch.server.documents import encode
from disconnect_watch.server.errors import CancelledByPeer, RequestError
from disconnect_watch.server.frontend import Frontend
from disconnect_watch.server.generate import generate, generate_stream
from disconnect_watch.server.guard import DOOR_KEY, Gatekeeper, Guard
from disconnect_watch.server.live.routes import PAGES, live_events, live_page
from disconnect_watch.server.metrics import CONTENT_TYPE, Metrics
from disconnect_watch.server.openai.chat import chat_completions
from disconnect_watch.server.openai.completions import completions
from disconnect_watch.server.openai.embeddings import embeddings
from disconnect_watch.server.openai.models import list_models, retrieve_model
from disconnect_watch.server.openai.responses.routes import (
    cancel_response,
    count_input_tokens,
    create_response,
    delete_response,
    list_input_items,
    retrieve_response,
)
from disconnect_watch.server.openapi import openapi
from disconnect_watch.server.tracking import Tracking
from disconnect_watch.server.v2.routes import V2

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

    from disconnect_watch.server.disagg.role import NodeRole

__all__ = ["create_app", "create_metrics_app"]

Endpoint = Callable[[Request], Awaitable[Response]]

MODEL = "/v2/models/{model}"
VERSION = "/v2/models/{model}/versions/{version:digits}"


class Digits(Convertor[str]):
    """A number of any length as it is written; Python converts no more than 4,300 digits."""

    regex = "[0-9]+"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("digits", Digits())


def create_app(
    frontend: Frontend,
    metrics: Metrics,
    *,
    gatekeeper: Gatekeeper | None = None,
    cloud: CloudMode | None = None,
    tracing: "TracerProvider | None" = None,
    node: "NodeRole | None" = None,
) -> AccessLog:
    """The HTTP frontend as an ASGI application.

    Args:
        gatekeeper: knows who calls; None needs no keys, and has an admin's token of its own.
        cloud: whose paths are served instead of our own.
        tracing: makes a span of each request, see ``spans``.
        node: what this server does among others that prefill and decode.

    Run it under ``adapters.uvicorn.HttpTools``: the cancel tokens come from there, and
    without them a client that leaves is not noticed.
    """
    app = Starlette(
        routes=[
            _route("GET", "/metrics", scrape),
            _route("GET", "/health", health),
            *_live_routes(frontend),
            _route("GET", "/openapi.json", openapi),
            _route("GET", "/v1/models", list_models),
            _route("GET", "/v1/models/{model:path}", retrieve_model),
            _route("POST", "/v1/completions", completions),
            _route("POST", "/v1/chat/completions", chat_completions),
            _route("POST", "/v1/embeddings", embeddings),
            _route("POST", "/v1/responses", create_response),
            _route("POST", "/v1/responses/input_tokens", count_input_tokens),
            _route("GET", "/v1/responses/{response_id}", retrieve_response),
            _route("DELETE", "/v1/responses/{response_id}", delete_response),
            _route("GET", "/v1/responses/{response_id}/input_items", list_input_items),
            _route("POST", "/v1/responses/{response_id}/cancel", cancel_response),
            _route("POST", "/v1/requests/{request_id}/cancel", cancel_one),
            _route("DELETE", "/v1/requests/{request_id}", cancel_one),
            _route("POST", "/v1/requests/cancel", cancel_many),
            _route("POST", "/v1/admin/cancel_all", cancel_all),
            _route("POST", "/abort_request", abort_request),
            _route("POST", "/abort_requests", abort_requests),
            *(
                _route("POST", prefix + path, endpoint)
                for prefix in (MODEL, VERSION)
                for path, endpoint in (
                    ("/generate", generate),
                    ("/generate_stream", generate_stream),
                )
            ),
        ],
        exception_handlers={
            RequestError: answer_request_error,
            HTTPException: answer_http_error,
            Exception: answer_crash,
        },
    )
    app.router.redirect_slashes = False
    app.state.frontend = frontend
    app.state.metrics = metrics
    served: App = V2(app, frontend)
    if node is not None:
        # What a node needs loads numpy.
        from disconnect_watch.server.disagg.parting import parted

        served = parted(app, served, node)
    tracked = Tracking(served, frontend.ledger, timeout=frontend.options.request_timeout)
    guarded: App = Guard(tracked, gatekeeper or Gatekeeper())
    if cloud is not None:
        guarded = _but_for_admins(guarded, cloud.wrap(guarded))
    if tracing is not None:
        from disconnect_watch.server.spans import Spans

        guarded = Spans(guarded, tracing)
    return AccessLog(guarded)


def create_metrics_app(metrics: Metrics) -> ASGIApp:
    """The application of the metrics port: ``/metrics``, and a root to look whether it is there."""
    app = Starlette(
        routes=[_route("GET", "/metrics", scrape), _route("GET", "/", root)],
        exception_handlers={HTTPException: answer_http_error},
    )
    app.state.metrics = metrics
    return app


def _but_for_admins(ours: App, clouds: App) -> App:
    """A cloud's paths, and all of our own by the port and the socket of the admin.

    A cloud has no path to cancel by.
    """

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        chosen = ours if DOOR_KEY in scope.get("state", ()) else clouds
        await chosen(scope, receive, send)

    return app


def _live_routes(frontend: Frontend) -> list[Route]:
    # Triton has no such page.
    if not frontend.options.live_page or frontend.options.strict:
        return []
    return [
        *(_route("GET", path, live_page) for path in PAGES),
        _route("GET", "/live", live_events),
    ]


async def scrape(request: Request) -> Response:
    """All metrics, in Prometheus' text format."""
    metrics: Metrics = request.app.state.metrics
    return Response(await metrics.text(), headers={"content-type": CONTENT_TYPE})


async def health(request: Request) -> Response:
    """200 while a request sent now would be served, else 503; and why not."""
    frontend: Frontend = request.app.state.frontend
    stats = frontend.stats()
    status = "ready"
    if stats.is_draining:
        status = "shutting down"
    elif stats.num_overdue:
        status = "cancels without effect"
    elif not frontend.is_ready:
        status = "models not ready"
    document = {"status": status, "overdue_cancels": stats.num_overdue}
    code = 200 if status == "ready" else 503
    return Response(encode(document), code, media_type="application/json")


async def root(request: Request) -> Response:
    """Nothing, as Triton."""
    return Response(media_type="text/plain")


def _route(method: str, path: str, endpoint: Endpoint) -> Route:
    route = Route(path, endpoint, methods=[method])
    # Starlette lets HEAD come with GET; Triton answers it 405.
    route.methods = {method}
    return route


class Silence(Response):
    """The answer to a client that is not there."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        return


async def answer_request_error(request: Request, error: Exception) -> Response:
    """Status and message are the error's own."""
    assert isinstance(error, RequestError)
    if isinstance(error, CancelledByPeer):
        return Silence()
    return error_response(request.scope["path"], error.status, str(error), error)


async def answer_http_error(request: Request, error: Exception) -> Response:
    """No such path, or not with this method; in Triton's form."""
    assert isinstance(error, HTTPException)
    return error_response(request.scope["path"], error.status_code, error.detail)


async def answer_crash(request: Request, error: Exception) -> Response:
    """A bug of ours. uvicorn logs the traceback; the client learns nothing of it."""
    return error_response(request.scope["path"], 500, "internal error")
