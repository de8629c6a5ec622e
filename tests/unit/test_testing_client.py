"""The leaving client, the places it goes to, and the probes of users' tests."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from disconnect_watch import CancelToken, Reason, is_gone
from disconnect_watch.testing import LeavingClient, Way, http_request
from disconnect_watch.testing.probe import count_of
from disconnect_watch.testing.target import target_of
from tests.support.net import listener, wait_until


@pytest.fixture
def listening(kind: str) -> Iterator[socket.socket]:
    with listener(kind) as listening:
        yield listening


@pytest.mark.parametrize(
    ("way", "reason"),
    [
        (Way.FIN, Reason.FIN),
        (Way.HALF_CLOSE, Reason.FIN),
        (Way.HALF_CLOSE_FIN, Reason.FIN),
        (Way.KILLED, Reason.FIN),
        (Way.RST, Reason.RESET),
        (Way.BEHIND_BODY, Reason.FIN),
        (Way.BEHIND_REQUEST, Reason.FIN),
    ],
)
def test_each_way_is_what_it_says(listening: socket.socket, way: Way, reason: Reason) -> None:
    with LeavingClient(listening) as client:
        server, _ = listening.accept()
        with server:
            server.sendall(b"part of an answer")
            assert is_gone(server) is None
            client.leave(way, request=b"GET / HTTP/1.1\r\n\r\n")
            # What had come was read before, or the close would be a reset.
            wait_until(lambda: is_gone(server) is not None)
            assert is_gone(server) is reason


def test_bytes_of_a_way_come_before_its_end(listening: socket.socket) -> None:
    with LeavingClient(listening) as client:
        server, _ = listening.accept()
        with server, server.makefile("rb") as stream:
            client.send(b"one")
            client.leave(Way.BEHIND_REQUEST, request=b"two")
            assert stream.read() == b"onetwo"


@pytest.mark.parametrize(
    ("kind", "way", "message"),
    [
        ("tcp", Way.CLOSE_NOTIFY, "only a TLS client sends a close_notify"),
        ("unix", Way.VANISH, "cannot vanish"),
    ],
)
def test_way_that_cannot_be_is_refused_and_nothing_done(kind: str, way: Way, message: str) -> None:
    with listener(kind) as listening, LeavingClient(listening) as client:
        server, _ = listening.accept()
        with server:
            with pytest.raises(ValueError, match=message):
                client.leave(way)
            assert is_gone(server) is None


def test_answer_is_read_in_parts_and_whole(ends: tuple[LeavingClient, socket.socket]) -> None:
    client, server = ends
    client.send(http_request("GET", "/"))
    server.sendall(
        b"HTTP/1.1 200 OK\r\nX-A: 1\r\nX-A: 2\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
    )
    answer = client.answer()
    assert (answer.status, answer.body) == (200, b"abcde")
    assert answer.headers["x-a"] == "1, 2"
    client.send(http_request("HEAD", "/"))
    server.sendall(b"HTTP/1.1 204 No\r\nContent-Length: 4\r\n\r\n")
    assert client.answer().body == b""  # a HEAD has none
    server.sendall(b"one two")
    assert client.read(2) == b"on"
    assert client.read_until(b"e ") == b"e "
    server.shutdown(socket.SHUT_WR)
    with pytest.raises(EOFError, match="two"):
        client.read(4)
    assert client.is_ended
    assert client.num_received > 7


@pytest.fixture
def ends() -> Iterator[tuple[LeavingClient, socket.socket]]:
    with listener("tcp") as listening, LeavingClient(listening) as client:
        server, _ = listening.accept()
        with server:
            yield client, server


def test_client_that_nobody_listens_to_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        LeavingClient(f"unix:{tmp_path}/nobody")


def test_request_has_what_http_asks_for() -> None:
    assert http_request("GET", "/a?b") == b"GET /a?b HTTP/1.1\r\nHost: localhost\r\n\r\n"
    head, _, body = http_request("POST", "/", json={"a": 1}, headers={"Host": "x"}).partition(
        b"\r\n\r\n"
    )
    assert body == b'{"a": 1}'
    assert head.split(b"\r\n")[1:] == [
        b"Host: x",
        b"Content-Length: 8",
        b"Content-Type: application/json",
    ]
    assert b"Content-Length: 0" in http_request("POST", "/")


class HasUrl:
    url = "http://127.0.0.1:81"


@pytest.mark.parametrize(
    ("server", "family", "address", "is_tls"),
    [
        ("http://127.0.0.1:80", socket.AF_INET, ("127.0.0.1", 80), False),
        ("https://127.0.0.1/", socket.AF_INET, ("127.0.0.1", 443), True),
        ("http://[::1]:8", socket.AF_INET6, ("::1", 8, 0, 0), False),
        ("unix:/run/s", socket.AF_UNIX, "/run/s", False),
        (("127.0.0.1", 8), socket.AF_INET, ("127.0.0.1", 8), False),
        (HasUrl(), socket.AF_INET, ("127.0.0.1", 81), False),
    ],
)
def test_server_is_found_as_it_is_given(
    server: Any, family: int, address: object, is_tls: bool
) -> None:
    target = target_of(server)
    assert (target.family, target.address, target.is_tls) == (family, address, is_tls)
    assert target_of(target) is target


def test_server_is_found_by_its_sockets(kind: str) -> None:
    with listener(kind) as listening:

        class HasSockets:
            sockets = (listening,)

        name = listening.getsockname()
        assert target_of(HasSockets()).address == target_of(listening).address == name


@pytest.mark.parametrize(
    ("server", "error", "message"),
    [
        ("ftp://host", ValueError, "give http://"),
        ("http://", ValueError, "give http://"),
        ("http://127.0.0.1/path", ValueError, "leave its path out"),
        (7, TypeError, "cannot tell where 7 serves"),
    ],
)
def test_what_is_no_server_is_refused(server: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        target_of(server)


def test_probe_is_whatever_can_count() -> None:
    token, event, cancelled = CancelToken(), threading.Event(), ["a"]
    loop_event = asyncio.Event()
    assert count_of(token) is count_of(event) is count_of(loop_event) is False
    token.cancel()
    event.set()
    assert count_of(token) is count_of(event) is True
    assert count_of(cancelled) == count_of(lambda: 1) == 1


@pytest.mark.parametrize("probe", [7, lambda: "many"])
def test_what_cannot_count_is_no_probe(probe: Any) -> None:
    with pytest.raises(TypeError, match="cannot count with"):
        count_of(probe)
