"""Servers that are not ASGI, each with its adapter: the same clients leave each of them."""

import asyncio
import socket
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from disconnect_watch import CancelToken, Reason, grace
from tests.support.aiohttp_app import aiohttp_app
from tests.support.frameworks import CHUNK, Framework, Record, Running, behave, serving
from tests.support.http import Client, request_bytes
from tests.support.net import reset, wait_until
from tests.support.sanic_app import sanic_app
from tests.support.tls import client_context
from tests.support.tornado_app import tornado_app

#: By name: the server, and whether its adapter covers the whole application or one route.
FRAMEWORKS: dict[str, Any] = {
    "aiohttp": aiohttp_app,
    "aiohttp_route": partial(aiohttp_app, by_route=True),
    "sanic": sanic_app,
    "sanic_route": partial(sanic_app, by_route=True),
    "tornado": tornado_app,
    "tornado_method": partial(tornado_app, by_route=True),
}


@pytest.fixture(params=FRAMEWORKS)
def framework(request: pytest.FixtureRequest) -> Framework:
    found: Framework = FRAMEWORKS[request.param]
    return found


@pytest.fixture(params=["asyncio", "uvloop"])
def loop_kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def leave_by_fin(client: Client) -> None:
    client.sock.close()


def leave_by_half_close(client: Client) -> None:
    # Below TLS: shutdown() of the TLS socket itself would end the encryption.
    socket.socket.shutdown(client.sock, socket.SHUT_WR)


def leave_by_reset(client: Client) -> None:
    reset(client.sock)


def leave_behind_a_request(client: Client) -> None:
    client.post("/wait-behind", b"never to be started")
    client.sock.close()


def leave_behind_many_requests(client: Client) -> None:
    client.sock.sendall(request_bytes("/wait-behind") * 40)
    client.sock.close()


def leave_behind_a_stray_line(client: Client) -> None:
    client.sock.sendall(b"\r\n")
    client.sock.close()


#: Way, and the reasons it may have: where the server's own read takes a reset's error
#: first, the watcher sees an end.
WAYS: dict[str, tuple[Callable[[Client], None], set[Reason]]] = {
    "fin": (leave_by_fin, {Reason.FIN}),
    "half_close": (leave_by_half_close, {Reason.FIN}),
    "reset": (leave_by_reset, {Reason.FIN, Reason.RESET}),
    "behind_a_request": (leave_behind_a_request, {Reason.FIN}),
    "behind_many_requests": (leave_behind_many_requests, {Reason.FIN}),
    "behind_a_stray_line": (leave_behind_a_stray_line, {Reason.FIN}),
}


def dial(server: Running, *, is_tls: bool = False) -> Client:
    return Client(server.port, tls=client_context() if is_tls else None)


@pytest.mark.parametrize("is_tls", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("path", ["/wait", "/read", "/stream"])
@pytest.mark.parametrize("way", WAYS)
def test_a_client_that_leaves_fires_its_token_and_cancels_its_handler(
    framework: Framework, loop_kind: str, way: str, path: str, is_tls: bool
) -> None:
    leave, reasons = WAYS[way]
    with serving(framework, loop_kind=loop_kind, is_tls=is_tls) as server:
        record = server.record
        with dial(server, is_tls=is_tls) as client:
            client.post(path, b"prompt")
            wait_until(lambda: path in record.tokens)
            if path == "/stream":
                client.read_until(CHUNK + b"\r\n")  # what lies unread would make it a reset
            leave(client)
            wait_until(lambda: record.ended)
        assert record.ended == {path: "CancelledError"}
        if is_tls:
            # TLS may answer a FIN by an alert, and who has closed answers that by a reset;
            # or it closes the socket before anybody is told, and the watcher finds it so.
            reasons = reasons | {Reason.RESET, Reason.OWNER_CLOSED}
        assert record.tokens[path].reason in reasons
        # Sooner than after the 30 s for which asyncio would wait for a goodbye of TLS.
        wait_until(lambda: server.watcher.stats().num_connections == 0, 20)
        assert list(record.tokens) == [path]  # what was queued behind it never started


@pytest.mark.parametrize("framework", ["aiohttp", "aiohttp_route"], indirect=True)
def test_a_client_that_leaves_inside_its_body_is_seen_though_nobody_reads_it(
    framework: Framework, loop_kind: str
) -> None:
    with serving(framework, loop_kind=loop_kind) as server, dial(server) as client:
        client.sock.sendall(b"POST /wait HTTP/1.1\r\nHost: test\r\nContent-Length: 2000000\r\n\r\n")
        client.sock.sendall(bytes(300_000))
        wait_until(lambda: "/wait" in server.record.tokens)
        client.sock.close()
        wait_until(lambda: server.record.ended == {"/wait": "CancelledError"})


def test_a_client_that_stays_is_answered_and_nothing_grows(
    framework: Framework, loop_kind: str
) -> None:
    with serving(framework, loop_kind=loop_kind) as server, dial(server) as client:
        for number in range(300):
            path = f"/echo-{number}"
            client.post(path, b"x")
            status, _, body = client.read_response()
            assert (status, body) == (200, f"{path}=x".encode())
            server.record.tokens.clear()
        assert server.num_tasks() < 10
        stats = server.watcher.stats()
        assert (stats.num_connections, stats.num_armed, stats.num_fired) == (1, 0, 0)


def test_pipelined_requests_of_a_client_that_stays_are_all_answered(
    framework: Framework, loop_kind: str
) -> None:
    with serving(framework, loop_kind=loop_kind) as server, dial(server) as client:
        client.sock.sendall(b"".join(request_bytes(f"/echo-{n}", b"y") for n in range(30)))
        for number in range(30):
            assert client.read_response()[2] == f"/echo-{number}=y".encode()


def test_a_client_may_leave_with_the_last_byte(framework: Framework, loop_kind: str) -> None:
    with serving(framework, loop_kind=loop_kind) as server:
        record = server.record
        with dial(server) as client:
            client.post("/finish")
            assert client.read_response()[2] == CHUNK
        wait_until(lambda: server.watcher.stats().num_signals[Reason.FIN])
        assert not record.tokens["/finish"].cancelled
        record.go_on.set()
        wait_until(lambda: record.ended)
        assert not record.tokens["/finish"].cancelled
        # Sanic ends all that runs on a connection with it, whatever was written.
        is_sanic = getattr(framework, "func", framework) is sanic_app
        assert record.ended["/finish"] == "done" or is_sanic


def test_a_handler_that_is_blocked_on_a_client_that_does_not_read_is_cancelled(
    framework: Framework, loop_kind: str
) -> None:
    with serving(framework, loop_kind=loop_kind) as server:
        record = server.record
        with dial(server) as client:
            client.post("/flood")
            wait_until(lambda: record.flood)
            while True:  # until a write has to wait
                seen = record.flood
                try:
                    wait_until(partial(record.has_written_more_than, seen), 0.1)
                except AssertionError:
                    break
        wait_until(lambda: record.ended)
        assert record.ended["/flood"] in ("CancelledError", "ConnectionResetError")


def test_a_worker_thread_is_told_by_the_token(framework: Framework, loop_kind: str) -> None:
    with serving(framework, loop_kind=loop_kind) as server:
        record = server.record
        with dial(server) as client:
            client.post("/thread")
            wait_until(lambda: "/thread" in record.tokens)
            client.sock.close()
        assert record.tokens["/thread"].wait(40)
        wait_until(lambda: record.ended == {"/thread": "CancelledError"})


def test_a_task_group_of_a_handler_is_cancelled_as_a_whole(
    framework: Framework, loop_kind: str
) -> None:
    with serving(framework, loop_kind=loop_kind) as server, dial(server) as client:
        client.post("/group")
        wait_until(lambda: "/group" in server.record.tokens)
        client.sock.close()
        wait_until(lambda: server.record.ended == {"/group": "CancelledError"})


def test_a_handler_may_swallow_the_cancel(framework: Framework, loop_kind: str) -> None:
    with serving(framework, loop_kind=loop_kind) as server, dial(server) as client:
        client.post("/swallow")
        wait_until(lambda: "/swallow" in server.record.tokens)
        client.sock.close()
        wait_until(lambda: server.record.ended == {"/swallow": "done"})


@pytest.mark.parametrize("path", ["/fail", "/foreign"])
def test_a_handlers_own_error_is_answered_as_without_us(
    framework: Framework, loop_kind: str, path: str
) -> None:
    with serving(framework, loop_kind=loop_kind) as server, dial(server) as client:
        client.post(path)
        assert client.read_response()[0] == 500
        assert not server.record.tokens[path].cancelled


@pytest.mark.parametrize(
    "framework", ["aiohttp", "aiohttp_route", "tornado", "tornado_method"], indirect=True
)
def test_work_may_go_on_for_a_grace_but_none_is_begun_in_it(
    framework: Framework, loop_kind: str
) -> None:
    with serving(framework, loop_kind=loop_kind, on_disconnect=grace(0.2)) as server:
        record = server.record
        with dial(server) as client:
            client.post("/wait", b"prompt")
            wait_until(lambda: "/wait" in record.tokens)
            leave_behind_a_request(client)
            wait_until(lambda: server.watcher.stats().num_signals[Reason.FIN])
            assert not record.ended
            wait_until(lambda: record.ended == {"/wait": "CancelledError"})
        wait_until(lambda: server.watcher.stats().num_connections == 0)
        assert list(record.tokens) == ["/wait"]


def test_a_loop_that_is_busy_delays_no_token(framework: Framework, loop_kind: str) -> None:
    with serving(framework, loop_kind=loop_kind) as server:
        with dial(server) as client:
            client.post("/wait")
            wait_until(lambda: "/wait" in server.record.tokens)
            fired: list[bool] = []

            def block() -> None:
                client.sock.close()
                token: CancelToken = server.record.tokens["/wait"]
                fired.append(token.wait(40))  # the loop's thread does nothing else

            server.loop.call_soon_threadsafe(block)
            wait_until(lambda: fired)
        assert fired == [True]


def test_an_option_that_is_none_is_refused_when_the_server_is_made(framework: Framework) -> None:
    async def main() -> None:
        with socket.socket() as sock, pytest.raises(ValueError, match="vanish_after"):
            answer = partial(behave, record=Record())
            async with framework(answer, sock, None, vanish_after=-1):
                pass

    asyncio.run(main())
