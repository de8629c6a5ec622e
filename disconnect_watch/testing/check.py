"""Assertions: a server cancels the work of a client that leaves, and serves one that stays."""

import asyncio
import contextlib
import ssl
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from http.client import HTTPException

from disconnect_watch.testing.client import LeavingClient
from disconnect_watch.testing.http import Answer
from disconnect_watch.testing.probe import Probe, count_of
from disconnect_watch.testing.target import Server, Target, target_of
from disconnect_watch.testing.ways import Way, default_ways

__all__ = ["NotCancelledError", "assert_cancels", "assert_survives"]

_PERIOD = 0.001


class NotCancelledError(AssertionError):
    """A client left, and its work went on.

    Attributes:
        noticed: seconds from the leave to the cancel, by way.
        unnoticed: what was seen instead, by way.
    """

    def __init__(
        self, message: str, *, noticed: dict[Way, float], unnoticed: dict[Way, str]
    ) -> None:
        super().__init__(message)
        self.noticed = noticed
        self.unnoticed = unnoticed


@dataclass(frozen=True, slots=True)
class _Exchange:
    """What each client asks, and when it is time to leave."""

    target: Target
    request: bytes
    started: Probe | None
    num_bytes: int
    context: ssl.SSLContext | None
    patience: float

    def connect(self) -> LeavingClient:
        return LeavingClient(self.target, timeout=self.patience, context=self.context)

    def begin(self, client: LeavingClient) -> None:
        """Send the request, and see the server begin with it."""
        before = 0 if self.started is None else count_of(self.started)
        client.send(self.request)
        if self.started is not None and not _comes_true(
            partial(_is_more, self.started, before), self.patience
        ):
            raise AssertionError(
                f"{self.target.text} began no request within {self.patience:g} s: 'started' "
                f"stayed at {before!r}{_hint_at_loop()}"
            )
        if self.num_bytes:
            try:
                client.read(self.num_bytes)
            except (OSError, EOFError) as error:
                raise AssertionError(
                    f"{self.target.text} sent {client.num_received} of {self.num_bytes} bytes "
                    f"that were to come before its client leaves: {error!r}{_hint_at_loop()}"
                ) from error


def assert_cancels(
    server: Server,
    request: bytes,
    *,
    cancelled: Probe,
    within: float,
    started: Probe | None = None,
    num_bytes: int = 0,
    ways: Iterable[Way | str] | None = None,
    context: ssl.SSLContext | None = None,
    patience: float = 10.0,
) -> dict[Way, float]:
    """Assert that a server cancels the work of clients that leave, one for each way.

    The server must run elsewhere: on another thread or in another process. In a test that runs
    on a loop, call this by ``await asyncio.to_thread(assert_cancels, ...)``.

    Args:
        server: see ``target_of``.
        request: its bytes, see ``http_request``; what it asks for must outlast ``within``.
        cancelled: how many requests were cancelled so far, see ``count_of``; it is to grow.
            What says only yes or no serves a single way.
        within: seconds from the leave.
        started: how many requests were begun; the client leaves once that has grown. Without
            it, and without ``num_bytes``, the client leaves right behind its request, and a
            server that sees it in time need not begin, nor so have anything to cancel.
        num_bytes: of the answer that the client reads before it leaves.
        ways: those to try, in the order of ``Way``; without them ``default_ways``.
        context: for https, see ``LeavingClient``.
        patience: seconds for what precedes a leave.

    Returns:
        Seconds from the leave to the cancel, by way.

    Raises:
        NotCancelledError: which ways were not noticed, and what was seen. All are tried first.
        AssertionError: the work did not begin, or was cancelled before anybody left.
        ValueError: a way that such a client cannot take, no way at all, no time, or a
            yes-or-no ``cancelled`` that says yes already.
        TypeError: a request that is no bytes.
        OSError: nobody listens there.
    """
    __tracebackhide__ = True
    target = target_of(server)
    _check_request(request)
    if within <= 0:
        raise ValueError(f"within {within:g}: give the seconds that a cancel may take")
    to_try = _in_order(ways, target)
    if not to_try:
        raise ValueError("ways: none is given, so nothing would be tried; leave it out for all")
    exchange = _Exchange(target, request, started, num_bytes, context, patience)
    noticed: dict[Way, float] = {}
    unnoticed: dict[Way, str] = {}
    for way in to_try:
        before = _count_before(cancelled, way)
        with exchange.connect() as client:
            exchange.begin(client)
            if _is_more(cancelled, before):
                raise AssertionError(
                    f"{target.text} cancelled a request before its client left by {way}"
                )
            client.leave(way, request=request)
            left = time.monotonic()
            if _comes_true(partial(_is_more, cancelled, before), within):
                noticed[way] = time.monotonic() - left
            else:
                unnoticed[way] = _what_was_seen(client, before)
    if unnoticed:
        message = _describe(target, noticed, unnoticed, within)
        raise NotCancelledError(message, noticed=noticed, unnoticed=unnoticed)
    return noticed


def assert_survives(
    server: Server,
    request: bytes,
    *,
    within: float = 10.0,
    among: Iterable[Way | str] = (),
    started: Probe | None = None,
    is_right: Callable[[Answer], object] | None = None,
    context: ssl.SSLContext | None = None,
) -> Answer:
    """Assert that a client that stays gets its whole answer, over HTTP.

    Args:
        server: as of ``assert_cancels``.
        request: its bytes.
        within: seconds that it may wait for the next bytes.
        among: the ways in which other clients, of the same request, leave meanwhile.
        started: as of ``assert_cancels``.
        is_right: what must be true of the answer; without it, a status below 400.
        context: for https, see ``LeavingClient``.

    Returns:
        The answer.

    Raises:
        AssertionError: no whole answer came, or not the right one.
        ValueError: a way that such a client cannot take.
        TypeError: a request that is no bytes.
        OSError: nobody listens there.
    """
    __tracebackhide__ = True
    target = target_of(server)
    _check_request(request)
    exchange = _Exchange(target, request, started, 0, context, within)
    with exchange.connect() as stays, contextlib.ExitStack() as others:
        exchange.begin(stays)
        for way in _in_order(among, target):
            leaves = others.enter_context(exchange.connect())
            exchange.begin(leaves)
            leaves.leave(way, request=request)
        try:
            answer = stays.answer()
        except (OSError, HTTPException) as error:
            raise AssertionError(
                f"{target.text} left a client that stays without its whole answer: {error!r} "
                f"after {stays.num_received} bytes{_hint_at_loop()}"
            ) from error
        if not (answer.status < 400 if is_right is None else is_right(answer)):
            raise AssertionError(f"{target.text} answered a client that stays by {answer!r}")
        return answer


def _check_request(request: object) -> None:
    if not isinstance(request, bytes | bytearray | memoryview):
        raise TypeError(
            f"request {request!r}: give bytes, such as http_request(method, path) makes"
        )


def _in_order(ways: Iterable[Way | str] | None, target: Target) -> list[Way]:
    if ways is None:
        return list(default_ways(family=target.family, is_tls=target.is_tls))
    return sorted({Way(way) for way in ways}, key=list(Way).index)


def _is_more(probe: Probe, before: int) -> bool:
    return count_of(probe) > before


def _comes_true(predicate: Callable[[], bool], within: float) -> bool:
    deadline = time.monotonic() + within
    while not predicate():
        if time.monotonic() >= deadline:
            return False
        time.sleep(_PERIOD)
    return True


def _count_before(cancelled: Probe, way: Way) -> int:
    before = count_of(cancelled)
    if before is True:
        raise ValueError(
            f"'cancelled' is true already, before a client leaves by {way}: give a number that "
            "grows, such as lambda: app.num_cancelled, or one way to leave"
        )
    return before


def _what_was_seen(client: LeavingClient, before: int) -> str:
    """What the client and the probe can say of a leave that went unnoticed."""
    if client.is_ended:
        return (
            f"the server had ended the connection before, after {client.num_received} bytes: "
            "ask for longer work"
        )
    seen = f"'cancelled' stayed at {before!r}"
    if client.num_received:
        seen += f", {client.num_received} bytes of the answer had come"
    return seen


def _describe(
    target: Target, noticed: dict[Way, float], unnoticed: dict[Way, str], within: float
) -> str:
    num_ways = len(noticed) + len(unnoticed)
    lines = [
        f"{target.text} did not notice {len(unnoticed)} of {num_ways} ways to leave "
        f"within {within:g} s{_hint_at_loop()}"
    ]
    lines += [f"  {way} ({way.in_words}): {seen}" for way, seen in unnoticed.items()]
    if noticed:
        times = (f"{way} after {1e3 * seconds:.0f} ms" for way, seconds in noticed.items())
        lines.append(f"  noticed: {', '.join(times)}")
    return "\n".join(lines)


def _hint_at_loop() -> str:
    """The likeliest reason, where it may be one: the test itself keeps the server from running."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return ""
    return (
        " (called on a running event loop, on which nothing else runs meanwhile: use "
        "'await asyncio.to_thread(...)')"
    )
