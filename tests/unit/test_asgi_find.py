"""A watch on an fd that is known by its addresses: on that socket, or on none."""

import asyncio
import os
import socket
from typing import Any

from disconnect_watch import Reason
from disconnect_watch.adapters._asgi_find import Found, connection_of, find
from disconnect_watch.adapters.asgi import CancelOnDisconnect
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


async def unsent(message: Any) -> None: ...


async def never() -> Any:
    await asyncio.Event().wait()


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


def scope_of(pair: Pair, http_version: str = "1.1") -> dict[str, Any]:
    ends = {"client": pair.server.getpeername(), "server": pair.server.getsockname()}
    return {"type": "http", "http_version": http_version, "headers": [], "path": "/", **ends}


def test_a_request_whose_connection_was_closed_behind_the_one_before_never_begins(
    run: LoopRunner, tcp: Pair
) -> None:
    """Native code goes on with what it has read of a client that left."""
    begun: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        begun.append(scope["path"])

    async def main() -> None:
        scope = scope_of(tcp)
        watched = CancelOnDisconnect(app)
        await watched({**scope, "path": "/first"}, never, unsent)
        tcp.server.close()
        await watched({**scope, "path": "/behind"}, never, unsent)

    run(main)
    assert begun == ["/first"]


def test_a_connection_is_lost_only_once_it_was_known_and_over_tcp(tcp: Pair) -> None:
    scope = scope_of(tcp)
    strangers = scope | {"client": ("127.0.0.1", 1)}
    assert find(scope, no_function, no_function).socket == socket_of(tcp)
    tcp.server.close()
    assert find(scope, no_function, no_function) == Found("addresses", is_lost=True)
    assert find(strangers, no_function, no_function) == Found("none")
    # The datagrams of HTTP/3 may have the same addresses.
    assert find(scope | {"http_version": "3"}, no_function, no_function) == Found("none")


def test_what_names_no_connection_of_ours_is_found_nowhere() -> None:
    for scope in ({}, {"client": None, "server": None}, {"client": ("::1", 1), "server": ("x", 2)}):
        assert find(scope, no_function, no_function) == Found("none")
