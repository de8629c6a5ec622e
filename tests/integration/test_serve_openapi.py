"""The OpenAPI document is what is served, and nothing that it allows breaks the server."""

import contextlib
import inspect
import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from starlette.routing import Route

from disconnect_watch.backends.embedder import EmbedderBackend
from disconnect_watch.server import Frontend, create_app
from disconnect_watch.server.guard import Access, access_to
from disconnect_watch.server.openai.responses import routes as responses
from disconnect_watch.server.v2 import routes as v2
from tests.support.backends import ScriptedBackend
from tests.support.bert import random_embedder
from tests.support.serve import Serving, metrics_of, packaged_engine, request_app, serving_engine

#: Below ``/v2``, ends of paths whose answers have no body.
EMPTY = ("live", "ready", "register", "unregister", "load", "unload")
#: What Schemathesis holds each answer to: media type and body are those of the document.
CHECKS = ("content_type_conformance", "response_schema_conformance")


@pytest.fixture
def serving() -> Iterator[Serving]:
    backend = EmbedderBackend(random_embedder(), name="bert")
    try:
        with serving_engine(packaged_engine(), embedder=backend) as serving:
            yield serving
    finally:
        backend.close()


@pytest.mark.asyncio
async def test_every_route_is_in_the_document_and_nothing_else() -> None:
    response = await request_app(ScriptedBackend(), "GET", "/openapi.json")
    assert response.status_code == 200
    document = response.json()
    listed = {
        (method.upper(), path)
        for path, operations in document["paths"].items()
        for method in operations
    }
    frontend = Frontend(ScriptedBackend())
    inner: Any = create_app(frontend, metrics_of(frontend))
    while not hasattr(inner, "routes"):
        inner = next(
            getattr(inner, name) for name in ("app", "_app", "_rest") if hasattr(inner, name)
        )
    served = {
        (method, route.path.replace(":path", "").replace(":digits", ""))
        for route in inner.routes
        if isinstance(route, Route)
        for method in route.methods or ()
    }
    below = {(method, path) for path, route in v2.paths() for method in route.methods}
    assert listed == {each for each in served if not each[1].startswith("/v2")} | below
    assert {each for each in served if each[1].startswith("/v2")} <= below
    for path, operations in document["paths"].items():
        for operation in operations.values():
            assert operation["summary"]
            is_open = access_to(path.replace("{version}", "1")) is Access.OPEN
            assert ("security" in operation) is not is_open, path
            is_told = "content" in operation["responses"]["200"]
            is_empty = path.startswith("/v2/") and path.rpartition("/")[2] in EMPTY
            assert is_told is not is_empty, path
    pending = {
        path
        for path, operations in document["paths"].items()
        if any("202" in operation["responses"] for operation in operations.values())
    }
    assert pending == {
        "/v1/requests/{request_id}/cancel",
        "/v1/requests/{request_id}",
        "/v1/requests/cancel",
        "/v1/admin/cancel_all",
        "/v1/responses/{response_id}/cancel",
    }
    names = set(document["components"]["schemas"])
    assert set(re.findall(r"#/components/schemas/(\w+)", response.text)) == names
    for name in ("ChatRequest", "CompletionRequest", "EmbeddingRequest", "CancelMany"):
        assert name in document["components"]["schemas"]


@pytest.mark.asyncio
async def test_every_query_that_a_route_reads_is_in_the_document() -> None:
    document = (await request_app(ScriptedBackend(), "GET", "/openapi.json")).json()
    listed = {
        parameter["name"]
        for operations in document["paths"].values()
        for operation in operations.values()
        for parameter in operation.get("parameters", ())
        if parameter["in"] == "query"
    }
    source = inspect.getsource(responses)
    read = re.findall(
        r'(?:_(?:number|is_true|place)\(request, |query_params\.get\()"(\w+)"', source
    )
    assert len(read) == 7
    assert listed == set(read)


def test_every_template_leads_to_a_route() -> None:
    templates = {path for path, _ in v2.paths()}
    assert {"/v2/models/{model}/versions/{version}/infer", "/v2/repository/index"} <= templates
    assert "/v2/models/{model}/versions/{version}/trace/setting" not in templates
    assert len(templates) == len(v2._FIXED) + 2 * len(v2._OF_MODEL) - 1 + len(v2._TEMPLATES)


def broken(responses: dict[str, Any], status: int, text: str) -> str | None:
    """What is wrong with an answer, if something is.

    Args:
        responses: what the document names of the operation.
    """
    if status < 500:
        return None
    named = responses.get(str(status), {})
    if "x-error" in named and re.search(named["x-error"], json.loads(text)["error"]):
        return None
    return f"{status} {text[:300]}"


def test_only_failures_that_the_document_names_with_their_cause_are_the_requests() -> None:
    named = {"500": {"x-error": "failed to parse"}, "default": {}}
    assert broken(named, 500, '{"error": "failed to parse the request"}') is None
    assert broken(named, 404, "") is None
    for status, text in ((500, '{"error": "internal error"}'), (503, '{"error": "x"}')):
        assert broken(named, status, text)


def with_names(document: dict[str, Any]) -> dict[str, Any]:
    """The document with the models that there are, so that requests come as far as these."""
    for operations in document["paths"].values():
        for operation in operations.values():
            for parameter in operation.get("parameters", ()):
                if parameter["name"] == "model":
                    parameter["schema"] = {"enum": ["tiny"]}
    for schema in document["components"]["schemas"].values():
        if "model" in schema.get("properties", ()):
            schema["properties"]["model"] = {"enum": ["tiny", "bert"]}
    return document


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "num_examples", [3, pytest.param(40, marks=pytest.mark.exhaustive)], ids=["some", "many"]
)
def test_nothing_that_the_document_allows_breaks_the_server(
    serving: Serving, num_examples: int
) -> None:
    schemathesis = pytest.importorskip("schemathesis")
    openapi_checks = pytest.importorskip("schemathesis.specs.openapi.checks")
    base = f"http://127.0.0.1:{serving.port}"
    headers = {"Authorization": f"Bearer {serving.gatekeeper.admin_token}"}
    with httpx.Client(base_url=base, headers=headers, timeout=60) as client:
        document = with_names(client.get("/openapi.json").json())
        schema = schemathesis.openapi.from_dict(document)
        checks = [getattr(openapi_checks, name) for name in CHECKS]
        found: list[str] = []
        asked = 0
        for result in schema.get_all_operations():
            operation = result.ok()
            if operation.path == "/live":
                continue  # its answer has no end
            for mode in schemathesis.GenerationMode:

                @settings(
                    max_examples=num_examples,
                    deadline=None,
                    derandomize=True,
                    database=None,
                    phases=[Phase.generate],
                    suppress_health_check=list(HealthCheck),
                )
                @given(case=operation.as_strategy(generation_mode=mode))
                def ask(case: Any) -> None:
                    nonlocal asked
                    asked += 1
                    case.headers = {**(case.headers or {}), **headers}
                    response = case.call(base_url=base, timeout=60)
                    responses = document["paths"][case.path][case.method.lower()]["responses"]
                    wrong = broken(responses, response.status_code, response.text)
                    asked_for = json.dumps([dict(case.headers), case.body], default=str)
                    is_deadline = response.status_code == 504 and "imeout" in asked_for
                    if not wrong:
                        try:
                            case.validate_response(response, checks=checks)
                        except schemathesis.errors.FailureGroup as error:
                            where = f"{case.method} {case.path}"
                            found.extend(f"{where}: {each}"[:500] for each in error.exceptions)
                    elif not is_deadline:
                        body = json.dumps(case.body, default=str)[:300]
                        found.append(f"{case.method} {case.formatted_path} {body}: {wrong}")

                with contextlib.suppress(Unsatisfiable):  # a mode that an operation has not
                    ask()
        assert not found, "\n".join(dict.fromkeys(found))
        assert asked > 50
        assert client.get("/health").status_code == 200
