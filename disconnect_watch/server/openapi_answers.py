"""What ``/openapi.json`` says of answers: their schemas, and which fail for a named cause.

A test asks a server for all that the document allows, and holds what it answers to this.

Source: OpenAI's API; KServe v2 and Triton's extensions of it for ``/v2``.
"""

from typing import Any

__all__ = ["ANSWERS", "FAILURES", "JSON", "PENDING", "SCHEMAS", "SSE"]

JSON, SSE, TEXT, HTML = "application/json", "text/event-stream", "text/plain", "text/html"

Schema = dict[str, Any]


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _object(**properties: Schema) -> Schema:
    """An object that has at least these."""
    return {"type": "object", "required": sorted(properties), "properties": properties}


def _without(schema: Schema, *names: str) -> Schema:
    """The same, where these may be absent."""
    return {**schema, "required": [each for each in schema["required"] if each not in names]}


def _array(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _or_null(kind: str) -> Schema:
    return {"type": [kind, "null"]}


_TEXT: Schema = {"type": "string"}
_INT: Schema = {"type": "integer", "minimum": 0}
_BOOL: Schema = {"type": "boolean"}
_OBJECT: Schema = {"type": "object"}
_FINISH: Schema = {"enum": ["stop", "length"]}
#: Whatever reads a stream has its events apart, in no form that all agree on.
_EVENTS: Schema = {}

_TENSOR = _object(name=_TEXT, datatype=_TEXT, shape=_array({"type": "integer"}))
_TOKENS = _object(prompt_tokens=_INT, completion_tokens=_INT, total_tokens=_INT)

#: The components of the document beside those of requests.
SCHEMAS: dict[str, Schema] = {
    "Model": _object(id=_TEXT, object={"const": "model"}, created=_INT, owned_by=_TEXT),
    "ModelList": _object(object={"const": "list"}, data=_array(_ref("Model"))),
    # Of a model that takes tensors nobody here knows the tokens.
    "Completion": _without(
        _object(
            id=_TEXT,
            object={"const": "text_completion"},
            created=_INT,
            model=_TEXT,
            choices=_array(
                _object(index=_INT, text=_TEXT, logprobs=_or_null("object"), finish_reason=_FINISH)
            ),
            usage=_TOKENS,
        ),
        "usage",
    ),
    "ChatCompletion": _object(
        id=_TEXT,
        object={"const": "chat.completion"},
        created=_INT,
        model=_TEXT,
        choices=_array(
            _object(
                index=_INT,
                message=_object(role={"const": "assistant"}, content=_TEXT),
                logprobs=_or_null("object"),
                finish_reason=_FINISH,
            )
        ),
        usage=_TOKENS,
    ),
    "Embeddings": _object(
        object={"const": "list"},
        model=_TEXT,
        data=_array(
            _object(
                object={"const": "embedding"},
                index=_INT,
                embedding={"anyOf": [_array({"type": "number"}), _TEXT]},
            )
        ),
        usage=_object(prompt_tokens=_INT, total_tokens=_INT),
    ),
    "Response": _object(
        id={"type": "string", "pattern": "^resp_[0-9a-f]{32}$"},
        object={"const": "response"},
        created_at=_INT,
        model=_TEXT,
        status={
            "enum": ["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
        },
        background=_BOOL,
        output=_array(_OBJECT),
        usage=_or_null("object"),
        error=_or_null("object"),
        incomplete_details=_or_null("object"),
        previous_response_id=_or_null("string"),
        metadata=_OBJECT,
    ),
    "ResponseDeleted": _object(id=_TEXT, object={"const": "response"}, deleted={"const": True}),
    "InputItems": _object(
        object={"const": "list"},
        data=_array(_object(id=_TEXT, type=_TEXT)),
        first_id=_or_null("string"),
        last_id=_or_null("string"),
        has_more=_BOOL,
    ),
    "InputTokens": _object(object={"const": "response.input_tokens"}, input_tokens=_INT),
    "Cancelled": _object(
        request_id=_TEXT,
        status={
            "enum": ["cancelled", "already_cancelled", "already_finished", "not_found", "pending"]
        },
        phase={"enum": ["waiting", "prefill", "decode", None]},
        blocks_freed=_INT,
        latency_ms={"type": "number", "minimum": 0},
    ),
    "CancelledAll": _object(results=_array(_ref("Cancelled"))),
    "Health": _object(status=_TEXT, overdue_cancels=_INT),
    "ServerMetadata": _object(name=_TEXT, version=_TEXT, extensions=_array(_TEXT)),
    "ModelMetadata": _object(
        name=_TEXT,
        versions=_array(_TEXT),
        platform=_TEXT,
        inputs=_array(_TENSOR),
        outputs=_array(_TENSOR),
    ),
    "Statistics": _object(model_stats=_array(_object(name=_TEXT, version=_TEXT))),
    "Inferred": _object(model_name=_TEXT, model_version=_TEXT, outputs=_array(_TENSOR)),
    "Generated": _object(model_name=_TEXT, model_version=_TEXT),
    "RepositoryIndex": _array(_object(name=_TEXT)),
    "Regions": _array(_object(name=_TEXT)),
}

#: By the name of an endpoint, or below ``/v2`` by the end of a path: what a success has, by its
#: media type. Where there is none its body is empty.
ANSWERS: dict[str, dict[str, Schema]] = {
    "scrape": {TEXT: _TEXT},
    "live_page": {HTML: _TEXT, "text/css": _TEXT, "text/javascript": _TEXT},
    "live_events": {SSE: _EVENTS},
    "openapi": {JSON: _OBJECT},
    "health": {JSON: _ref("Health")},
    "list_models": {JSON: _ref("ModelList")},
    "retrieve_model": {JSON: _ref("Model")},
    "completions": {JSON: _ref("Completion"), SSE: _EVENTS},
    "chat_completions": {JSON: _ref("ChatCompletion"), SSE: _EVENTS},
    "embeddings": {JSON: _ref("Embeddings")},
    "create_response": {JSON: _ref("Response"), SSE: _EVENTS},
    "retrieve_response": {JSON: _ref("Response"), SSE: _EVENTS},
    "cancel_response": {JSON: _ref("Response")},
    "delete_response": {JSON: _ref("ResponseDeleted")},
    "list_input_items": {JSON: _ref("InputItems")},
    "count_input_tokens": {JSON: _ref("InputTokens")},
    "cancel_one": {JSON: _ref("Cancelled")},
    "cancel_many": {JSON: _ref("CancelledAll")},
    "cancel_all": {JSON: _ref("CancelledAll")},
    "abort_request": {JSON: _ref("CancelledAll")},
    "abort_requests": {JSON: _ref("CancelledAll")},
    "v2": {JSON: _ref("ServerMetadata")},
    "{model}": {JSON: _ref("ModelMetadata")},
    "{version}": {JSON: _ref("ModelMetadata")},
    "infer": {JSON: _ref("Inferred"), "application/octet-stream": _TEXT},
    "generate": {JSON: _ref("Generated")},
    "generate_stream": {SSE: _EVENTS},
    "config": {JSON: _OBJECT},
    "stats": {JSON: _ref("Statistics")},
    "setting": {JSON: _OBJECT},
    "logging": {JSON: _OBJECT},
    "status": {JSON: _ref("Regions")},
    "index": {JSON: _ref("RepositoryIndex")},
}

#: Endpoints that answer 202 where an effect is still to come, with the same.
PENDING = ("cancel_one", "cancel_many", "cancel_all", "cancel_response")

_NO_JSON = "failed to parse|[Uu]nable to parse"
_NO_SHARED_MEMORY = "shared memory is (disabled|not supported)"
_NO_LOADING = "not allowed"
_OTHER_REPOSITORY = "'repository_name' specification is not supported"

#: By the end of a path below ``/v2``: failures of the server's kind that are the request's own, as
#: Triton has them: what the error says, as a regular expression, by status. What is not here is a
#: failure of the server.
FAILURES: dict[str, dict[int, str]] = {
    "infer": {500: _NO_JSON, 501: "takes text, ask it by generate"},
    "generate": {500: _NO_JSON},
    "generate_stream": {500: _NO_JSON},
    "setting": {500: _NO_JSON},
    "logging": {500: _NO_JSON},
    "status": {501: _NO_SHARED_MEMORY},
    "index": {500: _NO_JSON, 501: _OTHER_REPOSITORY},
    "load": {500: _NO_JSON, 501: _OTHER_REPOSITORY, 503: _NO_LOADING},
    "unload": {500: _NO_JSON, 501: _OTHER_REPOSITORY, 503: _NO_LOADING},
    "register": {500: _NO_JSON, 501: _NO_SHARED_MEMORY},
    "unregister": {500: _NO_JSON, 501: _NO_SHARED_MEMORY},
}
