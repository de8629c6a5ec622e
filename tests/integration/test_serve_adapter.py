"""uvicorn's protocol with a watch: plain ASGI applications under it, over loopback.

Also the contract with uvicorn: what the adapter uses of its insides fails here first
when a new version changes it.
"""

import asyncio
import contextlib
import gc
import socket
import ssl
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import ClientDisconnect

from disconnect_watch import ClientDisconnected, Connection, StaleWatchError
from disconnect_watch.adapters import TOKEN_KEY
from disconnect_watch.adapters.uvicorn import H11
from disconnect_watch.adapters.uvicorn._watched import WatchedProtocol
from disconnect_watch.token import CancelToken, Reason
from disconnect_watch.watcher import Watcher, default_watcher
from tests.support.documents import run_blocks
from tests.support.http import Client, request_bytes
from tests.support.net import until, wait_until
from tests.support.serve import STACKS, Stack, ThreadedServer
from tests.support.tls import client_context

TLS = Path(__file__).parent.parent / "support" / "tls"

pytestmark = pytest.mark.parametrize("stack", STACKS, ids=str)


class Recorder:
    """An application that answers with what it was sent, when it may.

    Attributes:
        tokens: of the requests that were started, by path.
        heard: paths whose ``receive()`` told of the disconnect.
        ended: paths in the order in which the application returned.
    """

    def __init__(self) -> None:
        self.tokens: dict[str, CancelToken] = {}
        self.heard: list[str] = []
        self.ended: list[str] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path = scope["path"]
        self.tokens[path] = scope["state"][TOKEN_KEY]
        body = b""
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.heard.append(path)
                break
            body += message["body"]
            if not message["more_body"]:
                break
        try:
            await self.answer(path, body, receive, send)
        finally:
            self.ended.append(path)

    async def answer(self, path: str, body: bytes, receive: Any, send: Any) -> None:
        if path.startswith("/wait"):
            while (await receive())["type"] != "http.disconnect":
                pass
            self.heard.append(path)
        else:
            await respond(send, path.encode() + b"=" + body)


async def respond(send: Any, body: bytes) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": body})


@contextmanager
def recording(
    stack: Stack, *, half_close: Any = "disconnect", app: Any = None, **config: Any
) -> Iterator[tuple[Recorder, ThreadedServer, Watcher]]:
    recorder = app or Recorder()
    with (
        Watcher() as watcher,
        stack.serving(
            recorder, stack.configured(half_close=half_close, watcher=watcher), **config
        ) as server,
    ):
        yield recorder, server, watcher
        wait_until(lambda: watcher.stats().num_connections == 0)
        assert watcher.stats().num_armed == 0


def tls_client(server: ThreadedServer) -> ssl.SSLSocket:
    context = ssl.create_default_context(cafile=str(TLS / "cert.pem"))
    plain = socket.create_connection(("127.0.0.1", server.port), timeout=40)
    return context.wrap_socket(plain, server_hostname="localhost")


def leave_by_fin(client: Client) -> None:
    client.sock.close()


def leave_by_half_close(client: Client) -> None:
    client.sock.shutdown(socket.SHUT_WR)


def leave_by_reset(client: Client) -> None:
    client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    client.sock.close()


def leave_behind_a_request(client: Client) -> None:
    client.post("/behind", b"never to be started")
    client.sock.close()


#: Way, and the reasons it may have: where the server's own read takes a reset's error
#: first, the watcher sees an end.
WAYS: dict[str, tuple[Callable[[Client], None], set[Reason]]] = {
    "fin": (leave_by_fin, {Reason.FIN}),
    "half_close": (leave_by_half_close, {Reason.FIN}),
    "reset": (leave_by_reset, {Reason.FIN, Reason.RESET}),
    "behind_a_request": (leave_behind_a_request, {Reason.FIN}),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_client_that_leaves_fires_its_token_and_is_heard(stack: Stack, way: str) -> None:
    leave, reasons = WAYS[way]
    with recording(stack) as (app, server, watcher), Client(server.port) as client:
        client.post("/wait", b"x")
        wait_until(lambda: "/wait" in app.tokens)
        leave(client)
        wait_until(lambda: app.heard == ["/wait"])
        assert app.tokens["/wait"].reason in reasons
        wait_until(lambda: app.ended == ["/wait"])
        wait_until(lambda: watcher.stats().num_connections == 0)
        assert list(app.tokens) == ["/wait"]
        assert sum(watcher.stats().num_signals.values()) == 1


def test_a_leave_behind_pipelined_requests_starts_none_of_them(stack: Stack) -> None:
    with recording(stack) as (app, server, _), Client(server.port) as client:
        client.post("/wait", b"x")
        wait_until(lambda: "/wait" in app.tokens)
        for number in range(20):
            client.post(f"/queued{number}", b"y" * 1000)
        client.sock.close()
        wait_until(lambda: app.ended == ["/wait"])
    assert list(app.tokens) == ["/wait"]


def test_a_client_gone_before_its_request_begins_is_never_started(stack: Stack) -> None:
    with recording(stack) as (app, server, watcher), Client(server.port) as client:
        client.post("/early", b"x")
        client.read_response()
        release = server.block_loop()
        client.post("/late", b"x")
        client.sock.close()
        wait_until(lambda: watcher.stats().num_signals[Reason.FIN] == 1)
        release()
        wait_until(lambda: watcher.stats().num_connections == 0)
    assert list(app.tokens) == ["/early"]


def test_a_blocked_loop_does_not_delay_the_token(stack: Stack) -> None:
    with recording(stack) as (app, server, _), Client(server.port) as client:
        client.post("/wait", b"x")
        wait_until(lambda: "/wait" in app.tokens)
        release = server.block_loop()
        client.sock.close()
        assert app.tokens["/wait"].wait(40)
        assert app.heard == []
        release()
        wait_until(lambda: app.heard == ["/wait"])


def test_a_leave_in_mid_body_is_heard(stack: Stack) -> None:
    with recording(stack) as (app, server, _), Client(server.port) as client:
        client.sock.sendall(b"POST /upload HTTP/1.1\r\nHost: t\r\nContent-Length: 100\r\n\r\nhalf")
        wait_until(lambda: "/upload" in app.tokens)
        client.sock.close()
        wait_until(lambda: app.heard == ["/upload"])
        assert app.tokens["/upload"].reason is Reason.FIN


def test_a_leave_ends_a_send_that_nobody_reads(stack: Stack) -> None:
    class Flood(Recorder):
        async def answer(self, path: str, body: bytes, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            while not self.tokens[path].cancelled:
                await send(
                    {"type": "http.response.body", "body": bytes(1 << 20), "more_body": True}
                )

    flood = Flood()
    with recording(stack, app=flood) as (app, server, _), Client(server.port) as client:
        client.post("/flood", b"")
        client.read_until(b"\r\n\r\n")
        # A half-close: the window stays full, so nothing but the watch can end the send.
        client.post("/behind", b"x")
        client.sock.shutdown(socket.SHUT_WR)
        wait_until(lambda: app.ended == ["/flood"])
        assert app.tokens["/flood"].reason is Reason.FIN


def test_a_thousand_requests_on_one_connection_are_never_cancelled(stack: Stack) -> None:
    with recording(stack) as (app, server, watcher), Client(server.port) as client:
        for number in range(1000):
            client.post(f"/{number}", b"x")
            status, _, body = client.read_response()
            assert (status, body) == (200, b"/%d=x" % number)
        assert watcher.stats().num_armed == 0
        assert watcher.stats().num_connections == 1
        assert watcher.stats().num_fired == 0
        assert not any(token.cancelled for token in app.tokens.values())


def test_ten_pipelined_requests_are_answered_in_order(stack: Stack) -> None:
    with recording(stack) as (app, server, _), Client(server.port) as client:
        client.sock.sendall(
            b"".join(request_bytes(f"/{number}", b"x" * number) for number in range(10))
        )
        for number in range(10):
            assert client.read_response()[2] == b"/%d=" % number + b"x" * number
        assert not any(token.cancelled for token in app.tokens.values())


def test_each_request_of_a_connection_has_its_own_token(stack: Stack) -> None:
    with recording(stack) as (app, server, _), Client(server.port) as client:
        client.post("/first", b"")
        client.read_response()
        client.post("/wait", b"")
        wait_until(lambda: "/wait" in app.tokens)
        client.sock.close()
        wait_until(lambda: app.heard == ["/wait"])
        assert app.tokens["/wait"].cancelled
        assert not app.tokens["/first"].cancelled


def test_leaving_with_the_last_byte_is_no_disconnect(stack: Stack) -> None:
    """What runs after the response is no work for the client, so its leaving is no news."""
    finish = threading.Event()

    class Background(Recorder):
        async def answer(self, path: str, body: bytes, receive: Any, send: Any) -> None:
            await respond(send, b"done")
            await asyncio.to_thread(finish.wait, 20)

    with recording(stack, app=Background()) as (app, server, watcher):
        with Client(server.port) as client:
            client.post("/task", b"")
            client.read_response()
        wait_until(lambda: watcher.stats().num_connections == 0)
        is_cancelled = app.tokens["/task"].cancelled
        finish.set()
        wait_until(lambda: app.ended == ["/task"])
        assert not is_cancelled


def test_the_watch_ends_before_the_last_byte_is_written(stack: Stack) -> None:
    num_armed: list[int] = []

    class Counting(WatchedProtocol):
        def on_response_complete(self) -> None:
            num_armed.append(watcher.stats().num_armed)  # the last byte is out by now
            super().on_response_complete()

    with (
        Watcher() as watcher,
        stack.serving(Recorder(), stack.mixed(Counting, watcher=watcher)) as server,
        Client(server.port) as client,
    ):
        client.post("/echo", b"x")
        assert client.read_response()[2] == b"/echo=x"
    assert num_armed == [0]


def test_the_watch_ends_with_the_last_of_a_known_length_whatever_follows(stack: Stack) -> None:
    """Middleware sends an empty message behind it, when the client may be gone."""
    finish = threading.Event()

    class InPieces(Recorder):
        async def answer(self, path: str, body: bytes, receive: Any, send: Any) -> None:
            headers = [(b"Content-Length", b"8")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            for _ in range(2):
                await send({"type": "http.response.body", "body": b"half", "more_body": True})
            await asyncio.to_thread(finish.wait, 20)
            await send({"type": "http.response.body"})

    with recording(stack, app=InPieces()) as (app, server, watcher):
        with Client(server.port) as client:
            client.post("/pieces", b"")
            assert client.read_response()[2] == b"halfhalf"
        wait_until(lambda: watcher.stats().num_connections == 0)
        is_cancelled = app.tokens["/pieces"].cancelled
        finish.set()
        wait_until(lambda: app.ended == ["/pieces"])
        assert not is_cancelled


def test_a_body_of_known_length_is_watched_until_its_last_piece(stack: Stack) -> None:
    class Half(Recorder):
        async def answer(self, path: str, body: bytes, receive: Any, send: Any) -> None:
            headers = [(b"Content-Length", b"8")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": b"half", "more_body": True})
            while (await receive())["type"] != "http.disconnect":
                pass

    with recording(stack, app=Half()) as (app, server, _):
        with Client(server.port) as client:
            client.post("/half", b"")
            client.read_until(b"half")
        wait_until(lambda: app.ended == ["/half"])
        assert app.tokens["/half"].cancelled


def test_a_last_write_that_waits_for_its_client_is_still_watched(stack: Stack) -> None:
    waits = threading.Event()

    class Large(Recorder):
        async def answer(self, path: str, body: bytes, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": bytes(1 << 24), "more_body": True})
            asyncio.get_running_loop().call_soon(waits.set)
            await send({"type": "http.response.body", "body": b"end"})

    with recording(stack, app=Large()) as (app, server, _), Client(server.port) as client:
        client.post("/large", b"")
        assert waits.wait(40)
        client.sock.shutdown(socket.SHUT_WR)
        wait_until(lambda: app.tokens["/large"].cancelled)
        wait_until(lambda: app.ended == ["/large"])


def test_a_message_after_the_last_does_not_end_the_watch_of_the_next_request(
    stack: Stack,
) -> None:
    class TooMany(Recorder):
        async def answer(self, path: str, body: bytes, receive: Any, send: Any) -> None:
            await super().answer(path, body, receive, send)
            if path == "/first":
                await until(lambda: "/wait" in self.tokens)
                with pytest.raises(RuntimeError):
                    await send({"type": "http.response.body", "body": b"again"})

    with recording(stack, app=TooMany()) as (app, server, _), Client(server.port) as client:
        client.post("/first", b"")
        client.read_response()
        client.post("/wait", b"")
        wait_until(lambda: app.ended == ["/first"])
        client.sock.close()
        wait_until(lambda: app.heard == ["/wait"])
        assert app.tokens["/wait"].reason is Reason.FIN


@pytest.mark.parametrize("is_starlettes", [False, True])
def test_an_application_may_raise_that_its_client_left(
    stack: Stack, is_starlettes: bool, caplog: pytest.LogCaptureFixture
) -> None:
    class Raising(Recorder):
        async def answer(self, path: str, body: bytes, receive: Any, send: Any) -> None:
            await receive()
            if is_starlettes:
                raise ClientDisconnect
            self.tokens[path].raise_if_cancelled()

    with recording(stack, app=Raising()) as (app, server, _):
        with Client(server.port) as client:
            client.post("/raise", b"")
            wait_until(lambda: "/raise" in app.tokens)
        wait_until(lambda: app.ended == ["/raise"])
    assert "Exception in ASGI application" not in caplog.text


def test_a_disconnect_that_was_none_is_an_error_of_the_application(
    stack: Stack, caplog: pytest.LogCaptureFixture
) -> None:
    class Wrong(Recorder):
        async def answer(self, path: str, body: bytes, receive: Any, send: Any) -> None:
            raise ClientDisconnected(Reason.FIN, 0.0)

    with recording(stack, app=Wrong()) as (_, server, _), Client(server.port) as client:
        client.post("/wrong", b"")
        assert client.read_response()[0] == 500
    assert "Exception in ASGI application" in caplog.text


def test_half_closed_clients_are_answered_if_asked_for(stack: Stack) -> None:
    gate = threading.Event()

    class Slow(Recorder):
        async def answer(self, path: str, body: bytes, receive: Any, send: Any) -> None:
            await asyncio.to_thread(gate.wait, 20)
            await respond(send, path.encode())

    with (
        recording(stack, half_close="ignore", app=Slow(), timeout_keep_alive=1000) as (
            app,
            server,
            _,
        ),
        Client(server.port) as client,
    ):
        client.sock.sendall(request_bytes("/one") + request_bytes("/two"))
        client.sock.shutdown(socket.SHUT_WR)
        wait_until(lambda: "/one" in app.tokens)
        gate.set()
        assert client.read_response()[2] == b"/one"
        assert client.read_response()[2] == b"/two"
        assert client.read_rest() == b""
        assert not any(token.cancelled for token in app.tokens.values())


def test_a_reset_cancels_a_half_closed_client_too(stack: Stack) -> None:
    with (
        recording(stack, half_close="ignore") as (app, server, _),
        Client(server.port) as client,
    ):
        client.post("/wait", b"")
        wait_until(lambda: "/wait" in app.tokens)
        client.sock.shutdown(socket.SHUT_WR)
        leave_by_reset(client)
        wait_until(lambda: app.heard == ["/wait"])
        assert app.tokens["/wait"].cancelled


def test_an_idle_half_closed_connection_is_closed(stack: Stack) -> None:
    with (
        recording(stack, half_close="ignore", timeout_keep_alive=1000) as (_, server, _),
        Client(server.port) as client,
    ):
        client.post("/one", b"")
        client.read_response()
        client.sock.shutdown(socket.SHUT_WR)
        assert client.read_rest() == b""


def test_unix_sockets_are_watched(stack: Stack, tmp_path: Any) -> None:
    path = str(tmp_path / "socket")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    app = Recorder()
    with (
        Watcher() as watcher,
        stack.serving(app, stack.configured(watcher=watcher), sock=listener),
    ):
        client = socket.socket(socket.AF_UNIX)
        client.connect(path)
        client.sendall(request_bytes("/wait") + request_bytes("/behind"))
        wait_until(lambda: "/wait" in app.tokens)
        client.close()
        wait_until(lambda: app.heard == ["/wait"])
        assert list(app.tokens) == ["/wait"]


def test_a_leave_under_tls_counts_even_if_half_closes_do_not(
    stack: Stack, caplog: pytest.LogCaptureFixture
) -> None:
    """There is no half-close under TLS: the transport closes, and nobody is left to answer."""
    with (
        recording(
            stack,
            half_close="ignore",
            ssl_certfile=str(TLS / "cert.pem"),
            ssl_keyfile=str(TLS / "key.pem"),
        ) as (app, server, _),
        tls_client(server) as client,
    ):
        client.sendall(request_bytes("/wait"))
        wait_until(lambda: "/wait" in app.tokens)
        client.shutdown(socket.SHUT_WR)
        wait_until(lambda: app.heard == ["/wait"])
        assert app.tokens["/wait"].reason is Reason.OWNER_CLOSED
    assert "eof_received" not in caplog.text


@pytest.mark.parametrize("is_pipelined", [False, True])
def test_a_leave_under_tls_is_seen_behind_its_close_notify(
    stack: Stack, is_pipelined: bool
) -> None:
    with recording(stack, ssl_certfile=str(TLS / "cert.pem"), ssl_keyfile=str(TLS / "key.pem")) as (
        app,
        server,
        _,
    ):
        with tls_client(server) as client:
            client.sendall(request_bytes("/wait"))
            wait_until(lambda: "/wait" in app.tokens)
            if is_pipelined:
                client.sendall(request_bytes("/behind"))
            client.setblocking(False)
            with contextlib.suppress(ssl.SSLWantReadError):
                client.unwrap()
        wait_until(lambda: app.heard == ["/wait"])
        assert app.tokens["/wait"].cancelled
        assert list(app.tokens) == ["/wait"]


def test_a_connection_that_is_not_read_under_tls_ends_with_its_client(stack: Stack) -> None:
    # asyncio's TLS would wait for the goodbye of a client that left without one.
    pem = str(TLS.with_name("localhost.pem"))
    with recording(stack, ssl_certfile=pem, ssl_keyfile=pem) as (app, server, watcher):
        with Client(server.port, tls=client_context()) as client:
            client.post("/wait")
            wait_until(lambda: "/wait" in app.tokens)
            client.post("/behind")
        wait_until(lambda: watcher.stats().num_connections == 0)


def test_uvicorn_takes_it_by_its_import_string(stack: Stack) -> None:
    app = Recorder()
    name = f"disconnect_watch.adapters.uvicorn:{stack.protocol.__name__}"
    with stack.serving(app, name) as server:
        with Client(server.port) as client:
            client.post("/wait", b"")
            wait_until(lambda: "/wait" in app.tokens)
            assert default_watcher().stats().num_armed == 1
        wait_until(lambda: app.heard == ["/wait"])


def test_the_connection_is_detached_whoever_still_holds_it(stack: Stack) -> None:
    """The fd is the transport's and is closed next; its number may be anybody's then."""
    held: list[Connection] = []

    class Holding(WatchedProtocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            assert self._connection is not None
            held.append(self._connection)

    with stack.serving(Recorder(), stack.mixed(Holding)) as server:
        with Client(server.port) as client:
            client.post("/echo", b"")
            client.read_response()
        wait_until(lambda: not server.server.server_state.connections)
        with pytest.raises(StaleWatchError):
            held[0].info()
        held.clear()


def test_a_closed_connection_needs_no_garbage_collection(stack: Stack) -> None:
    left: list[weakref.ref[Any]] = []

    class Referenced(WatchedProtocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            left.append(weakref.ref(self))

    gc.collect()
    gc.disable()
    try:
        with stack.serving(Recorder(), stack.mixed(Referenced)) as server:
            with Client(server.port) as client:
                client.post("/echo", b"")
                client.read_response()
            wait_until(lambda: left[0]() is None)
    finally:
        gc.enable()


def test_a_connection_that_cannot_be_watched_is_served_and_still_cancelled(
    stack: Stack, caplog: pytest.LogCaptureFixture
) -> None:
    watcher = Watcher()
    watcher.close()
    app = Recorder()
    with stack.serving(app, stack.configured(watcher=watcher)) as server:
        with Client(server.port) as client:
            client.post("/echo", b"x")
            assert client.read_response()[2] == b"/echo=x"
            client.post("/wait", b"")
            wait_until(lambda: "/wait" in app.tokens)
        wait_until(lambda: app.heard == ["/wait"])
        assert app.tokens["/wait"].reason is Reason.FIN
    assert "cannot watch the connection" in caplog.text


@pytest.mark.parametrize("is_watched", [False, True])
def test_an_eof_that_the_transport_reads_is_heard_at_once(stack: Stack, is_watched: bool) -> None:
    """And not with the end of the connection, a turn of the loop later."""
    heard: list[tuple[bool, bool, bool]] = []
    app = Recorder()

    class Listening(WatchedProtocol):
        def eof_received(self) -> Any:
            is_kept_open = super().eof_received()
            event = self.cycle.message_event
            heard.append((self.cycle.disconnected, event.is_set(), app.tokens["/wait"].cancelled))
            return is_kept_open

    with Watcher() as watcher:
        if not is_watched:
            watcher.close()
        protocol = stack.mixed(Listening, watcher=watcher)
        with stack.serving(app, protocol) as server, Client(server.port) as client:
            client.post("/wait", b"")
            wait_until(lambda: "/wait" in app.tokens)
            client.sock.close()
            wait_until(lambda: app.heard == ["/wait"])
    # Where the watcher is first, the transport may be closed before it reads the EOF.
    assert heard == [(True, True, True)] or (is_watched and not heard)


def test_a_watcher_that_is_closed_leaves_its_connections_served(
    stack: Stack, caplog: pytest.LogCaptureFixture
) -> None:
    app = Recorder()
    with Watcher() as watcher:
        protocol = stack.configured(watcher=watcher)
        with stack.serving(app, protocol) as server, contextlib.ExitStack() as clients:
            running, idle, ending = [clients.enter_context(Client(server.port)) for _ in range(3)]
            running.post("/wait", b"")
            idle.post("/echo", b"x")
            idle.read_response()
            ending.sock.sendall(request_bytes("/body", b"xyz")[:-1])
            wait_until(lambda: watcher.stats().num_armed == 2)
            watcher.close()

            ending.sock.sendall(b"z")
            assert ending.read_response()[2] == b"/body=xyz"
            idle.post("/echo", b"x")
            assert idle.read_response()[2] == b"/echo=x"
            assert "cannot watch the connection" in caplog.text
            idle.post("/wait_too", b"")
            wait_until(lambda: "/wait_too" in app.tokens)
            for client, path in ((running, "/wait"), (idle, "/wait_too")):
                client.sock.close()
                wait_until(lambda: path in app.heard)  # noqa: B023
                assert app.tokens[path].reason is Reason.FIN


class Streaming(Recorder):
    """Answers in two pieces of unknown length."""

    async def answer(self, path: str, body: bytes, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"one,", "more_body": True})
        await send({"type": "http.response.body", "body": b"two"})


@pytest.mark.parametrize("half_close", ["disconnect", "ignore", "probe"])
def test_a_body_of_unknown_length_ends_with_the_connection_to_http_1_0(
    stack: Stack, half_close: str
) -> None:
    with (
        recording(stack, half_close=half_close, app=Streaming()) as (_, server, _),
        Client(server.port) as client,
    ):
        client.sock.sendall(b"GET / HTTP/1.0\r\n\r\n")
        head, _, body = client.read_rest().partition(b"\r\n\r\n")
        assert b"chunked" not in head.lower()
        assert body == b"one,two"


def test_a_connection_given_to_a_websocket_is_not_watched_any_more(stack: Stack) -> None:
    class Upgraded(asyncio.Protocol):
        """Stands where uvicorn puts a WebSocket protocol, and only says that it got there."""

        def __init__(self, config: Any, server_state: Any, app_state: Any) -> None:
            self.transport: Any = None

        def connection_made(self, transport: Any) -> None:
            self.transport = transport

        def data_received(self, data: bytes) -> None:
            self.transport.write(b"upgraded")

    with (
        recording(stack, ws=Upgraded) as (_, server, watcher),
        Client(server.port) as client,
    ):
        client.sock.sendall(
            b"GET / HTTP/1.1\r\nHost: t\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
        )
        client.read_until(b"upgraded")
        assert watcher.stats().num_connections == 0


def test_an_unknown_policy_is_refused(stack: Stack) -> None:
    with pytest.raises(ValueError, match="half_close 'maybe': must be"):
        stack.configured(half_close="maybe")


def test_the_documented_application_stops_for_who_leaves_and_serves_who_stays(
    stack: Stack, capsys: pytest.CaptureFixture[str]
) -> None:
    names = run_blocks("adapters/uvicorn.md")
    base = H11 if stack.protocol is H11 else names["protocol"]
    with Watcher() as watcher:
        protocol = type("Protocol", (base,), {"watcher": watcher})
        with (
            stack.serving(names["app"], protocol) as server,
            Client(server.port) as stays,
            Client(server.port) as leaves,
        ):
            leaves.sock.sendall(b"GET /generate?steps=1000 HTTP/1.1\r\nHost: t\r\n\r\n")
            stays.sock.sendall(b"GET /generate?steps=20 HTTP/1.1\r\nHost: t\r\n\r\n")
            wait_until(lambda: watcher.stats().num_armed == 2)
            leaves.sock.close()
            assert stays.read_response()[2] == b"done"
            said = ""

            def has_stopped() -> bool:
                nonlocal said
                said += capsys.readouterr().out
                return "stopped: " in said

            wait_until(has_stopped)


def test_what_is_used_of_uvicorn_is_there(stack: Stack) -> None:
    """Written for uvicorn 0.54; a version that fails here needs a look at the adapter."""
    seen: dict[str, Any] = {}

    class Spy(WatchedProtocol):
        def on_response_complete(self) -> None:
            seen.update(cycle=self.cycle, flow=self.flow, scheme=self.scheme)
            super().on_response_complete()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen["of_receive"] = receive.__self__
        await respond(send, b"ok")

    with (
        stack.serving(app, stack.mixed(Spy)) as server,
        Client(server.port) as client,
    ):
        client.post("/", b"")
        client.read_response()
    cycle = seen["of_receive"]
    assert cycle is seen["cycle"]
    assert cycle.response_complete is True
    assert cycle.disconnected is False
    assert isinstance(cycle.message_event, asyncio.Event)
    assert callable(seen["flow"].resume_writing)
    assert seen["flow"].write_paused is False
    assert seen["scheme"] == "http"
