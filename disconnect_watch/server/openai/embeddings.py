"""``/v1/embeddings``: vectors of texts, or of tokens."""

import base64
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from disconnect_watch.engine import Outcome
from disconnect_watch.engine.errors import EngineClosedError, QueueFullError
from disconnect_watch.errors import cut, shown
from disconnect_watch.server.errors import FailedError, OverloadedError, ProtocolError
from disconnect_watch.server.frontend import Frontend
from disconnect_watch.server.openai.common import json_response, read
from disconnect_watch.server.openai.errors import InvalidFieldError, UnknownModelError
from disconnect_watch.server.openai.sampling import prompts_of
from disconnect_watch.server.openai.schema import EmbeddingRequest
from disconnect_watch.server.outcome import raise_unless_finished

if TYPE_CHECKING:
    from disconnect_watch.backends.embedder import EmbedderBackend

__all__ = ["embeddings"]


async def embeddings(request: Request) -> Response:
    """A vector of each input, as numbers or as base64 of little-endian float32."""
    frontend, record, asked = await read(request, EmbeddingRequest)
    backend = _find(frontend, asked)
    is_base64 = asked.encoding_format == "base64"
    if not is_base64 and asked.encoding_format not in (None, "float"):
        raise InvalidFieldError(
            "encoding_format",
            f"encoding_format is {shown(asked.encoding_format)}, it must be float or base64",
        )
    inputs = prompts_of("input", asked.input)
    outcome: Outcome | None = None
    frontend.begin(record)
    try:
        with frontend.ledger.deadline(record, asked.timeout):
            made = await backend.embed(inputs, cancel=record.token)
        outcome = made.outcome
    except QueueFullError as error:
        raise OverloadedError(str(error)) from error
    except EngineClosedError as error:
        raise FailedError(str(error)) from error
    except ValueError as error:
        raise ProtocolError(str(error)) from error
    except BaseException as error:
        outcome = Outcome("failed", phase="prefill", error=f"{type(error).__name__}: {error}")
        raise
    finally:
        frontend.end(record, outcome)
    raise_unless_finished(made.outcome)
    vectors: list[Any] = (
        [base64.b64encode(vector.tobytes()).decode() for vector in made.vectors]
        if is_base64
        else made.vectors.tolist()
    )
    num_tokens = made.outcome.num_prompt_tokens
    return json_response(
        {
            "object": "list",
            "model": asked.model,
            "data": [
                {"object": "embedding", "index": index, "embedding": vector}
                for index, vector in enumerate(vectors)
            ],
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }
    )


def _find(frontend: Frontend, asked: EmbeddingRequest) -> "EmbedderBackend":
    backend = frontend.embedder
    if backend is None or backend.name != asked.model:
        raise UnknownModelError(
            f"the model '{cut(asked.model)}' makes no vectors, serve one with --embedding-model"
        )
    if asked.dimensions not in (None, backend.dim):
        raise InvalidFieldError(
            "dimensions",
            f"dimensions is {asked.dimensions}, vectors of this model have {backend.dim}",
        )
    return backend
