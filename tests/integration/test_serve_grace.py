"""The uvicorn protocols with a grace: work that may go on for a while after its client left."""

import asyncio
import gc
import logging
import socket
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from disconnect_watch import CancelToken, Reason, Watcher, grace
from disconnect_watch.adapters import TOKEN_KEY
from disconnect_watch.adapters.uvicorn._watched import WatchedProtocol
from disconnect_watch.watcher import default_watcher
from tests.support.http import Client, request_bytes
from tests.support.net import reset, wait_until
from tests.support.serve import STACKS, Stack, ThreadedServer

pytestmark = pytest.mark.parametrize("stack", STACKS, ids=str)

LONG = grace(1000)
SHORT = 0.05


class Work:
    """An application that listens while it works, as frameworks do, and writes when told to.

    Attributes:
        tokens: of the requests that were started.
        heard: the messages that ``receive()`` gave after the request.
        num_ended: how many requests returned.
        num_written: pieces of their bodies.
    """

    def __init__(self) -> None:
        self.tokens: list[CancelToken] = []
        self.heard: list[str] = []
        self.num_ended = 0
        self.num_written = 0
        self.loop: asyncio.AbstractEventLoop | None = None
        self._go_on: asyncio.Queue[bytes | None] | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.loop = asyncio.get_running_loop()
        orders = self._go_on = asyncio.Queue[bytes | None]()
        await receive()
        self.tokens.append(scope["state"][TOKEN_KEY])
        listening = asyncio.create_task(self._listen(receive))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while (piece := await orders.get()) is not None:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            self.num_written += 1
        if not listening.done():
            await send({"type": "http.response.body", "body": b"end"})
        await listening
        self.num_ended += 1

    async def _listen(self, receive: Any) -> None:
        self.heard.append((await receive())["type"])
        self._order(None)

    def write(self, piece: bytes) -> None:
        """Let the newest request send this; nothing may be written after the end."""
        assert self.loop is not None
        self.loop.call_soon_threadsafe(self._order, piece)

    def finish(self) -> None:
        """Let the newest request end."""
        assert self.loop is not None
        self.loop.call_soon_threadsafe(self._order, None)

    def is_lost_by_writing(self, watcher: Watcher) -> Callable[[], bool]:
        """For ``wait_until``: the client's kernel answers what is written by a reset."""

        num_asked = self.num_written

        def is_lost() -> bool:
            nonlocal num_asked
            # One at a time: of five that come at once to a reset socket asyncio warns.
            if self.num_written == num_asked:
                num_asked += 1
                self.write(b"piece")
            return not watcher.stats().num_connections

        return is_lost

    def _order(self, piece: bytes | None) -> None:
        assert self._go_on is not None
        self._go_on.put_nowait(piece)


@contextmanager
def working(
    stack: Stack, on_disconnect: Any, **options: Any
) -> Iterator[tuple[Work, ThreadedServer, Watcher]]:
    work = Work()
    with (
        Watcher() as watcher,
        stack.serving(
            work,
            stack.configured(watcher=watcher, on_disconnect=on_disconnect, **options),
            timeout_keep_alive=1000,
        ) as server,
    ):
        yield work, server, watcher
        wait_until(lambda: watcher.stats().num_connections == 0)
        assert watcher.stats().num_armed == 0


def by_fin(client: Client) -> None:
    client.sock.close()


def by_half_close(client: Client) -> None:
    client.sock.shutdown(socket.SHUT_WR)


def by_reset(client: Client) -> None:
    reset(client.sock)


WAYS = {"fin": by_fin, "half_close": by_half_close, "reset": by_reset}


def has_been_told(watcher: Watcher) -> bool:
    signals = watcher.stats().num_signals
    return bool(signals[Reason.FIN] or signals[Reason.RESET])


@pytest.mark.parametrize("way", WAYS)
def test_work_that_ends_within_its_grace_hears_nothing(
    stack: Stack, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.WARNING),
        working(stack, LONG) as (work, server, watcher),
        Client(server.port) as client,
    ):
        client.sock.sendall(request_bytes("/"))
        client.read_until(b"\r\n\r\n")
        wait_until(lambda: work.tokens)
        WAYS[way](client)
        wait_until(lambda: has_been_told(watcher))
        if way != "half_close":
            wait_until(work.is_lost_by_writing(watcher))
        # More than what a closed transport lets pass in silence.
        for _ in range(8):
            work.write(b"piece")
        assert not work.tokens[0].cancelled
        assert not work.heard
        work.finish()
        if way == "half_close":
            rest = client.read_rest()
            assert rest.count(b"piece") == 8
            assert rest.endswith(b"end\r\n0\r\n\r\n")
        wait_until(lambda: work.num_ended == 1)
        assert not work.tokens[0].cancelled
    assert caplog.records == []


@pytest.mark.parametrize("way", WAYS)
def test_work_is_cancelled_when_its_grace_is_over(stack: Stack, way: str) -> None:
    with working(stack, grace(SHORT)) as (work, server, _), Client(server.port) as client:
        client.sock.sendall(request_bytes("/"))
        client.read_until(b"\r\n\r\n")
        wait_until(lambda: work.tokens)
        left_at = time.monotonic()
        WAYS[way](client)
        wait_until(lambda: work.num_ended == 1)
        assert work.heard == ["http.disconnect"]
        (token,) = work.tokens
        # Where the owner's read takes the error first, a reset may read as a FIN.
        assert token.reason in {Reason.FIN, Reason.RESET if way == "reset" else Reason.FIN}
        assert token.cancelled_at is not None
        # A timer of uvloop's counts whole milliseconds, from the beginning of its turn.
        assert token.cancelled_at - left_at > SHORT - 0.01


def test_a_write_that_waits_for_the_client_ends_with_the_grace(stack: Stack) -> None:
    with working(stack, grace(SHORT)) as (work, server, _), Client(server.port) as client:
        client.sock.sendall(request_bytes("/"))
        client.read_until(b"\r\n\r\n")
        wait_until(lambda: work.tokens)
        for _ in range(100):
            work.write(bytes(1 << 17))  # more than both ends hold
        by_half_close(client)
        wait_until(lambda: work.num_ended == 1)
        assert work.tokens[0].reason is Reason.FIN


@pytest.mark.parametrize("way", WAYS)
def test_requests_behind_one_in_its_grace_are_never_started(
    stack: Stack, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.WARNING),
        working(stack, LONG) as (work, server, watcher),
        Client(server.port) as client,
    ):
        client.sock.sendall(request_bytes("/"))
        client.read_until(b"\r\n\r\n")
        wait_until(lambda: work.tokens)
        client.sock.sendall(2 * request_bytes("/"))
        WAYS[way](client)
        wait_until(lambda: has_been_told(watcher))
        if way != "half_close":
            wait_until(work.is_lost_by_writing(watcher))
            for _ in range(8):
                work.write(b"piece")
        work.finish()
        if way == "half_close":
            assert client.read_rest().endswith(b"end\r\n0\r\n\r\n")
        wait_until(lambda: work.num_ended == 1)
        wait_until(lambda: watcher.stats().num_connections == 0)
        assert len(work.tokens) == 1
    assert caplog.records == []


def test_connection_of_work_that_ended_in_its_grace_is_freed(stack: Stack) -> None:
    protocols: list[weakref.ref[Any]] = []

    class Referenced(WatchedProtocol):
        on_disconnect = LONG

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            protocols.append(weakref.ref(self))

    work = Work()
    before = default_watcher().stats().num_signals[Reason.FIN]
    gc.collect()
    gc.disable()
    try:
        with stack.serving(work, stack.mixed(Referenced)) as server:
            with Client(server.port) as client:
                client.sock.sendall(request_bytes("/"))
                client.read_until(b"\r\n\r\n")
                by_half_close(client)
                wait_until(lambda: default_watcher().stats().num_signals[Reason.FIN] > before)
                work.finish()
                client.read_rest()
            wait_until(lambda: protocols[0]() is None)
    finally:
        gc.enable()


def test_next_request_of_a_client_that_stays_has_a_grace_of_its_own(stack: Stack) -> None:
    with working(stack, LONG) as (work, server, _), Client(server.port) as client:
        for num_started in (1, 2):
            client.sock.sendall(request_bytes("/"))
            wait_until(lambda: len(work.tokens) == num_started)  # noqa: B023
            work.finish()
            client.read_until(b"end\r\n0\r\n\r\n")
            wait_until(lambda: work.num_ended == num_started)  # noqa: B023
        # The response was whole, so that was no news of a client.
        assert work.heard == ["http.disconnect"] * 2
        assert not any(token.cancelled for token in work.tokens)


def test_what_is_neither_cancel_nor_a_grace_is_refused(stack: Stack) -> None:
    with pytest.raises(ValueError, match="on_disconnect 3"):
        stack.configured(on_disconnect=3)
