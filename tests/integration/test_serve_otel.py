"""``--trace-config``: a span a request, in which a cancel is an event."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from disconnect_watch.server import Frontend
from disconnect_watch.server.spans import tracer_provider
from tests.integration.test_serve_models import REQUESTS, infer_body, wait
from tests.support.command import running
from tests.support.function_models import FunctionModel, ModelTable, identity, tensor_config
from tests.support.net import wait_until
from tests.support.serve import Client, ThreadedServer, serving_frontend


@dataclass
class Traced:
    http: ThreadedServer
    model: FunctionModel
    exporter: InMemorySpanExporter = field(default_factory=InMemorySpanExporter)

    def span(self) -> ReadableSpan:
        """The one span that there is, or will be."""
        wait_until(self.exporter.get_finished_spans)
        (span,) = self.exporter.get_finished_spans()
        return span


@contextmanager
def traced() -> Iterator[Traced]:
    waiting = FunctionModel(tensor_config("waiting", "FP32"), wait)
    provider, exporter = TracerProvider(shutdown_on_exit=False), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    frontend = Frontend(models=ModelTable(waiting, identity()))
    with serving_frontend(frontend, tracing=provider, grace=0.2) as http:
        yield Traced(http, waiting, exporter)
    provider.shutdown()


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def test_a_request_is_a_span_below_its_clients() -> None:
    with traced() as served, Client(served.http.port) as client:
        client.post(
            "/v2/models/identity/infer",
            infer_body(1),
            traceparent="00-0123456789abcdef0123456789abcdef-0123456789abcdef-01",
        )
        _, headers, _ = client.read_response()
        span = served.span()
    assert (span.name, span.kind) == ("POST /v2/models/identity/infer", SpanKind.SERVER)
    assert attributes(span) == {
        "http.request.method": "POST",
        "url.path": "/v2/models/identity/infer",
        "http.response.status_code": 200,
        "disconnect_watch.request_id": headers["x-request-id"],
        "disconnect_watch.outcome": "finished",
    }
    assert span.parent is not None
    assert f"{span.parent.trace_id:x}" == "123456789abcdef0123456789abcdef"
    assert list(span.events) == []


def test_a_client_that_leaves_is_an_event_of_its_span() -> None:
    with traced() as served:
        with Client(served.http.port) as client:
            client.post("/v2/models/waiting/infer", REQUESTS["infer"][1])
            wait_until(lambda: served.model.num_open == 1)
        span = served.span()
    (event,) = span.events
    assert (event.name, dict(event.attributes or {})) == ("cancel", {"reason": "fin"})
    assert span.start_time is not None
    assert span.end_time is not None
    assert span.start_time <= event.timestamp <= span.end_time
    assert "http.response.status_code" not in attributes(span)


def test_who_asks_for_what_there_is_not_makes_no_name() -> None:
    with traced() as served, Client(served.http.port) as client:
        client.post("/v2/none/such", b"")
        assert client.read_response()[0] == 404
        span = served.span()
    assert (span.name, span.status.status_code) == ("POST", StatusCode.UNSET)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["mode=triton"], "'mode=triton' is none of mode=opentelemetry"),
        (["rate=0"], "'rate=0' is none of"),
        (["opentelemetry,url="], "is none of"),
        (["rate=5"], "needs mode=opentelemetry"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused(settings: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tracer_provider(settings)


def test_without_settings_there_are_no_spans() -> None:
    assert tracer_provider([]) is None


@pytest.mark.slow
def test_serve_sends_its_spans_to_a_collector() -> None:
    bodies: list[bytes] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002  its name
            pass

    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        thread = threading.Thread(target=collector.serve_forever)
        thread.start()
        try:
            settings = (
                "mode=opentelemetry",
                f"opentelemetry,url=http://127.0.0.1:{collector.server_port}/v1/traces",
                "opentelemetry,resource=service.name=mine",
            )
            options = [each for setting in settings for each in ("--trace-config", setting)]
            with running(*options) as server:
                with Client(server.port) as client:
                    client.post("/v2/repository/index", {})
                    assert client.read_response()[0] == 200
                server.process.terminate()
                assert server.wait() == 0  # what was not sent yet is sent at the end
        finally:
            collector.shutdown()
            thread.join(40)
    spans = []
    for body in bodies:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            named = {each.key: each.value.string_value for each in resource.resource.attributes}
            assert named["service.name"] == "mine"
            spans += [span.name for scope in resource.scope_spans for span in scope.spans]
    assert spans == ["POST /v2/repository/index"]
