"""Connections that nobody leaves cost nothing, however many and however busy they are."""

import contextlib

import pytest

from disconnect_watch import CancelToken, Reason, Watcher
from tests.stress.crowd import LEAVE, SEND, crowd, raise_fd_limit
from tests.support.net import listener, unread_bytes, wait_until


@pytest.mark.slow
@pytest.mark.parametrize("num_clients", [500, pytest.param(18_000, marks=pytest.mark.exhaustive)])
def test_requests_of_idle_connections_wake_nobody(num_clients: int) -> None:
    with (
        raise_fd_limit(num_clients) as is_allowed,
        listener("tcp") as listening,
        contextlib.ExitStack() as stack,
    ):
        if not is_allowed:
            pytest.skip(f"the hard limit of fds allows no {num_clients} sockets")
        listening.listen(1024)
        clients = stack.enter_context(crowd(listening, num_clients))
        servers = [stack.enter_context(listening.accept()[0]) for _ in range(num_clients)]
        clients.answer()
        watcher = stack.enter_context(Watcher(poller="epoll"))
        tokens = [CancelToken() for _ in servers]
        for server, token in zip(servers, tokens, strict=True):
            stack.enter_context(watcher.attach(server)).arm(token)
        before = watcher.stats().num_wakeups

        for _ in range(3):
            clients.order(SEND)
        wait_until(lambda: unread_bytes(servers[-1]) == 300)
        assert all(map(unread_bytes, servers))
        assert watcher.stats().num_wakeups == before

        clients.order(LEAVE)
        assert tokens[-1].wait(40)
        assert tokens[-1].reason is Reason.FIN
        assert watcher.stats().num_wakeups == before + 1
        assert sum(token.cancelled for token in tokens) == 1
