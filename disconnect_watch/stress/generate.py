"""The generate endpoints: one JSON document, or a stream of server-sent events."""

import json
import sys
from dataclasses import dataclass

from disconnect_watch.stress.exchange import WrongAnswerError
from disconnect_watch.stress.http import HttpResponse
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

    Raises:
        TargetError: it is neither endpoint.
    """

    target: Target
    prompt: str = "The class"
    max_tokens: int = 32
    leaver_max_tokens: int = 100_000

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

    def request(self, index: int, *, leaves: bool) -> bytes:
        """See ``Exchange``."""
        document = {
            "text_input": self.prompt,
            "max_tokens": self.leaver_max_tokens if leaves else self.max_tokens,
            "ignore_eos": True,
        }
        body = json.dumps(document).encode()
        head = (
            f"POST {self.target.path} HTTP/1.1\r\n"
            f"Host: {self.target.authority}\r\n"
            "Content-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    def answer(self, index: int) -> "GenerateAnswer":
        """See ``Exchange``."""
        return GenerateAnswer(is_stream=self.is_stream)


class GenerateAnswer:
    """See ``Answer``; a piece is an event, or the one document."""

    def __init__(self, *, is_stream: bool) -> None:
        self.num_pieces = 0
        self.is_complete = False
        self._is_stream = is_stream
        self._response = HttpResponse()
        self._rest = b""

    def feed(self, data: bytes) -> None:
        """See ``Answer``."""
        self._rest += self._response.feed(data)
        is_complete = self._response.is_complete
        if self._response.status not in (0, 200):
            if is_complete:
                raise WrongAnswerError(f"status {self._response.status}")
        elif self._is_stream:
            *events, self._rest = self._rest.split(b"\n\n")
            for event in events:
                if event.startswith(b":"):
                    continue  # a comment, by which some servers see whether anybody is there
                if not event.startswith(b"data:"):
                    raise WrongAnswerError("an event is no server-sent event with data")
                self._take(event.removeprefix(b"data:"))
            if is_complete and (self._rest or not self.num_pieces):
                raise WrongAnswerError("the stream ends in mid-event, or without any")
        elif is_complete:
            self._take(self._rest)
        self.is_complete = is_complete

    def end(self) -> None:
        """See ``Answer``."""

    def _take(self, document: bytes) -> None:
        try:
            fields = json.loads(document)
        except ValueError as error:
            raise WrongAnswerError("the answer is no JSON") from error
        if not isinstance(fields, dict) or not isinstance(fields.get("text_output"), str):
            error_text = fields.get("error") if isinstance(fields, dict) else None
            raise WrongAnswerError(error_text or "the answer has no text_output")
        self.num_pieces += 1
