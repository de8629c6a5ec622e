"""An error in the words of the API that was called."""

from starlette.responses import Response

from disconnect_watch.server.documents import encode
from disconnect_watch.server.openai.errors import error_document

__all__ = ["error_response"]


def error_response(
    path: str, status: int, message: str, error: Exception | None = None
) -> Response:
    """An answer that tells of an error: OpenAI's form below ``/v1/``, Triton's elsewhere."""
    is_openai = path.startswith("/v1/")
    document = error_document(status, message, error) if is_openai else {"error": message}
    response = Response(encode(document), status, media_type="application/json")
    response.headers.update(getattr(error, "headers", {}))
    if getattr(error, "is_final", False):
        response.headers["x-should-retry"] = "false"
    return response
