"""OpenTelemetry: one span a request, in which a cancel is an event.

The span has its client's for a parent, where ``traceparent`` names one, and is the current one
for what is done within. Needs the extra ``otel``.

Source: OpenTelemetry's semantic conventions for HTTP servers; of the options, Triton's
``--trace-config``.
"""

import time
from collections.abc import Sequence

from opentelemetry.propagate import extract
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span, SpanKind, StatusCode, use_span

from disconnect_watch.errors import cut
from disconnect_watch.server.access import (
    RECORD_KEY,
    App,
    Message,
    Receive,
    RequestRecord,
    Scope,
    Send,
)

__all__ = ["Spans", "tracer_provider"]

_SETTINGS = "mode=opentelemetry, opentelemetry,url=URL, opentelemetry,resource=NAME=VALUE, rate=N"


def tracer_provider(settings: Sequence[str]) -> TracerProvider | None:
    """What makes spans as ``--trace-config`` says; None where it names no mode.

    Args:
        settings: one of ``_SETTINGS`` each. Of spans that have no parent, one in ``rate`` is
            kept. Without a URL, the exporter's own variables say where they go
            (``OTEL_EXPORTER_OTLP_ENDPOINT`` and others).

    Raises:
        ValueError: says which setting is none.
    """
    mode, url, rate = "", None, 1
    resource = {"service.name": "disconnect_watch"}
    for setting in settings:
        name, _, value = setting.partition("=")
        if setting == "mode=opentelemetry":
            mode = value
        elif name == "opentelemetry,url" and value:
            url = value
        elif name == "opentelemetry,resource" and "=" in value:
            key, _, text = value.partition("=")
            resource[key] = text
        elif name == "rate" and value.isascii() and value.isdigit() and int(value) > 0:
            rate = int(value)
        else:
            raise ValueError(f"--trace-config {cut(setting)!r} is none of {_SETTINGS}")
    if not mode:
        if settings:
            raise ValueError("--trace-config needs mode=opentelemetry, which is the one there is")
        return None
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    provider = TracerProvider(
        sampler=ParentBased(TraceIdRatioBased(1 / rate)), resource=Resource.create(resource)
    )
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)))
    return provider


class Spans:
    """ASGI middleware inside ``AccessLog``."""

    def __init__(self, app: App, provider: TracerProvider) -> None:
        self._app = app
        self._tracer = provider.get_tracer("disconnect_watch")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record: RequestRecord = scope["state"][RECORD_KEY]
        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        method, path = scope["method"], scope["path"]
        span = self._tracer.start_span(
            method,
            extract(headers),
            SpanKind.SERVER,
            {
                "http.request.method": method,
                "url.path": path,
                "disconnect_watch.request_id": record.request_id,
            },
        )
        status = 0

        async def send_on(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            with use_span(span):
                await self._app(scope, receive, send_on)
        finally:
            if status not in (0, 404):
                span.update_name(f"{method} {path}")  # of a path that is known, so there are few
            _finish(span, record, status)
            span.end()


def _finish(span: Span, record: RequestRecord, status: int) -> None:
    if status:
        span.set_attribute("http.response.status_code", status)
    if record.outcome is not None:
        span.set_attribute("disconnect_watch.outcome", record.outcome.kind)
    if status >= 500:
        span.set_status(StatusCode.ERROR)
    token = record.token
    reason, at_ns = token.reason, token.cancelled_at_ns
    if reason is not None:
        ago_ns = time.monotonic_ns() - at_ns if at_ns else 0
        span.add_event("cancel", {"reason": str(reason)}, time.time_ns() - ago_ns)
