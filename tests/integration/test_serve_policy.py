"""Policies of the uvicorn protocol: clients that half-close, vanish, or overfill the window."""

import asyncio
import contextlib
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from disconnect_watch import CancelToken, Reason, Watcher
from disconnect_watch.adapters import TOKEN_KEY
from tests.support.http import Client, request_bytes
from tests.support.net import open_fds, reset, vanish, wait_until
from tests.support.netns import cable
from tests.support.serve import STACKS, Stack, ThreadedServer

pytestmark = pytest.mark.parametrize("stack", STACKS, ids=str)

INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"
COMMENT = b"2\r\n:\n\r\n"


class Application:
    """Sends a head and pieces of a body, then waits to be released or left.

    Attributes:
        tokens: of the requests that were started.
        releases: what ends their waits.
        num_listening: how many wait to hear of the disconnect.
        heard: how many heard of it.
    """

    def __init__(self, *pieces: bytes, headers: "Headers" = ()) -> None:
        self.pieces = pieces
        self.headers = headers
        self.tokens: list[CancelToken] = []
        self.releases: list[asyncio.Event] = []
        self.num_listening = 0
        self.heard = 0
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        release = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        if self.pieces:
            await send(
                {"type": "http.response.start", "status": 200, "headers": list(self.headers)}
            )
        for piece in self.pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        self.releases.append(release)
        self.tokens.append(scope["state"][TOKEN_KEY])
        await receive()
        released = asyncio.create_task(release.wait())
        left = asyncio.create_task(receive())
        await asyncio.sleep(0)  # by which uvicorn would go on reading, had it stopped before
        self.num_listening += 1
        await asyncio.wait((released, left), return_when=asyncio.FIRST_COMPLETED)
        released.cancel()
        left.cancel()
        if not release.is_set():
            self.heard += 1
            return
        if not self.pieces:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"end"})

    def release(self) -> None:
        """Let the newest request end."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self.releases[-1].set)


@contextmanager
def serving(
    stack: Stack, app: Application, *, sock: socket.socket | None = None, **options: Any
) -> Iterator[tuple[ThreadedServer, Watcher]]:
    with (
        Watcher() as watcher,
        stack.serving(
            app,
            stack.configured(watcher=watcher, **options),
            sock=sock,
            timeout_keep_alive=1000,
        ) as server,
    ):
        yield server, watcher
        wait_until(lambda: watcher.stats().num_connections == 0)
        assert watcher.stats().num_armed == 0


def option_of_server(client: socket.socket, option: int) -> int:
    """An option of the server's end of the connection, which is in this process."""
    for fd, target in open_fds().items():
        if not target.startswith("socket:"):
            continue
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as end:
            if end.getpeername() == client.getsockname():
                return end.getsockopt(socket.SOL_SOCKET, option)
    return 0


def is_probed(client: socket.socket) -> bool:
    return option_of_server(client, socket.SO_KEEPALIVE) == 1


Headers = tuple[tuple[bytes, bytes], ...]
EVENT_STREAM: Headers = ((b"Content-Type", b"text/event-stream; charset=utf-8"),)
GZIP: Headers = ((b"content-encoding", b"gzip"),)
LENGTH: Headers = ((b"content-length", b"11"),)

#: Where the response is when the FIN comes: what was sent of it, and what must be written.
PLACES: dict[str, tuple[tuple[bytes, ...], Headers, bytes]] = {
    "before_the_head": ((), (), INTERIM),
    "in_an_event_stream": ((b"data: a\n\n", b"data: b\n"), EVENT_STREAM, COMMENT),
    "in_a_body": ((b"line\n",), (), b""),
    "within_a_line": ((b"data: a",), EVENT_STREAM, b""),
    "in_a_compressed_stream": ((b"\n",), EVENT_STREAM + GZIP, b""),
    "in_a_stream_with_a_length": ((b"data: a\n",), EVENT_STREAM + LENGTH, b""),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_half_closed_client_finds_no_harm_in_the_probe(stack: Stack, place: str) -> None:
    pieces, headers, probe = PLACES[place]
    app = Application(*pieces, headers=headers)
    with (
        serving(stack, app, half_close="probe") as (server, _),
        Client(server.port) as client,
    ):
        client.sock.sendall(request_bytes("/"))
        wait_until(lambda: app.tokens)
        client.sock.shutdown(socket.SHUT_WR)
        wait_until(lambda: is_probed(client.sock))
        if probe:
            client.read_until(probe)
        assert not app.tokens[0].cancelled
        app.release()
        rest = client.read_rest()
        assert rest.count(b"end") == 1
        assert INTERIM not in rest
        assert COMMENT not in rest


@pytest.mark.parametrize("place", ["before_the_head", "in_an_event_stream"])
def test_a_client_that_closed_is_gone_with_the_probe(stack: Stack, place: str) -> None:
    pieces, headers, _ = PLACES[place]
    app = Application(*pieces, headers=headers)
    with serving(stack, app, half_close="probe") as (server, _):
        with Client(server.port) as client:
            client.sock.sendall(request_bytes("/"))
            wait_until(lambda: app.tokens)
            # With nothing unread, so that the close is a FIN and no reset.
            if pieces:
                client.read_until(pieces[-1])
                client.read_until(b"\r\n")
        wait_until(lambda: app.tokens[0].cancelled)
        assert app.tokens[0].reason is Reason.RESET
        wait_until(lambda: app.heard == 1)


def test_nothing_is_written_to_http_1_0(stack: Stack) -> None:
    app = Application()
    with (
        serving(stack, app, half_close="probe") as (server, _),
        Client(server.port) as client,
    ):
        client.sock.sendall(b"GET / HTTP/1.0\r\n\r\n")
        wait_until(lambda: app.tokens)
        client.sock.shutdown(socket.SHUT_WR)
        wait_until(lambda: is_probed(client.sock))
        app.release()
        assert client.read_rest().startswith(b"HTTP/1.1 200")


def test_a_client_that_resets_after_its_half_close_is_gone(stack: Stack) -> None:
    app = Application(b"piece")
    with (
        serving(stack, app, half_close="probe") as (server, _),
        Client(server.port) as client,
    ):
        client.sock.sendall(request_bytes("/"))
        wait_until(lambda: app.tokens)
        client.sock.shutdown(socket.SHUT_WR)
        wait_until(lambda: is_probed(client.sock))
        assert not app.tokens[0].cancelled
        reset(client.sock)
        wait_until(lambda: app.tokens[0].cancelled)
        assert app.tokens[0].reason is Reason.RESET


def test_nothing_stays_armed_between_two_requests(stack: Stack) -> None:
    app = Application()
    with (
        serving(stack, app, half_close="probe") as (server, watcher),
        Client(server.port) as client,
    ):
        client.sock.sendall(request_bytes("/"))
        wait_until(lambda: app.tokens)
        app.release()
        assert client.read_response()[2] == b"end"
        wait_until(lambda: watcher.stats().num_armed == 0)
        assert watcher.stats().num_connections == 1


@pytest.mark.slow
def test_a_client_that_vanished_is_gone(stack: Stack) -> None:
    app = Application()
    with (
        serving(stack, app, vanish_after=2) as (server, _),
        Client(server.port) as client,
    ):
        client.sock.sendall(request_bytes("/"))
        wait_until(lambda: app.tokens)
        vanish(client.sock)
        wait_until(lambda: app.tokens[0].cancelled)
        assert app.tokens[0].reason is Reason.TIMED_OUT
        wait_until(lambda: app.heard == 1)


@pytest.mark.slow
def test_a_client_behind_a_cut_cable_is_gone(stack: Stack) -> None:
    app = Application(b"piece")
    with (
        cable() as link,
        link.listener() as sock,
        serving(stack, app, sock=sock, vanish_after=2),
        link.dial(sock) as client,
    ):
        client.sendall(request_bytes("/"))
        wait_until(lambda: app.tokens)
        link.cut()
        wait_until(lambda: app.tokens[0].cancelled)
        assert app.tokens[0].reason is Reason.TIMED_OUT
        wait_until(lambda: app.heard == 1)


#: More than uvicorn and an ordinary receive window take.
NUM_BEHIND = 1 << 19


def test_a_leave_behind_a_full_window_is_seen(stack: Stack) -> None:
    app = Application()
    with serving(stack, app, unblind=1 << 20) as (server, _):
        with Client(server.port) as client:
            client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
            client.sock.sendall(request_bytes("/"))
            wait_until(lambda: app.num_listening)
            client.sock.sendall(request_bytes("/", bytes(NUM_BEHIND)))
        wait_until(lambda: app.tokens[0].cancelled)
        assert app.tokens[0].reason is Reason.FIN
        assert len(app.tokens) == 1


def test_what_waited_behind_is_served_after_it_was_unblinded(stack: Stack) -> None:
    app = Application()
    with (
        serving(stack, app, unblind=1 << 20) as (server, _),
        Client(server.port) as client,
    ):
        client.sock.sendall(request_bytes("/"))
        wait_until(lambda: app.num_listening)
        client.sock.sendall(request_bytes("/", b"second"))
        wait_until(lambda: option_of_server(client.sock, socket.SO_RCVLOWAT) == 1 << 20)
        client.sock.sendall(request_bytes("/", b"third, and still in the kernel"))
        for num_started in (1, 2, 3):
            wait_until(lambda: len(app.tokens) == num_started)  # noqa: B023
            app.release()
            assert client.read_response()[2] == b"end"


def test_policies_that_cannot_be_kept_are_refused(stack: Stack) -> None:
    with pytest.raises(ValueError, match="vanish_after 1"):
        stack.configured(vanish_after=1)
    with pytest.raises(ValueError, match="unblind 0"):
        stack.configured(unblind=0)
