"""Connections that become WebSockets under our uvicorn protocols: not watched any more."""

import gc
import socket
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from websockets.sync.client import ClientConnection, connect

from disconnect_watch.adapters import TOKEN_KEY
from disconnect_watch.adapters.uvicorn._watched import WatchedProtocol
from disconnect_watch.watcher import Watcher
from tests.support.http import Client
from tests.support.net import wait_until
from tests.support.serve import STACKS, Stack

pytestmark = [
    pytest.mark.parametrize("stack", STACKS, ids=str),
    pytest.mark.parametrize("library", ["websockets-sansio", "wsproto"]),
]


class Echo:
    """Answers requests, and sends back what comes over a WebSocket.

    Attributes:
        heard: the codes with which WebSockets disconnected.
        tokens: what the scopes of WebSockets held of ours.
    """

    def __init__(self) -> None:
        self.heard: list[int] = []
        self.tokens: list[object] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"plain"})
            return
        self.tokens.append(scope["state"].get(TOKEN_KEY))
        await receive()
        await send({"type": "websocket.accept"})
        while (message := await receive())["type"] == "websocket.receive":
            await send({"type": "websocket.send", "text": message["text"]})
        self.heard.append(message["code"])


@contextmanager
def talking(
    stack: Stack, library: str, echo: Echo, protocol: Any = None
) -> Iterator[tuple[ClientConnection, Watcher]]:
    """A WebSocket that has echoed once, beside a connection that stays idle."""
    with (
        Watcher() as watcher,
        stack.serving(echo, protocol or stack.configured(watcher=watcher), ws=library) as server,
        Client(server.port) as idle,
    ):
        idle.post("/", b"")
        idle.read_response()
        with connect(f"ws://127.0.0.1:{server.port}/", compression=None) as client:
            client.send("here")
            assert client.recv(10) == "here"
            yield client, watcher
        wait_until(lambda: len(server.server.server_state.connections) == 1)


def test_a_websocket_is_told_by_its_own_protocol_that_its_client_left(
    stack: Stack, library: str
) -> None:
    echo = Echo()
    with talking(stack, library, echo) as (client, watcher):
        assert watcher.stats().num_connections == 1
        client.socket.shutdown(socket.SHUT_RDWR)
        wait_until(lambda: echo.heard)
        assert sum(watcher.stats().num_signals.values()) == 0
    assert echo.tokens == [None]


def test_a_websocket_that_says_goodbye_leaves_nothing(stack: Stack, library: str) -> None:
    echo = Echo()
    with talking(stack, library, echo) as (client, _):
        client.close(1000)
        wait_until(lambda: echo.heard == [1000])


def test_an_upgrade_behind_a_request_ends_the_watch_of_neither_too_early(
    stack: Stack, library: str
) -> None:
    echo = Echo()
    with (
        Watcher() as watcher,
        stack.serving(echo, stack.configured(watcher=watcher), ws=library) as server,
        Client(server.port) as client,
    ):
        client.post("/", b"")
        assert client.read_response()[2] == b"plain"
        assert watcher.stats().num_connections == 1
        client.sock.sendall(
            b"GET / HTTP/1.1\r\nHost: t\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
            b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
        )
        assert client.read_until(b"\r\n\r\n").startswith(b"HTTP/1.1 101 ")
        assert watcher.stats().num_connections == 0
        client.sock.close()
        wait_until(lambda: echo.heard)


def test_nobody_holds_the_protocol_that_was_left(stack: Stack, library: str) -> None:
    left: list[weakref.ref[Any]] = []

    class Referenced(WatchedProtocol):
        def handle_websocket_upgrade(self, *event: Any) -> None:
            left.append(weakref.ref(self))
            super().handle_websocket_upgrade(*event)

    with talking(stack, library, Echo(), stack.mixed(Referenced)):
        gc.collect()  # uvicorn's parser and its protocol hold each other
        assert left[0]() is None
