"""Which nodes a proxy asks, and how it lets go of one that has stopped."""

import asyncio
import socket

import aiohttp
import pytest

from disconnect_watch.server.disagg.nodes import MAX_SILENT, Node, NodeLostError, NodePool
from tests.support.net import until

URL = "http://127.0.0.1:1"


@pytest.mark.parametrize("url", ["", "127.0.0.1:80", "ftp://host", "http://", "http://host?a=1"])
def test_what_is_no_url_of_a_node_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="give http://HOST:PORT"):
        NodePool([URL, url])


def test_the_least_busy_that_is_there_comes_first() -> None:
    pool = NodePool([f"http://127.0.0.1:{port}" for port in (1, 2, 3)])
    first, second, third = pool.nodes
    assert pool.candidates() == [first, second, third]
    with first.busy(), first.busy(), second.busy():
        assert pool.candidates() == [third, second, first]
    third.answered(is_ready=False)
    assert pool.candidates() == [first, second]
    second.refused()
    assert pool.candidates() == [first]
    third.answered(is_ready=True)
    assert pool.candidates() == [first, third]


def silence(node: Node, times: int = MAX_SILENT) -> None:
    for _ in range(times):
        node.was_silent()


async def wait_on(node: Node) -> None:
    with node.depended_on():
        await asyncio.Event().wait()


def test_who_waits_for_a_node_that_has_stopped_hears_of_it() -> None:
    async def main() -> None:
        node = Node(URL)
        waiting = asyncio.create_task(wait_on(node))
        await asyncio.sleep(0)
        silence(node, MAX_SILENT - 1)
        node.answered(is_ready=True)  # so that it begins anew
        silence(node, MAX_SILENT - 1)
        await asyncio.sleep(0)
        assert not waiting.done()
        node.was_silent()
        with pytest.raises(NodeLostError, match="does not answer"):
            await waiting
        assert not node.is_there

    asyncio.run(main())


def test_a_client_that_leaves_is_no_lost_node() -> None:
    async def main(node: Node) -> None:
        waiting = asyncio.create_task(wait_on(node))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        # At the same time as the node falls silent: the client's leaving is what counts.
        waiting = asyncio.create_task(wait_on(node))
        await asyncio.sleep(0)
        silence(node)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(main(Node(URL)))


def test_a_process_that_takes_connections_and_answers_none_is_not_asked() -> None:
    async def main(port: int) -> None:
        pool = NodePool([f"http://127.0.0.1:{port}"])
        async with aiohttp.ClientSession() as session:
            watching = asyncio.create_task(pool.watch(session, every=0.01))
            await until(lambda: not pool.candidates())
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    # The kernel accepts for it.
    with socket.create_server(("127.0.0.1", 0)) as stopped:
        asyncio.run(main(stopped.getsockname()[1]))
