"""Leaves under TLS, where the peer's close_notify comes before its FIN."""

import contextlib
import ssl
from collections.abc import Iterator

import pytest

from tests.support.asgi_servers import Served, serving
from tests.support.net import reset


@pytest.fixture(scope="module", params=["uvicorn", "hypercorn", "granian", "gunicorn"])
def server(request: pytest.FixtureRequest) -> Iterator[Served]:
    with serving(request.param, "asgi_app:app", is_tls=True) as served:
        yield served


@pytest.mark.parametrize("way", ["fin", "close_notify", "reset", "behind"])
def test_a_handler_is_cancelled_when_its_client_leaves(server: Served, way: str) -> None:
    with server.client() as client:
        client.post(f"/plain/wait/{way}")
        server.wait_for("started", way)
        if way == "close_notify":
            assert isinstance(client.sock, ssl.SSLSocket)
            with contextlib.suppress(ssl.SSLError):  # the server may close without an answer
                client.sock.unwrap()
        elif way == "reset":
            reset(client.sock)
        elif way == "behind":
            client.post("/plain/wait/zombie")
    server.wait_for("cancelled", way)
    server.stats()
    assert "zombie" not in server.names("started")


def test_the_generator_of_a_stream_is_closed(server: Served) -> None:
    with server.client() as client:
        client.post("/plain/stream/streamed")
        client.read_until(b"chunk")
    server.wait_for("ended", "streamed")


def test_nothing_is_logged_as_an_error(server: Served) -> None:
    """The last test of a server: a transport that closed itself is not closed once more."""
    for word in ("Traceback", "ERROR", "Exception"):
        assert word not in server.log
