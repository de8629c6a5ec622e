"""One HTTP/1.1 response, parsed as its bytes come."""

import httptools

from disconnect_watch.stress.exchange import WrongAnswerError

__all__ = ["HttpResponse"]


class HttpResponse:
    """What came of a response.

    Attributes:
        status: 0 before its head.
        is_complete: whether its last byte was seen. Never of one that lasts until the
            server closes, since that could as well be cut short.
    """

    def __init__(self) -> None:
        self.status = 0
        self.is_complete = False
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

    def on_body(self, data: bytes) -> None:
        self._body += data

    def on_message_complete(self) -> None:
        if 100 <= self.status < 200:
            # An interim response (RFC 9110 15.2): the final one is still to come.
            self._num_begun -= 1
        else:
            self.is_complete = True
