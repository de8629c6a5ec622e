"""Puts every request to a model into the ledger, from its first byte to its last."""

import math
import re

from disconnect_watch.errors import shown
from disconnect_watch.server.access import RECORD_KEY, App, Receive, RequestRecord, Scope, Send
from disconnect_watch.server.answers import error_response
from disconnect_watch.server.errors import ProtocolError
from disconnect_watch.server.guard import ACCESS_KEY, HEADERS_KEY, Access
from disconnect_watch.server.ledger import RequestLedger

__all__ = ["Tracking"]

_NAME = re.compile(r"[!-~]{1,128}")


class Tracking:
    """ASGI middleware inside ``Guard``: ledger and deadline of requests that work is done for.

    Args:
        timeout: seconds for a request that brings no limit of its own; None for no limit.
    """

    def __init__(self, app: App, ledger: RequestLedger, *, timeout: float | None) -> None:
        self._app = app
        self._ledger = ledger
        self._timeout = timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (
            scope["type"] != "http"
            or scope["method"] != "POST"
            or scope["state"][ACCESS_KEY] is not Access.USE
        ):
            await self._app(scope, receive, send)
            return
        state = scope["state"]
        record: RequestRecord = state[RECORD_KEY]
        headers = state[HEADERS_KEY]
        name, seconds = headers.get(b"x-request-id"), headers.get(b"x-request-timeout")
        asked = None
        try:
            if name:
                record.client_id = _name_of(name)
            if seconds is not None:
                asked = _seconds_of(seconds)
        except ProtocolError as error:
            answer = error_response(scope["path"], error.status, str(error), error)
            await answer(scope, receive, send)
            return
        if asked is None or (self._timeout is not None and self._timeout < asked):
            asked = self._timeout
        record.timeout = asked
        self._ledger.begin(record)
        try:
            if asked is None:
                await self._app(scope, receive, send)
                return
            # An engine looks at the time itself; this is for what is done elsewhere.
            with self._ledger.deadline(record):
                await self._app(scope, receive, send)
        finally:
            self._ledger.end(record)


def _name_of(raw: bytes) -> str:
    name = raw.decode("latin-1")
    if not _NAME.fullmatch(name):
        raise ProtocolError(
            f"X-Request-Id is {shown(name)}, it must be 1 to 128 visible ASCII characters"
        )
    return name


def _seconds_of(raw: bytes) -> float:
    text = raw.decode("latin-1")
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= 86_400:
        raise ProtocolError(
            f"X-Request-Timeout is {shown(text)}, it must be seconds from 0 to 86400"
        )
    return seconds
