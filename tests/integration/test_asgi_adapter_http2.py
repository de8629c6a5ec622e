"""HTTP/2: many requests share a connection, and each leaves by itself or with it."""

import json
from collections.abc import Iterator

import pytest

from tests.support.asgi_servers import Served, serving
from tests.support.http2 import Http2Client


@pytest.fixture(scope="module", params=["hypercorn", "granian", "uvicorn-zttp"])
def server(request: pytest.FixtureRequest) -> Iterator[Served]:
    with serving(request.param, "asgi_app:app") as served:
        yield served


@pytest.mark.parametrize("around", ["plain", "three"])
def test_a_stream_that_is_reset_ends_alone(server: Served, around: str) -> None:
    leaves, stays = f"leaves-{around}", f"stays-{around}"
    with Http2Client(server.port) as client:
        leaving = client.post(f"/{around}/wait/{leaves}")
        client.post(f"/{around}/wait/{stays}")
        server.wait_for("started", leaves)
        server.wait_for("started", stays)
        client.reset(leaving)
        assert server.wait_for("cancelled", leaves)["reason"] == "owner_closed"
        # The connection serves on.
        stats = json.loads(client.read_body(client.post(f"/{around}/stats")))
        assert stats["num_requests"]["none"] == 0
        assert stays not in server.names("ended")
    server.wait_for("cancelled", stays)


@pytest.mark.parametrize("around", ["plain", "three"])
def test_all_streams_end_with_their_connection(server: Served, around: str) -> None:
    names = [f"together-{around}-{number}" for number in range(5)]
    with Http2Client(server.port) as client:
        for name in names:
            client.post(f"/{around}/wait/{name}")
        for name in names:
            server.wait_for("started", name)
    for name in names:
        server.wait_for("cancelled", name)


def test_streams_that_were_answered_are_left_alone(server: Served) -> None:
    before = server.stats()["num_left"]
    with Http2Client(server.port) as client:
        for _ in range(20):
            client.read_body(client.post("/plain/stats"))
    assert server.stats()["num_left"] == before


def test_streams_that_share_a_namespace_have_each_its_own_token() -> None:
    """As under hypercorn before 0.18, where only the first of a connection was watched."""
    with serving("hypercorn", "asgi_app:app") as server:
        with Http2Client(server.port) as client:
            client.post("/shared/wait/stays")
            server.wait_for("started", "stays")
            leaving = client.post("/shared/wait/leaves")
            server.wait_for("started", "leaves")
            client.reset(leaving)
            server.wait_for("cancelled", "leaves")
            assert "stays" not in server.names("ended")
        server.wait_for("cancelled", "stays")
