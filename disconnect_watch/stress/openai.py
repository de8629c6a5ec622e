"""OpenAI's completions and chat completions, streamed or whole."""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from disconnect_watch.stress.documents import DocumentsAnswer, error_of
from disconnect_watch.stress.exchange import WrongAnswerError
from disconnect_watch.stress.http import request_bytes
from disconnect_watch.stress.target import Target, TargetError

__all__ = ["OpenAIExchange"]

_DONE = b"[DONE]"


@dataclass(frozen=True, slots=True)
class OpenAIExchange:
    """Posts a prompt to ``completions`` or ``chat/completions``.

    Args:
        target: of either endpoint.
        model: that is asked.
        prompt: everybody's.
        max_tokens: what clients that stay ask for.
        leaver_max_tokens: what clients that leave ask for, see ``GenerateExchange``.
        is_stream: whether server-sent events are asked for.
        headers: more of them, such as a key.

    Raises:
        TargetError: it is neither endpoint.

    Source: OpenAI's API reference, Completions and Chat.
    """

    target: Target
    model: str
    prompt: str = "The class"
    max_tokens: int = 32
    leaver_max_tokens: int = 100_000
    is_stream: bool = True
    headers: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self._path.endswith("/completions"):
            raise TargetError(
                f"cannot ask {self.target} for completions: give the URL of one of them, such as "
                f"http://{self.target.authority}/v1/completions"
            )

    @property
    def _path(self) -> str:
        return (self.target.path or "").partition("?")[0]

    @property
    def max_pieces(self) -> int:
        """See ``Exchange``."""
        return sys.maxsize if self.is_stream else 0

    @property
    def outlasts(self) -> bool:
        """See ``Exchange``."""
        return True

    @property
    def is_http(self) -> bool:
        """See ``Exchange``."""
        return True

    def request(self, index: int, *, leaves: bool) -> bytes:
        """See ``Exchange``. ``ignore_eos`` is vLLM's and SGLang's; others pass over it."""
        asked: dict[str, Any] = (
            {"messages": [{"role": "user", "content": self.prompt}]}
            if self._path.endswith("/chat/completions")
            else {"prompt": self.prompt}
        )
        document = asked | {
            "model": self.model,
            "max_tokens": self.leaver_max_tokens if leaves else self.max_tokens,
            "temperature": 0,
            "stream": self.is_stream,
            "ignore_eos": True,
        }
        return request_bytes(self.target, json.dumps(document).encode(), headers=self.headers)

    def answer(self, index: int) -> DocumentsAnswer:
        """See ``Exchange``."""
        return DocumentsAnswer(
            _text_of, is_stream=self.is_stream, end_mark=_DONE if self.is_stream else b""
        )


def _text_of(fields: Any) -> str:
    choices = fields.get("choices") if isinstance(fields, dict) else None
    if not isinstance(choices, list):
        raise WrongAnswerError(error_of(fields) or "the answer has no choices")
    # A last event with the usage has none.
    return "".join(_text_of_choice(choice) for choice in choices)


def _text_of_choice(choice: Any) -> str:
    if not isinstance(choice, dict):
        raise WrongAnswerError("a choice is no object")
    if isinstance(text := choice.get("text"), str):
        return text
    said = choice.get("delta") or choice.get("message") or {}
    content = said.get("content") if isinstance(said, dict) else None
    return content if isinstance(content, str) else ""
