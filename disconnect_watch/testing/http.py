"""Just enough HTTP/1.1 to ask, and to know a whole answer when it comes."""

import json as json_module
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPResponse
from typing import Any, cast

__all__ = ["Answer", "http_request", "read_answer"]


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer.

    Attributes:
        headers: names in lower case; of a repeated one the values are joined by commas.
    """

    status: int
    headers: dict[str, str]
    body: bytes


def http_request(
    method: str,
    path: str,
    *,
    json: Any = None,
    body: bytes = b"",
    headers: Mapping[str, str] | None = None,
) -> bytes:
    """The bytes of an HTTP/1.1 request.

    Args:
        method: such as "POST".
        path: with the query.
        json: a document that becomes the body.
        body: of the request, where it is no JSON.
        headers: more of them, or others than Host and Content-Length as they are here.
    """
    content = body if json is None else json_module.dumps(json).encode()
    fields = {"Host": "localhost"}
    if content or method in ("POST", "PUT", "PATCH"):
        fields["Content-Length"] = str(len(content))
    if json is not None:
        fields["Content-Type"] = "application/json"
    fields |= headers or {}
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + content


def read_answer(connection: Any, *, method: str) -> Answer:
    """Read one whole answer from what has a ``makefile``, as sockets have.

    Raises:
        HTTPException: it is no HTTP, or was cut short. An answer of neither a length nor
            chunks ends with the connection, and cannot be seen to be cut short.
        OSError: the connection broke, or nothing came in time.
    """
    response = HTTPResponse(cast("Any", connection), method=method)
    try:
        response.begin()
        body = response.read()
    finally:
        response.close()
    headers: dict[str, str] = {}
    for name, value in response.getheaders():
        known = headers.get(name.lower())
        headers[name.lower()] = value if known is None else f"{known}, {value}"
    return Answer(response.status, headers, body)
