"""A watch on an fd that is known by its addresses: on that socket, or on none."""

import os
import socket

from disconnect_watch import Reason
from disconnect_watch.adapters._asgi_find import Found, connection_of, find
from disconnect_watch.adapters.fdlookup import SocketFd
from disconnect_watch.watcher import default_watcher
from tests.support.loops import LoopRunner
from tests.support.net import Pair, connected, until


def socket_of(pair: Pair) -> SocketFd:
    fd = pair.server.fileno()
    return SocketFd(fd, os.fstat(fd).st_ino)


def found(socket: SocketFd) -> Found:
    return Found("addresses", None, socket)


async def no_function() -> None: ...


def test_requests_of_one_connection_share_its_attachment(run: LoopRunner, tcp: Pair) -> None:
    async def main() -> None:
        first = connection_of(found(socket_of(tcp)), None)
        assert first is not None
        assert connection_of(found(socket_of(tcp)), None) is first
        first.detach()

    run(main)


def test_a_number_that_is_anothers_by_now_is_not_watched(run: LoopRunner, tcp: Pair) -> None:
    async def main() -> None:
        stranger = SocketFd(tcp.server.fileno(), socket_of(tcp).inode + 1)
        assert connection_of(found(stranger), None) is None
        assert default_watcher().stats().num_connections == 0

    run(main)


def test_a_number_that_came_back_is_a_connection_of_its_own(run: LoopRunner) -> None:
    """Its first owner was native code, and told nobody that it closed it."""

    async def main() -> None:
        with connected("tcp") as pair, connected("tcp") as other:
            old_socket = socket_of(pair)
            old = connection_of(found(old_socket), None)
            assert old is not None
            pair.server.close()
            os.dup2(other.server.fileno(), old_socket.fd)
            try:
                new = connection_of(found(SocketFd(old_socket.fd, socket_of(other).inode)), None)
                assert new is not None
                assert not old.conn.is_attached
                other.client.shutdown(socket.SHUT_WR)
                await until(lambda: new.conn.reason is Reason.FIN)
                new.detach()
            finally:
                os.close(old_socket.fd)

    run(main)


def test_what_names_no_connection_of_ours_is_found_nowhere() -> None:
    for scope in ({}, {"client": None, "server": None}, {"client": ("::1", 1), "server": ("x", 2)}):
        assert find(scope, no_function, no_function) == Found("none")
