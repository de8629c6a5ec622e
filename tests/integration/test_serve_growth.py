"""Our uvicorn protocols keep nothing of a request or a connection that has ended."""

import asyncio
import gc
import operator
import sys
from typing import Any

import pytest

from disconnect_watch.adapters import TOKEN_KEY
from disconnect_watch.token import flag_table
from disconnect_watch.watcher import Watcher
from tests.support.http import Client
from tests.support.net import open_fds, wait_until
from tests.support.serve import STACKS, Stack, ThreadedServer

REQUESTS_PER_CONNECTION = 100
NUM_WARM_UP = 1000


async def application(scope: Any, receive: Any, send: Any) -> None:
    assert not scope["state"][TOKEN_KEY].cancelled
    await receive()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"{}"})


def request_often(server: ThreadedServer, num_requests: int) -> None:
    for _ in range(num_requests // REQUESTS_PER_CONNECTION):
        with Client(server.port) as client:
            for _ in range(REQUESTS_PER_CONNECTION):
                client.post("/", b"{}")
                client.read_response()


def holdings(server: ThreadedServer, watcher: Watcher) -> tuple[int, ...]:
    """Tasks, fds, flags and watches, once one connection is left."""
    wait_until(lambda: len(server.server.server_state.connections) == 1)
    wait_until(lambda: watcher.stats().num_connections == 1)
    stats = watcher.stats()
    return (
        len(asyncio.all_tasks(server.loop)),
        len(open_fds()),
        flag_table().stats()[0],
        stats.num_armed,
    )


def allocated_blocks() -> int:
    gc.collect()
    return sys.getallocatedblocks()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("stack", STACKS, ids=str)
@pytest.mark.parametrize(
    "num_requests", [5_000, pytest.param(100_000, marks=pytest.mark.exhaustive)]
)
def test_keep_alive_requests_leave_nothing_behind(stack: Stack, num_requests: int) -> None:
    with (
        Watcher() as watcher,
        stack.serving(application, stack.configured(watcher=watcher)) as server,
        # It keeps the loop's mailbox, and so all that the mailbox may have kept.
        Client(server.port),
    ):
        request_often(server, NUM_WARM_UP)
        before = holdings(server, watcher)
        blocks = allocated_blocks()
        request_often(server, num_requests)
        after = holdings(server, watcher)
        assert all(map(operator.le, after, before)), (before, after)  # or less, of tests before
        # An object a request would be ten times as much, a connection that is kept, with
        # its parser and transport, five times; the interpreter itself grows by a few hundred.
        assert allocated_blocks() - blocks < num_requests // 10
