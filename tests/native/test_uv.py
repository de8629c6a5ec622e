"""A plain libuv server that hears of clients who leave, though it reads nothing."""

import os
import socket
import subprocess
import threading
from types import ModuleType

import pytest

from disconnect_watch import Reason, Watcher
from tests.native.build import WARNINGS, build_module
from tests.support.net import dial, listener, reset, wait_until

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    if subprocess.run(["pkg-config", "--exists", "libuv"], check=False).returncode:
        pytest.skip("libuv's headers are missing: apt-get install libuv1-dev pkg-config")
    found = subprocess.run(
        ["pkg-config", "--cflags", "--libs", "libuv"], capture_output=True, text=True, check=True
    )
    folder = tmp_path_factory.mktemp("native")
    return build_module("example_uv", folder, *WARNINGS, *found.stdout.split())


def test_each_client_is_told_from_the_others_by_its_cookie(example: ModuleType) -> None:
    # epoll: the poll poller cannot see behind the pipelined request.
    with Watcher(poller="epoll") as watcher, listener("tcp") as listening:
        reasons: list[int] = []
        fd = os.dup(listening.fileno())  # libuv closes it
        serving = threading.Thread(target=lambda: reasons.extend(example.serve(watcher, fd, 3)))
        serving.start()
        clients = []
        for _ in range(3):
            clients.append(dial(listening))
            wait_until(lambda: watcher.stats().num_armed == len(clients))
        reset(clients[1])
        clients[0].sendall(b"GET /next HTTP/1.1\r\n\r\n")
        clients[0].close()
        clients[2].close()
        serving.join()
        assert reasons == [Reason.FIN.code, Reason.RESET.code, Reason.FIN.code]
        assert watcher.stats().num_connections == 0


def test_client_that_leaves_behind_a_full_window_is_seen(example: ModuleType) -> None:
    with Watcher(poller="epoll") as watcher, listener("tcp") as listening:
        reasons: list[int] = []
        fd = os.dup(listening.fileno())
        serving = threading.Thread(target=lambda: reasons.extend(example.serve(watcher, fd, 1)))
        serving.start()
        with dial(listening) as client:
            # Less than what the server opens its window for, and more than it was open.
            client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 19)
            client.sendall(bytes(400_000))
        wait_until(lambda: reasons)
        serving.join()
        assert reasons == [Reason.FIN.code]


def test_server_ends_with_its_watcher(example: ModuleType) -> None:
    with listener("tcp") as listening:
        watcher = Watcher()
        caught: list[BaseException] = []
        fd = os.dup(listening.fileno())

        def serve() -> None:
            try:
                example.serve(watcher, fd, 1)
            except OSError as error:
                caught.append(error)

        serving = threading.Thread(target=serve)
        serving.start()
        with dial(listening):
            wait_until(lambda: watcher.stats().num_armed == 1)
            watcher.close()
            serving.join()
    assert "closed" in str(caught[0])
