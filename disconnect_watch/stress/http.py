"""HTTP/1.1: the bytes of a request, and one response, parsed as its bytes come."""

from collections.abc import Mapping

import httptools

from disconnect_watch.stress.exchange import WrongAnswerError
from disconnect_watch.stress.target import Target
from disconnect_watch.testing.http import http_request

__all__ = ["HttpResponse", "request_bytes"]


def request_bytes(
    target: Target, body: bytes, *, method: str = "POST", headers: Mapping[str, str] | None = None
) -> bytes:
    """A request to the target's page; JSON unless the headers say otherwise."""
    fields = {"Host": target.authority}
    if body:
        fields["Content-Type"] = "application/json"
    return http_request(
        method, target.path or "/", body=body, headers={**fields, **(headers or {})}
    )


class HttpResponse:
    """What came of a response.

    Attributes:
        status: 0 before its head.
        is_complete: whether its last byte was seen. Never of one that lasts until the
            server closes, since that could as well be cut short.
        is_kept_alive: whether the connection may carry another request behind it.
    """

    def __init__(self) -> None:
        self.status = 0
        self.is_complete = False
        self.is_kept_alive = False
        self._num_begun = 0
        self._body = b""
        self._parser = httptools.HttpResponseParser(self)

    def feed(self, data: bytes) -> bytes:
        """Take what was received; returns the bytes of the body that are in it.

        Raises:
            WrongAnswerError: it is no HTTP, or goes on behind its end.
        """
        if self.is_complete:
            raise WrongAnswerError("more came than the answer")
        self._body = b""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            raise WrongAnswerError("the answer is no HTTP") from error
        if self._num_begun > 1:
            raise WrongAnswerError("more came than the answer")
        return self._body

    # Called by the parser. What is raised here would come out wrapped, so nothing is.

    def on_message_begin(self) -> None:
        self._num_begun += 1

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        self.is_kept_alive = self._parser.should_keep_alive()

    def on_body(self, data: bytes) -> None:
        self._body += data

    def on_message_complete(self) -> None:
        if 100 <= self.status < 200:
            # An interim response (RFC 9110 15.2): the final one is still to come.
            self._num_begun -= 1
        else:
            self.is_complete = True
