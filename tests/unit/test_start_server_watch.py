"""A ``watch`` inside a handler of ``start_server``."""

import asyncio
import socket

import pytest

import disconnect_watch as dw
from disconnect_watch import ClientDisconnected, Reason, Watcher, watch
from disconnect_watch.watcher import default_watcher
from tests.support.loops import LoopRunner
from tests.support.net import until
from tests.support.start_server import forever, visited


def test_watch_inside_a_handler_shares_the_connection_and_has_its_way(
    run: LoopRunner, kind: str
) -> None:
    async def body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Reason:
        with pytest.raises(ClientDisconnected) as caught:
            async with watch(writer) as w:
                stats = default_watcher().stats()
                assert (stats.num_connections, stats.num_armed) == (1, 3)
                writer.write(b".")
                await forever()
        assert w.token.cancelled
        for _ in range(20):
            await asyncio.sleep(0)  # it was told, and is not told again
        reason: Reason = caught.value.reason
        return reason

    async def main() -> None:
        async with visited(body, kind) as (handler, client):
            await asyncio.to_thread(client.recv, 1)
            client.close()
            assert await handler.end() == Reason.FIN

    run(main)


def test_leave_that_a_watch_ignores_reaches_the_handler_after_it(run: LoopRunner) -> None:
    async def body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with watch(writer, half_close="ignore"):
            writer.write(b".")
            await until(lambda: dw.is_gone(writer.get_extra_info("socket").fileno()))
            for _ in range(20):
                await asyncio.sleep(0)
            passed.append(True)
        await forever()

    async def main() -> None:
        async with visited(body) as (handler, client):
            await asyncio.to_thread(client.recv, 1)
            client.shutdown(socket.SHUT_WR)
            await until(lambda: handler.ends)
            assert passed == [True]
            assert handler.ends == [asyncio.CancelledError]

    passed: list[bool] = []
    run(main)


def test_client_disconnected_that_leaves_a_handler_is_its_quiet_end(run: LoopRunner) -> None:
    async def body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with watch(writer):
            writer.write(b".")
            await forever()

    async def main() -> None:
        async with visited(body) as (handler, client):
            await asyncio.to_thread(client.recv, 1)
            client.close()
            assert await handler.end() == ClientDisconnected

    run(main)


def test_watch_in_a_task_of_the_handler_and_the_handler_are_both_cancelled(
    run: LoopRunner,
) -> None:
    async def body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async def work() -> None:
            try:
                async with watch(writer):
                    writer.write(b".")
                    await forever()
            except ClientDisconnected:
                told.append("work")

        async with asyncio.TaskGroup() as group:
            group.create_task(work())
            await forever()

    async def main() -> None:
        async with visited(body) as (handler, client):
            await asyncio.to_thread(client.recv, 1)
            client.close()
            assert await handler.end() == asyncio.CancelledError
            assert told == ["work"]

    told: list[str] = []
    run(main)


def test_watch_inside_a_handler_uses_the_servers_watcher(run: LoopRunner) -> None:
    async def body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with pytest.raises(ClientDisconnected):
            async with watch(writer):
                assert watcher.stats().num_armed == 3
                assert default_watcher().stats().num_connections == 0
                writer.write(b".")
                await forever()

    async def main() -> None:
        async with visited(body, watcher=watcher) as (handler, client):
            await asyncio.to_thread(client.recv, 1)
            client.close()
            assert await handler.end() is None

    with Watcher() as watcher:
        run(main)
