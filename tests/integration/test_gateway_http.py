"""The reverse proxy: what a client does here its server hears, and nothing is kept back."""

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from disconnect_watch.server.reverse_proxy import ReverseProxy
from disconnect_watch.testing import LeavingClient, Way
from tests.support.command import running
from tests.support.net import PATIENCE, held_port, wait_until
from tests.support.raw import Served, serving_raw
from tests.support.serve import (
    Client,
    ThreadedServer,
    request_bytes,
    serving_app,
    serving_opened,
)
from tests.support.upstream import Upstream, body_of, upstream


def proxying(url: str) -> contextlib.AbstractContextManager[ThreadedServer]:
    """The gateway before a server, as the command runs it."""
    return serving_opened(ReverseProxy(url).serving())


@pytest.fixture
def behind() -> Iterator[Upstream]:
    with upstream() as behind:
        yield behind


@pytest.fixture
def proxy(behind: Upstream) -> Iterator[ThreadedServer]:
    with proxying(f"http://127.0.0.1:{behind.port}") as proxy:
        yield proxy


@pytest.mark.parametrize("way", [Way.FIN, Way.RST, Way.BEHIND_REQUEST])
@pytest.mark.parametrize("answer", ["wait", "half", "stream"])
def test_the_server_hears_of_a_client_that_leaves(
    behind: Upstream, proxy: ThreadedServer, answer: str, way: Way
) -> None:
    path = behind.name(answer)
    request = request_bytes(path, b"{}")
    with LeavingClient(proxy) as client:
        client.send(request)
        call = behind.wait_for(path)
        if answer != "wait":
            wait_until(lambda: call.num_sent > 0)
        client.leave(way, request=request)
        wait_until(lambda: call.outcome == "stopped")
    assert call.reason in ("FIN", "RESET")
    # What was sent behind it never got there.
    assert [each.path for each in behind.calls].count(path) == 1


def test_who_stays_gets_the_whole_answer(behind: Upstream, proxy: ThreadedServer) -> None:
    path = behind.name("half")
    with Client(proxy.port) as stays:
        stays.post(path, b"{}")
        call = behind.wait_for(path)
        other = behind.name("stream")
        with Client(proxy.port) as leaves:
            leaves.post(other, b"{}")
            wait_until(lambda: behind.wait_for(other).num_sent > 0)
        wait_until(lambda: behind.wait_for(other).outcome == "stopped")
        call.may_finish.set()
        status, headers, body = stays.read_response()
    assert status == 200
    assert body.endswith(body_of(path))
    assert int(headers["content-length"]) == len(body)


def test_an_event_goes_on_as_it_comes(behind: Upstream, proxy: ThreadedServer) -> None:
    path = behind.name("stream")
    with Client(proxy.port) as client:
        client.post(path, b"{}")
        client.read_until(b"tick")
        # The server has not ended its answer.
        behind.wait_for(path).may_finish.set()
        client.read_until(b"[DONE]")
        assert client.read_until(b"0\r\n\r\n")


def test_a_connection_is_used_again(behind: Upstream, proxy: ThreadedServer) -> None:
    with httpx.Client(base_url=f"http://127.0.0.1:{proxy.port}") as client:
        for _ in range(3):
            assert client.get("/page").text == "<!doctype html>"
    assert len({call.client for call in behind.calls}) == 1


async def mirror(scope: Any, receive: Any, send: Any) -> None:
    """Answers with what it was asked."""
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
    told = {
        "method": scope["method"],
        "path": scope["raw_path"].decode(),
        "query": scope["query_string"].decode(),
        "headers": [[name.decode(), value.decode()] for name, value in scope["headers"]],
        "body": body.decode(),
    }
    headers = [
        (b"content-type", b"application/json"),
        (b"set-cookie", b"a=1"),
        (b"set-cookie", b"b=2"),
        (b"connection", b"x-hop"),
        (b"x-hop", b"gone"),
        (b"keep-alive", b"timeout=5"),
    ]
    await send({"type": "http.response.start", "status": 418, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(told).encode()})


def test_all_goes_on_but_what_is_of_one_hop() -> None:
    with (
        serving_app(mirror) as server,
        proxying(f"http://127.0.0.1:{server.port}/base/") as proxy,
        httpx.Client(base_url=f"http://127.0.0.1:{proxy.port}") as client,
    ):
        sent = {
            "X-Kept": "yes",
            "Connection": "keep-alive, X-Hop",
            "X-Hop": "gone",
            "TE": "trailers",
            "Proxy-Authorization": "secret",
            "X-Forwarded-For": "10.0.0.1",
            "Accept-Encoding": "br",
            "X-Request-Id": "mine",
        }
        answer = client.request("PUT", "/a%2Fb?c=d%20e", content=b"body", headers=sent)
        assert answer.status_code == 418
        told = answer.json()
        assert (told["method"], told["path"], told["query"]) == ("PUT", "/base/a%2Fb", "c=d%20e")
        assert told["body"] == "body"
        headers = dict(told["headers"])
        assert headers["x-kept"] == "yes"
        assert headers["accept-encoding"] == "br"
        assert headers["x-forwarded-for"] == "10.0.0.1, 127.0.0.1"
        assert headers["x-forwarded-host"] == f"127.0.0.1:{proxy.port}"
        assert headers["x-forwarded-proto"] == "http"
        assert headers["x-request-id"] == "mine"
        assert headers["host"] == f"127.0.0.1:{server.port}"
        assert headers["content-length"] == "4"
        assert not headers.keys() & {"x-hop", "te", "proxy-authorization"}
        assert answer.headers.get_list("set-cookie") == ["a=1", "b=2"]
        assert not answer.headers.keys() & {"x-hop", "keep-alive"}


def test_what_a_client_does_not_say_is_not_said_for_it() -> None:
    with (
        serving_app(mirror) as server,
        proxying(f"http://127.0.0.1:{server.port}") as proxy,
        Client(proxy.port) as client,
    ):
        client.sock.sendall(b"GET / HTTP/1.1\r\nHost: test\r\n\r\n")
        _, _, body = client.read_response()
    assert dict(json.loads(body)["headers"]).keys() == {
        "host",
        "x-forwarded-for",
        "x-forwarded-host",
        "x-forwarded-proto",
        "x-request-id",
    }


def test_a_body_goes_on_piece_by_piece() -> None:
    pieces: list[bytes] = []
    has_first = threading.Event()

    async def take(scope: Any, receive: Any, send: Any) -> None:
        more = True
        while more:
            message = await receive()
            pieces.append(message.get("body", b""))
            has_first.set()
            more = message.get("more_body", False)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"".join(pieces)})

    with (
        serving_app(take) as server,
        proxying(f"http://127.0.0.1:{server.port}") as proxy,
        Client(proxy.port) as client,
    ):
        head = b"POST / HTTP/1.1\r\nHost: test\r\nTransfer-Encoding: chunked\r\n\r\n"
        client.sock.sendall(head + b"5\r\nfirst\r\n")
        # It is there before the client has sent the rest.
        assert has_first.wait(PATIENCE)
        client.sock.sendall(b"6\r\nsecond\r\n0\r\n\r\n")
        assert client.read_response()[2] == b"firstsecond"


def test_a_client_that_leaves_within_its_body_ends_it_there_too() -> None:
    ended: list[str] = []
    has_first = threading.Event()

    async def take(scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        while message["type"] == "http.request":
            has_first.set()
            message = await receive()
        ended.append(message["type"])

    with serving_app(take) as server, proxying(f"http://127.0.0.1:{server.port}") as proxy:
        with Client(proxy.port) as client:
            head = b"POST / HTTP/1.1\r\nHost: test\r\nContent-Length: 100\r\n\r\n"
            client.sock.sendall(head + b"some")
            assert has_first.wait(PATIENCE)
        wait_until(lambda: ended == ["http.disconnect"])


def test_a_server_that_is_not_there_is_said_not_to_be() -> None:
    with held_port() as port, proxying(f"http://127.0.0.1:{port}") as proxy:
        answer = httpx.get(f"http://127.0.0.1:{proxy.port}/v1/models")
        assert answer.status_code == 502
        assert f"cannot reach http://127.0.0.1:{port}" in answer.json()["error"]["message"]


def test_a_server_that_breaks_off_is_not_taken_for_one_that_ended() -> None:
    half = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n"
    for first in (b"", half):
        served = Served(first=first, seconds=0, answer=b"")
        with (
            serving_raw(asyncio.start_server, served, "127.0.0.1", 0),
            proxying(f"http://127.0.0.1:{served.sockets[0].getsockname()[1]}") as proxy,
            Client(proxy.port) as client,
        ):
            client.post("/", b"{}")
            if first:
                client.read_until(b"half\r\n")
                assert client.read_rest() == b""
            else:
                status, _, body = client.read_response()
                assert status == 502
                assert "was not sent again" in json.loads(body)["error"]


def test_the_command_passes_on_and_ends_in_order(behind: Upstream) -> None:
    url = f"http://127.0.0.1:{behind.port}"
    with running("--http", url, "--grace", "0.3", command="gateway") as server:
        (said,) = [line for line in server.lines if line.startswith("serving ")]
        assert said.startswith(f"serving {url} on http://127.0.0.1:")
        path = behind.name("stream")
        with Client(server.port) as client:
            client.post(path, b"{}")
            client.read_until(b"tick")
        wait_until(lambda: behind.wait_for(path).outcome == "stopped")
        assert "dw_connections" in server.metrics()
        server.process.terminate()
        assert server.wait() == 0
        assert "Traceback" not in "".join(server.lines)
