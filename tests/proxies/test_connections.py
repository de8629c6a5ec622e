"""What a proxy makes of a body that stops half-way, and of a connection that it uses again."""

import contextlib
from collections.abc import Callable

import pytest

from tests.proxies.programs import FRONTS
from tests.proxies.visitors import H1, H2, Visitor
from tests.support.net import wait_until
from tests.support.upstream import Upstream, body_of


def visitor(key: str, port: int) -> Visitor:
    return H2(port) if FRONTS[key].is_h2 else H1(port)


@pytest.mark.parametrize("way", ["fin", "rst"])
@pytest.mark.parametrize("key", FRONTS)
def test_upload_that_ends_half_way_is_cancelled_or_has_never_begun(
    key: str, way: str, server: Upstream, port_of: Callable[[str], int]
) -> None:
    path, other_path = server.name("wait"), server.name("wait")
    port = port_of(key)
    with (
        contextlib.closing(visitor(key, port)) as leaves,
        contextlib.closing(visitor(key, port)) as stays,
    ):
        leaves.begin_upload(path)
        # nginx collects the body first.
        call = None if FRONTS[key].program == "nginx" else server.wait_for(path)
        stays.ask(other_path)
        other_call = server.wait_for(other_path)
        leaves.leave(way)
        if call is not None:
            wait_until(lambda: call.token.cancelled)
            wait_until(lambda: call.outcome == "stopped")
        other_call.may_finish.set()
        stays.read_whole(body_of(other_path))
        if call is None:
            assert server.find(path) is None
    server.settle()


@pytest.mark.parametrize("key", ["nginx-streaming", "haproxy-abortonclose", "caddy"])
def test_leave_is_noticed_on_a_connection_that_has_answered_before(
    key: str, server: Upstream, port_of: Callable[[str], int]
) -> None:
    port = port_of(key)
    with contextlib.closing(H1(port)) as stays, contextlib.closing(H1(port)) as leaves:
        first, second, third = (server.name("wait") for _ in range(3))
        leaves.ask(first)
        call = server.wait_for(first)
        call.may_finish.set()
        leaves.read_whole(body_of(first))
        leaves.ask(second)
        call_on_same = server.wait_for(second)
        assert call_on_same.client == call.client, "the proxy was to use its connection again"
        leaves.leave("fin")
        wait_until(lambda: call_on_same.outcome == "stopped")
        assert (call.outcome, call.reason) == ("whole", "")
        stays.ask(third)
        server.wait_for(third).may_finish.set()
        stays.read_whole(body_of(third))
    server.settle()
