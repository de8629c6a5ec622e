"""``CancelOnDisconnect`` and ``cancel_on_disconnect`` under the servers that people run."""

import re
import socket
from collections.abc import Callable, Iterator

import pytest

from tests.support.asgi_servers import SERVERS, Served, serving
from tests.support.http import Client
from tests.support.net import reset, wait_until

#: What is around the application, and where its middleware leaves the connection to be found.
AROUND = ["plain", "three", "decorated", pytest.param("inside", marks=pytest.mark.exhaustive)]

#: Where another middleware is outermost, the server starts a pipelined request before we
#: are asked, and uvicorn lets it fail on a transport that is closed.
OUTERMOST = ["plain", "three", "decorated"]


#: The same code on another loop, or under another parser.
TWINS = {"uvicorn-asyncio", "uvicorn-h11", "uvicorn-zttp", "hypercorn-uvloop"}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=[pytest.mark.exhaustive] if name in TWINS else [])
        for name in SERVERS
    ],
)
def server(request: pytest.FixtureRequest) -> Iterator[Served]:
    with serving(request.param, "asgi_app:app") as served:
        yield served


@pytest.fixture
def names(request: pytest.FixtureRequest) -> Callable[[str], str]:
    """Names of requests that no other test has."""
    return lambda word: f"{word}-{abs(hash(request.node.nodeid)):x}"


def close(client: Client) -> None:
    client.sock.close()


def half_close(client: Client) -> None:
    client.sock.shutdown(socket.SHUT_WR)


def leave_by_reset(client: Client) -> None:
    reset(client.sock)


WAYS = {"fin": close, "half_close": half_close, "reset": leave_by_reset}


def wait_for_end(server: Served, name: str) -> None:
    """Wait until a stream's ``finally`` ran.

    One that is cancelled in the midst of a send is not inside its generator, which then
    may be in a cycle of Starlette's.
    """

    def has_ended() -> bool:
        server.collect_garbage()
        return name in server.names("ended")

    wait_until(has_ended)


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("way", WAYS)
def test_a_handler_is_cancelled_when_its_client_leaves(
    server: Served, names: Callable[[str], str], around: str, way: str
) -> None:
    name = names("wait")
    with server.client() as client:
        client.post(f"/{around}/wait/{name}")
        server.wait_for("started", name)
        WAYS[way](client)
        # The token is set before the task is cancelled.
        assert server.wait_for("cancelled", name)["reason"] in ("fin", "reset", "owner_closed")
        server.wait_for("ended", name)


@pytest.mark.parametrize("around", OUTERMOST)
@pytest.mark.parametrize("kind", ["wait", "stream"])
def test_a_leave_behind_a_pipelined_request_is_noticed_and_starts_nothing(
    server: Served, names: Callable[[str], str], around: str, kind: str
) -> None:
    name, zombie = names("first"), names("zombie")
    with server.client() as client:
        client.post(f"/{around}/{kind}/{name}")
        for _ in range(3):  # one behind the first, which is refused, must not start either
            client.post(f"/{around}/wait/{zombie}")
        server.wait_for("started", name)
    wait_for_end(server, name)
    # What comes on another connection is served after all that this one left behind.
    wait_until(lambda: server.stats()["num_requests"])
    assert zombie not in server.names("started")


@pytest.mark.parametrize("around", AROUND)
def test_the_generator_of_a_stream_is_closed(
    server: Served, names: Callable[[str], str], around: str
) -> None:
    name = names("stream")
    with server.client() as client:
        client.post(f"/{around}/stream/{name}")
        client.read_until(b"chunk")
    wait_for_end(server, name)


@pytest.mark.parametrize("around", AROUND)
def test_a_stream_that_nobody_reads_ends(
    server: Served, names: Callable[[str], str], around: str
) -> None:
    name = names("flood")
    with server.client() as client:
        client.post(f"/{around}/flood/{name}")
        client.read_until(b"\r\n\r\n")
    wait_for_end(server, name)


@pytest.mark.parametrize("around", AROUND)
def test_a_function_in_the_thread_pool_gets_the_token(
    server: Served, names: Callable[[str], str], around: str
) -> None:
    name = names("sync")
    with server.client() as client:
        client.post(f"/{around}/sync/{name}")
        server.wait_for("started", name)
    assert server.wait_for("ended", name)["reason"] in ("fin", "owner_closed")


@pytest.mark.parametrize("around", AROUND)
def test_what_runs_behind_a_response_goes_on_when_the_client_leaves(
    server: Served, names: Callable[[str], str], around: str
) -> None:
    name, other = names("late"), names("other")
    with server.client() as client:
        client.post(f"/{around}/late/{name}")
        assert client.read_response()[2] == b"late"
        server.wait_for("started", name)
    # A later leave is noticed: so an earlier one would have been.
    with server.client() as client:
        client.post(f"/{around}/wait/{other}")
        server.wait_for("started", other)
    server.wait_for("ended", other)
    assert name not in server.names("ended")
    server.open(name)
    server.wait_for("ended", name)
    assert name not in server.names("cancelled")


@pytest.mark.parametrize("around", AROUND)
def test_the_body_is_the_applications_to_read(
    server: Served, names: Callable[[str], str], around: str
) -> None:
    """Read late, and much of it: whoever listens for the disconnect takes nothing away."""
    name = names("hold")
    body = bytes(range(256)) * 1024
    with server.client() as client:
        client.post(f"/{around}/hold/{name}", body)
        server.wait_for("started", name)
        server.open(name)
        assert client.read_response()[2] == body
        assert name not in server.names("cancelled")


@pytest.mark.parametrize("around", OUTERMOST)
def test_a_body_that_does_not_come_is_given_up(
    server: Served, names: Callable[[str], str], around: str
) -> None:
    """Starlette then raises, and that is no failure; see the last test."""
    name = names("read")
    with server.client() as client:
        head = f"POST /{around}/read/{name} HTTP/1.1\r\nhost: test\r\ncontent-length: 9\r\n\r\n"
        client.sock.sendall(head.encode() + b"half")
        server.wait_for("started", name)
    server.wait_for("ended", name)


@pytest.mark.parametrize("around", AROUND)
def test_keep_alive_requests_are_answered(server: Served, around: str) -> None:
    before = server.stats()["num_left"]
    with server.client() as client:
        for _ in range(50):
            client.post(f"/{around}/stats")
            assert client.read_response()[0] == 200
    assert server.stats()["num_left"] == before


def test_nothing_is_logged_as_an_error(server: Served) -> None:
    """The last test of a server: all that went before left no trace of a failure."""
    for word in ("Traceback", "ERROR", "Exception"):
        assert word not in server.log


@pytest.mark.parametrize("around", OUTERMOST)
@pytest.mark.parametrize("kind", ["wait", "sorry"])
def test_hypercorn_logs_no_failure_where_nobody_was_answered(
    hypercorn: Served, names: Callable[[str], str], around: str, kind: str
) -> None:
    """Also where the application makes an answer of its own of the cancel."""
    path = f"/{around}/{kind}/{names(kind)}"
    with hypercorn.client() as client:
        client.post(path)
        hypercorn.wait_for("started", path.rpartition("/")[2])
    logged = re.compile(f'{path} 1.1" (\\S+) ')
    wait_until(lambda: logged.search(hypercorn.log))
    # Nothing at all, where it has read of the end before us.
    assert logged.findall(hypercorn.log)[0] in ("499", "-")


@pytest.fixture(scope="module")
def hypercorn() -> Iterator[Served]:
    with serving("hypercorn", "asgi_app:app") as served:
        yield served
