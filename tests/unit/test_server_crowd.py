"""A server that is full lets the next one wait, and loses nobody."""

import errno
import os
import re
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress

import pytest

from disconnect_watch.server import Frontend
from disconnect_watch.server.crowd import RESERVED_FDS, Crowd, num_connections_possible
from disconnect_watch.server.run import FrontendServer
from tests.support.backends import ScriptedBackend
from tests.support.net import PATIENCE, wait_until
from tests.support.serve import Client, serving_frontend

ASKED = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n"


def is_served(client: Client) -> bool:
    client.sock.sendall(ASKED)
    return client.read_response()[0] == 200


def from_address(address: str, port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), PATIENCE, source_address=(address, 0))


def test_who_comes_to_a_full_server_waits_and_is_served() -> None:
    with (
        serving_frontend(Frontend(ScriptedBackend()), max_connections=2) as http,
        ExitStack() as stack,
    ):
        port = http.port
        early = [stack.enter_context(Client(port)) for _ in range(2)]
        assert all(is_served(client) for client in early)
        assert not http.server.servers
        late = [stack.enter_context(Client(port)) for _ in range(20)]
        for client in late:
            client.sock.sendall(ASKED)
        for ending, client in zip(early + late, late, strict=False):
            assert len(http.server.server_state.connections) <= 2
            ending.sock.close()
            assert client.read_response()[0] == 200


def test_a_server_that_is_full_again_while_it_begins_to_accept_stops_again() -> None:
    with (
        serving_frontend(Frontend(ScriptedBackend()), max_connections=1) as http,
        Client(http.port) as client,
    ):
        assert is_served(client)
        server = http.server
        assert isinstance(server, FrontendServer)

        def leave_and_come() -> None:
            # The task that accepts has begun nothing by then.
            server.crowd.leave("127.0.0.1")
            server.crowd.enter("127.0.0.1")

        http.loop.call_soon_threadsafe(leave_and_come)
        wait_until(lambda: server._accepting is not None and server._accepting.done())
        assert not server.servers


class Scarce(socket.socket):
    """A listening socket in a process that has no file descriptor left, for once."""

    num_failures = 0

    def dup(self) -> "Scarce":
        if not self.num_failures:
            self.num_failures += 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return super().dup()


def test_a_server_without_a_descriptor_to_accept_by_tries_again() -> None:
    with serving_frontend(Frontend(ScriptedBackend()), max_connections=1) as http:
        server, port = http.server, http.port
        assert isinstance(server, FrontendServer)
        with Client(port) as client:
            assert is_served(client)
            (listening,) = server._listening
            scarce = Scarce(fileno=listening.detach())
            server._listening = [scarce]
        with Client(port) as late:
            assert is_served(late)
        assert scarce.num_failures == 1


def test_a_full_server_ends_as_any_other() -> None:
    with serving_frontend(Frontend(ScriptedBackend()), max_connections=1) as http:
        port = http.port
        with Client(port) as client:
            assert is_served(client)
            with Client(port) as waits:
                waits.sock.sendall(ASKED)
                http.stop()
                with suppress(ConnectionError):  # the kernel resets what was never accepted
                    assert waits.sock.recv(1) == b""


def test_an_address_with_too_many_is_told_and_others_are_served(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with (
        serving_frontend(Frontend(ScriptedBackend()), max_connections_per_address=2) as http,
        ExitStack() as stack,
    ):
        mine = [stack.enter_context(Client(http.port)) for _ in range(2)]
        assert all(is_served(client) for client in mine)
        for _ in range(2):
            with Client(http.port) as refused:
                status, head, body = refused.read_response()
                assert not refused.read_rest()
            assert (status, head["retry-after"]) == (503, "1")
            assert body == b'{"error":"too many connections from this address"}'
        with from_address("127.0.0.2", http.port) as other:
            other.sendall(ASKED)
            assert other.recv(4096).startswith(b"HTTP/1.1 200")
        mine[0].sock.close()
        wait_until(lambda: _is_let_in(http.port))
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def _is_let_in(port: int) -> bool:
    with Client(port) as client:
        client.sock.sendall(ASKED)
        return client.read_response()[0] == 200


def test_what_is_counted_is_forgotten() -> None:
    crowd = Crowd(limit_per_address=1)
    assert crowd.enter("a")
    assert not crowd.enter("a")
    crowd.leave("a")
    assert not crowd._by_address


def test_a_crowd_tells_once_while_it_stays(caplog: pytest.LogCaptureFixture) -> None:
    told: list[str] = []
    crowd = Crowd(4)
    crowd.on_full = lambda: told.append("full")
    crowd.on_room = lambda: told.append("room")

    def change(act: Callable[[str | None], object], times: int) -> None:
        for _ in range(times):
            act(None)

    change(crowd.enter, 4)
    change(crowd.leave, 1)
    change(crowd.enter, 1)
    assert told == ["full", "room", "full"]
    assert len(caplog.records) == 1
    change(crowd.leave, 4)
    change(crowd.enter, 4)
    assert len(caplog.records) == 2


def test_there_may_be_as_many_as_files_can_be_open() -> None:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert 0 < num_connections_possible() < soft - RESERVED_FDS


LIMIT = 120


def test_a_server_that_may_open_few_files_loses_nobody() -> None:
    command = [sys.executable, "-m", "disconnect_watch.cli", "serve", "--http-port=0"]
    with (
        subprocess.Popen(
            [*command, "--metrics-port=0", "--log-level=error"],
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, LIMIT)),
        ) as server,
        ExitStack() as stack,
    ):
        assert server.stderr is not None
        try:
            told = next(line for line in server.stderr if line.startswith("serving "))
            (port,) = re.findall(r"on http://127\.0\.0\.1:(\d+),", told)
            clients = [stack.enter_context(Client(int(port))) for _ in range(LIMIT)]
            # In each round of the loop one more is accepted, if any.
            assert all(is_served(clients[0]) for _ in range(LIMIT))
            for client in clients:
                client.sock.sendall(ASKED)
            for client in clients:
                assert client.read_response()[0] == 200
                client.sock.close()
        finally:
            server.send_signal(signal.SIGTERM)
        assert server.stderr.read().count('"level": "error"') == 0
    assert server.returncode == 0
