"""How likely tokens were, in the two forms that OpenAI's API has for it."""

from collections.abc import Sequence
from typing import Any

from disconnect_watch.backends import Backend
from disconnect_watch.engine import TokenLogprobs

__all__ = ["chat_logprobs", "completion_logprobs"]


def chat_logprobs(backend: Backend, tokens: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """The ``logprobs`` of a choice of a chat."""
    return {
        "content": [
            {
                **_entry(backend, token.token_id, token.logprob),
                "top_logprobs": [_entry(backend, *likely) for likely in token.top],
            }
            for token in tokens
        ],
        "refusal": None,
    }


def completion_logprobs(
    backend: Backend, tokens: Sequence[TokenLogprobs], *, offset: int = 0
) -> dict[str, Any]:
    """The ``logprobs`` of a choice of a completion.

    Args:
        offset: characters of the answer before these tokens.
    """
    texts = [_text(backend, token.token_id) for token in tokens]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": texts,
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [
            {_text(backend, token_id): logprob for token_id, logprob in token.top}
            for token in tokens
        ],
        "text_offset": offsets,
    }


def _entry(backend: Backend, token_id: int, logprob: float) -> dict[str, Any]:
    raw = backend.token_bytes(token_id)
    return {"token": _decode(raw), "logprob": logprob, "bytes": list(raw)}


def _text(backend: Backend, token_id: int) -> str:
    return _decode(backend.token_bytes(token_id))


def _decode(raw: bytes) -> str:
    """A token may be part of a character only."""
    return raw.decode(errors="replace")
