"""``/openapi.json``: what is served, made of the tables that serve it.

Paths, methods and summaries are those of the routes, bodies those of the types that requests are
decoded by, and who may go there is what the guard lets in. Only what plain functions parse, below
``/v2``, is described here.

Source: OpenAPI 3.1; KServe v2 and Triton's extensions of it for ``/v2``.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from disconnect_watch.server import abort
from disconnect_watch.server import openapi_answers as answers
from disconnect_watch.server.documents import encode
from disconnect_watch.server.guard import Access, access_to
from disconnect_watch.server.openai.chat import chat_completions
from disconnect_watch.server.openai.completions import completions
from disconnect_watch.server.openai.embeddings import embeddings
from disconnect_watch.server.openai.responses import routes as responses
from disconnect_watch.server.openai.responses.schema import ResponseRequest
from disconnect_watch.server.openai.schema import ChatRequest, CompletionRequest, EmbeddingRequest
from disconnect_watch.server.v2 import routes as v2
from disconnect_watch.server.v2.metadata import VERSION

__all__ = ["document_of", "openapi"]

#: By endpoint: what its body is decoded as.
_BODIES: Mapping[Callable[..., Any], type[msgspec.Struct]] = {
    completions: CompletionRequest,
    chat_completions: ChatRequest,
    embeddings: EmbeddingRequest,
    responses.create_response: ResponseRequest,
    responses.count_input_tokens: ResponseRequest,
    abort.cancel_one: abort.CancelOne,
    abort.cancel_many: abort.CancelMany,
    abort.cancel_all: abort.CancelAll,
    abort.abort_request: abort.SGLangAbort,
    abort.abort_requests: abort.CancelMany,
}
#: Whose body may be left out.
_OPTIONAL = {abort.cancel_one}

#: By endpoint: what may stand behind the question mark.
_QUERIES: Mapping[Callable[..., Any], Mapping[str, dict[str, Any]]] = {
    responses.retrieve_response: {
        "stream": {"type": "boolean"},
        "starting_after": {"type": "integer", "minimum": 0},
    },
    responses.cancel_response: {"wait": {"type": "integer", "minimum": 0, "maximum": 60}},
    responses.list_input_items: {
        "limit": {"type": "integer", "minimum": 1, "maximum": responses.MAX_PAGE},
        "order": {"enum": ["asc", "desc"]},
        "after": {"type": "string"},
        "before": {"type": "string"},
    },
}

_TENSOR = {
    "type": "object",
    "required": ["name", "shape", "datatype"],
    "properties": {
        "name": {"type": "string"},
        "shape": {"type": "array", "items": {"type": "integer", "minimum": 0}},
        "datatype": {"type": "string"},
        "parameters": {"type": "object"},
        "data": {"type": "array"},
    },
}
_INFER = {
    "type": "object",
    "required": ["inputs"],
    "properties": {
        "id": {"type": "string"},
        "parameters": {"type": "object"},
        "inputs": {"type": "array", "items": _TENSOR},
        "outputs": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["name"],
                "properties": {"name": {"type": "string"}, "parameters": {"type": "object"}},
            },
        },
    },
}
_GENERATE = {
    "type": "object",
    "required": ["text_input"],
    "properties": {
        "id": {"type": "string"},
        "text_input": {"type": "string"},
        "parameters": {"type": "object"},
    },
}
#: By the last part of a path below ``/v2``.
_V2_BODIES = {"infer": _INFER, "generate": _GENERATE, "generate_stream": _GENERATE}

_ERRORS = {
    "OpenAIError": {
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["message", "type", "param", "code"],
                "properties": {
                    "message": {"type": "string"},
                    "type": {"type": "string"},
                    "param": {"type": ["string", "null"]},
                    "code": {"type": ["string", "null"]},
                },
            }
        },
    },
    "TritonError": {
        "type": "object",
        "required": ["error"],
        "properties": {"error": {"type": "string"}},
    },
}

Operation = tuple[str, str, Callable[..., Any]]


async def openapi(request: Request) -> Response:
    """What is served, as an OpenAPI document."""
    document = document_of(request.app.routes)
    return Response(encode(document), media_type="application/json")


def document_of(routes: Iterable[BaseRoute]) -> dict[str, Any]:
    """The document for an application with these routes, and those below ``/v2``."""
    _, schemas = msgspec.json.schema_components(
        list(dict.fromkeys(_BODIES.values())), ref_template="#/components/schemas/{name}"
    )
    paths: dict[str, dict[str, Any]] = {}
    for method, path, endpoint in (*_of_application(routes), *_of_v2()):
        paths.setdefault(path, {})[method.lower()] = _operation(method, path, endpoint)
    return {
        "openapi": "3.1.0",
        "info": {"title": "disconnect_watch", "version": VERSION},
        "paths": paths,
        "components": {
            "schemas": {**schemas, **answers.SCHEMAS, **_ERRORS},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _of_application(routes: Iterable[BaseRoute]) -> Iterator[Operation]:
    for route in routes:
        if isinstance(route, Route) and not route.path.startswith("/v2"):
            path = re.sub(r"\{(\w+):\w+\}", r"{\1}", route.path)
            for method in route.methods or ():
                yield method, path, route.endpoint


def _of_v2() -> Iterator[Operation]:
    for path, route in v2.paths():
        for method in route.methods:
            yield method, path, route.handler


def _operation(method: str, path: str, endpoint: Callable[..., Any]) -> dict[str, Any]:
    is_v2 = path.startswith("/v2")
    error = "TritonError" if is_v2 or not path.startswith("/v1/") else "OpenAIError"
    schema = {"$ref": f"#/components/schemas/{error}"}
    key = path.rpartition("/")[2] if is_v2 else endpoint.__name__
    operation: dict[str, Any] = {
        "summary": (endpoint.__doc__ or "").partition("\n")[0].rstrip("."),
        "operationId": re.sub(r"\W+", "_", f"{method.lower()}{path}").strip("_"),
        "responses": {
            **_successes(key, is_v2),
            **_failures(key, is_v2, schema),
        },
    }
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": _of_parameter(name)}
        for name in re.findall(r"\{(\w+)\}", path)
    ]
    parameters += [
        {"name": name, "in": "query", "required": False, "schema": values}
        for name, values in _QUERIES.get(endpoint, {}).items()
    ]
    if access_to(path) is Access.USE and method == "POST":
        parameters += [
            {"name": "X-Request-Id", "in": "header", "required": False, "schema": _NAME},
            {"name": "X-Request-Timeout", "in": "header", "required": False, "schema": _SECONDS},
        ]
    if parameters:
        operation["parameters"] = parameters
    if access_to(path) is not Access.OPEN:
        operation["security"] = [{"key": []}]
    if (body := _body(method, path, endpoint)) is not None:
        operation["requestBody"] = {
            "required": endpoint in _BODIES and endpoint not in _OPTIONAL,
            "content": {"application/json": {"schema": body}},
        }
    return operation


def _successes(key: str, is_v2: bool) -> dict[str, Any]:
    content = {kind: {"schema": schema} for kind, schema in answers.ANSWERS.get(key, {}).items()}
    body = {"content": content} if content else {}
    successes = {"200": {"description": "what was asked for", **body}}
    if key in answers.PENDING and not is_v2:
        successes["202"] = {"description": "it is to come: the flag is set", **body}
    return successes


def _failures(key: str, is_v2: bool, schema: dict[str, Any]) -> dict[str, Any]:
    content = {"content": {answers.JSON: {"schema": schema}}}
    named = answers.FAILURES.get(key, {}) if is_v2 else {}
    if key == "health":
        # It tells the same where the answer is no.
        return {"503": {"description": "not ready", **_successes(key, is_v2)["200"]}}
    return {
        **{
            str(status): {
                "description": f"the request's own fault, as Triton tells it: {pattern}",
                "x-error": pattern,
                **content,
            }
            for status, pattern in named.items()
        },
        "default": {
            "description": "why not; 499 for what was cancelled, 504 for what was out of time",
            **content,
        },
    }


_NAME = {"type": "string", "pattern": "^[!-~]{1,128}$"}
_SECONDS = {"type": "number", "minimum": 0, "maximum": 86_400}


def _of_parameter(name: str) -> dict[str, Any]:
    return {"type": "string", "pattern": "^[0-9]+$"} if name == "version" else {"type": "string"}


def _body(method: str, path: str, endpoint: Callable[..., Any]) -> dict[str, Any] | None:
    if (kind := _BODIES.get(endpoint)) is not None:
        return {"$ref": f"#/components/schemas/{kind.__name__}"}
    if method != "POST" or not path.startswith("/v2"):
        return None
    return _V2_BODIES.get(path.rpartition("/")[2], {"type": "object"})
