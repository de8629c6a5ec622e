"""KServe v2's infer: tensors in, tensors out, one JSON document each."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from disconnect_watch.stress.documents import DocumentsAnswer, error_of
from disconnect_watch.stress.exchange import WrongAnswerError
from disconnect_watch.stress.http import request_bytes
from disconnect_watch.stress.target import Target

__all__ = ["InferExchange"]


@dataclass(frozen=True, slots=True)
class InferExchange:
    """Posts the same inputs for everybody to ``infer``.

    Args:
        target: of the endpoint.
        body: the document, with its ``inputs``.
        leaver_body: of clients that leave, if there is something that takes the model longer.
        headers: more of them, such as a key.

    Source: KServe, Open Inference Protocol v2, inference request.
    """

    target: Target
    body: str
    leaver_body: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def max_pieces(self) -> int:
        """See ``Exchange``."""
        return 0

    @property
    def outlasts(self) -> bool:
        """See ``Exchange``."""
        return self.leaver_body is not None

    @property
    def is_http(self) -> bool:
        """See ``Exchange``."""
        return True

    def request(self, index: int, *, leaves: bool) -> bytes:
        """See ``Exchange``."""
        body = self.leaver_body if leaves and self.leaver_body is not None else self.body
        return request_bytes(self.target, body.encode(), headers=self.headers)

    def answer(self, index: int) -> DocumentsAnswer:
        """See ``Exchange``."""
        return DocumentsAnswer(_outputs, is_stream=False)


def _outputs(fields: Any) -> str:
    outputs = fields.get("outputs") if isinstance(fields, dict) else None
    if not isinstance(outputs, list):
        raise WrongAnswerError(error_of(fields) or "the answer has no outputs")
    return json.dumps(outputs, sort_keys=True)
