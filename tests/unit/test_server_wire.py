"""Any bytes on a connection: it is answered or closed, and nobody else notices.

What is no HTTP, or HTTP that lies about itself, holds nothing but its own connection. The
server answers a sound request on another one before and after, and is left with nothing.
"""

import socket
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disconnect_watch.server import Frontend
from tests.support.function_models import ModelTable, identity
from tests.support.net import wait_until
from tests.support.serve import Client, ThreadedServer, serving_frontend

PATH = "/v2/models/identity/infer"
BODY = b'{"inputs":[{"name":"INPUT0","datatype":"FP32","shape":[1],"data":[1]}]}'

names = st.sampled_from(
    [
        "Content-Length",
        "Transfer-Encoding",
        "Inference-Header-Content-Length",
        "Content-Encoding",
        "Accept-Encoding",
        "Expect",
        "Connection",
        "Authorization",
        "X-Request-Id",
        "X-Request-Timeout",
        "X-Own",
    ]
)
values = st.one_of(
    st.sampled_from(
        [
            "0",
            "1",
            "-1",
            "71",
            "9" * 30,
            "chunked",
            "gzip",
            "100-continue",
            "close",
            "upgrade",
            "1e9",
        ]
    ),
    st.text(st.characters(max_codepoint=255), max_size=8),
)
methods = st.sampled_from(["POST", "GET", "HEAD", "PUT", "X", ""])
paths = st.sampled_from([PATH, "/v2", "/", "*", "/v2/models/%00/infer", "//", "/v2/../v2", ""])
versions = st.sampled_from(["HTTP/1.1", "HTTP/1.0", "HTTP/2.0", "HTTP/9.9", ""])


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    """HTTP in its outline: what stands in it is anything."""
    lines = [" ".join((draw(methods), draw(paths), draw(versions)))]
    lines += (f"{draw(names)}: {draw(values)}" for _ in range(draw(st.integers(0, 4))))
    if draw(st.booleans()):
        lines.append(f"Content-Length: {len(BODY) + draw(st.integers(-2, 2))}")
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + BODY


anything = st.lists(requests() | st.binary(max_size=64), min_size=1, max_size=3).map(b"".join)


@pytest.fixture(scope="module")
def frontend() -> Frontend:
    return Frontend(models=ModelTable(identity()))


@pytest.fixture(scope="module")
def server(frontend: Frontend) -> Iterator[ThreadedServer]:
    with serving_frontend(frontend) as server:
        yield server


def is_served(server: ThreadedServer) -> bool:
    with Client(server.port) as client:
        client.post(PATH, BODY)
        return client.read_response()[0] == 200


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(sent=anything, cuts=st.lists(st.integers(1, 200), max_size=3))
def test_whatever_is_sent_is_answered_or_closed(
    frontend: Frontend, server: ThreadedServer, sent: bytes, cuts: list[int]
) -> None:
    with Client(server.port) as client:
        try:
            at = 0
            for cut in cuts:
                client.sock.sendall(sent[at : at + cut])
                at += cut
            client.sock.sendall(sent[at:])
            # No more comes: whoever waits for the rest of a body hears of it.
            client.sock.shutdown(socket.SHUT_WR)
            answers = client.read_rest()
        except OSError:  # closed at once, for what it was
            answers = b""
    for line in answers.split(b"\r\n"):
        if line.startswith(b"HTTP/1.1 5"):
            # Of Triton's making: what is no JSON, and what is not done here.
            assert line.split()[1] in (b"500", b"501"), line
            assert b"internal error" not in answers.lower(), answers
    wait_until(lambda: frontend.stats().num_live == 0)
    assert is_served(server)


def test_who_sends_a_byte_at_a_time_is_answered_like_others(server: ThreadedServer) -> None:
    request = f"POST {PATH} HTTP/1.1\r\nContent-Length: {len(BODY)}\r\n\r\n".encode() + BODY
    with Client(server.port) as slow:
        slow.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for at in range(len(request)):
            slow.sock.sendall(request[at : at + 1])
            if at % 40 == 0:
                assert is_served(server)
        assert slow.read_response()[0] == 200
