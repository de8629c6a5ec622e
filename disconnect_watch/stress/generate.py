"""Triton's generate endpoints: one JSON document, or a stream of server-sent events."""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from disconnect_watch.stress.documents import DocumentsAnswer, error_of
from disconnect_watch.stress.exchange import WrongAnswerError
from disconnect_watch.stress.http import request_bytes
from disconnect_watch.stress.target import Target, TargetError

__all__ = ["GenerateAnswer", "GenerateExchange"]


@dataclass(frozen=True, slots=True)
class GenerateExchange:
    """Posts a prompt to ``generate`` or ``generate_stream``.

    Args:
        target: of either endpoint.
        prompt: everybody's.
        max_tokens: what clients that stay ask for.
        leaver_max_tokens: what clients that leave ask for. So much that the server
            can't be done with it before they leave: what it then runs to its end
            counts against it.
        headers: more of them, such as a key.

    Raises:
        TargetError: it is neither endpoint.
    """

    target: Target
    prompt: str = "The class"
    max_tokens: int = 32
    leaver_max_tokens: int = 100_000
    headers: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self._path.endswith(("/generate", "/generate_stream")):
            raise TargetError(
                f"cannot ask {self.target} to generate: give the URL of a generate or "
                f"generate_stream, such as http://{self.target.authority}"
                "/v2/models/NAME/generate_stream"
            )

    @property
    def _path(self) -> str:
        return (self.target.path or "").partition("?")[0]

    @property
    def is_stream(self) -> bool:
        """Whether events come back."""
        return self._path.endswith("_stream")

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
        """See ``Exchange``."""
        document = {
            "text_input": self.prompt,
            "max_tokens": self.leaver_max_tokens if leaves else self.max_tokens,
            "ignore_eos": True,
        }
        return request_bytes(self.target, json.dumps(document).encode(), headers=self.headers)

    def answer(self, index: int) -> "GenerateAnswer":
        """See ``Exchange``."""
        return GenerateAnswer(is_stream=self.is_stream)


class GenerateAnswer(DocumentsAnswer):
    """See ``Answer``; a piece is an event, or the one document."""

    def __init__(self, *, is_stream: bool) -> None:
        super().__init__(_text_output, is_stream=is_stream)


def _text_output(fields: Any) -> str:
    text = fields.get("text_output") if isinstance(fields, dict) else None
    if not isinstance(text, str):
        raise WrongAnswerError(error_of(fields) or "the answer has no text_output")
    return text
