"""Any HTTP endpoint: a request as the user writes it, and what its answer must be."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from disconnect_watch.stress.exchange import WrongAnswerError
from disconnect_watch.stress.http import HttpResponse, request_bytes
from disconnect_watch.stress.lines import MARK
from disconnect_watch.stress.target import Target

__all__ = ["TemplateAnswer", "TemplateExchange"]


@dataclass(frozen=True, slots=True)
class TemplateExchange:
    """Sends a request, ``{index}`` in it being the client's number.

    Args:
        target: of the page.
        method: of the request.
        headers: more of them, or others.
        body: of the request.
        leaver_body: of clients that leave, if there is something that takes the server longer.
        status: that an answer must have.
        expect: text that must be in it, ``{index}`` as above; None for anything.
    """

    target: Target
    method: str = "GET"
    headers: Mapping[str, str] = field(default_factory=dict)
    body: str = ""
    leaver_body: str | None = None
    status: int = 200
    expect: str | None = None

    @property
    def max_pieces(self) -> int:
        """See ``Exchange``. How an answer comes is the server's; it may be complete first."""
        return sys.maxsize

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
        number = str(index)
        return request_bytes(
            self.target.with_path((self.target.path or "/").replace(MARK, number)),
            body.replace(MARK, number).encode(),
            method=self.method,
            headers={name: value.replace(MARK, number) for name, value in self.headers.items()},
        )

    def answer(self, index: int) -> "TemplateAnswer":
        """See ``Exchange``."""
        expect = None if self.expect is None else self.expect.replace(MARK, str(index))
        return TemplateAnswer(self.status, expect)


class TemplateAnswer:
    """See ``Answer``; a piece is what one read had of the body."""

    def __init__(self, status: int, expect: str | None) -> None:
        self.num_pieces = 0
        self.is_complete = False
        self._status = status
        self._expect = expect
        self._body: list[bytes] = []
        self._response = HttpResponse()

    @property
    def is_reusable(self) -> bool:
        """See ``Answer``."""
        return self._response.is_kept_alive

    @property
    def text(self) -> str:
        """See ``Answer``."""
        return b"".join(self._body).decode(errors="replace")

    def feed(self, data: bytes) -> None:
        """See ``Answer``."""
        if body := self._response.feed(data):
            self._body.append(body)
            self.num_pieces += 1
        if not self._response.is_complete:
            return
        if self._response.status != self._status:
            raise WrongAnswerError(f"status {self._response.status}")
        if self._expect is not None and self._expect not in self.text:
            raise WrongAnswerError("the answer has not what must be in it")
        self.is_complete = True

    def end(self) -> None:
        """See ``Answer``."""
