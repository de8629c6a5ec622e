"""What ``start_server`` leaves as it is in asyncio: answers, errors, cancels from elsewhere."""

import asyncio
import contextlib
import socket
from typing import Any

import pytest

import disconnect_watch as dw
from disconnect_watch import ClientDisconnected, Watcher, start_server, watch
from disconnect_watch.watcher import default_watcher
from tests.support.loops import LoopRunner
from tests.support.net import reset, until
from tests.support.start_server import Handler, forever, serving, visited


def test_answer_and_close_of_a_served_client_cancel_nobody(run: LoopRunner, kind: str) -> None:
    async def body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
        while line := await reader.readline():
            writer.write(line.upper())
            await writer.drain()
        writer.close()
        await writer.wait_closed()
        return "done"

    async def main() -> None:
        handler = Handler(body)
        async with serving(handler, kind) as connect:
            client = connect()
            for number in range(1000):
                client.sendall(b"r%d\n" % number)
                assert await asyncio.to_thread(client.recv, 100) == b"R%d\n" % number
            stats = default_watcher().stats()
            assert (stats.num_connections, stats.num_armed) == (1, 2)
            client.close()
            assert await handler.end() == "done"
            await until(lambda: default_watcher().stats().num_connections == 0)

    run(main)


def test_client_that_closes_while_the_answer_is_flushed_cancels_nobody(run: LoopRunner) -> None:
    # More than the socket takes: the close waits until the client has read it.
    answer = b"x" * 4_000_000

    async def body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
        await reader.readline()
        writer.write(answer)
        writer.close()
        await writer.wait_closed()
        return "done"

    async def main() -> None:
        async with visited(body) as (handler, client):
            client.sendall(b"prompt\n")
            await until(lambda: handler.writer is not None and handler.writer.is_closing())
            client.shutdown(socket.SHUT_WR)
            assert len(await asyncio.to_thread(read_all, client)) == len(answer)
            assert await handler.end() == "done"

    run(main)


def read_all(client: socket.socket) -> bytes:
    return b"".join(iter(lambda: client.recv(1 << 20), b""))


def test_client_that_resets_while_the_answer_is_flushed_cancels(run: LoopRunner) -> None:
    async def body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(b"x" * 16_000_000)  # more than both kernel buffers take
        writer.close()
        await forever()

    async def main() -> None:
        async with visited(body) as (handler, client):
            client.sendall(b"prompt\n")
            await until(lambda: handler.writer is not None and handler.writer.is_closing())
            reset(client)
            assert await handler.end() == asyncio.CancelledError

    run(main)


def test_handler_that_swallows_the_cancel_goes_on_and_is_cancelled_once(run: LoopRunner) -> None:
    left = asyncio.Event()

    async def body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int:
        writer.write(b".")
        num_cancels = 0
        try:
            await forever()
        except asyncio.CancelledError:
            num_cancels += 1
        with contextlib.suppress(asyncio.CancelledError):
            left.set()
            await until(writer.is_closing)  # by the reset
            for _ in range(20):
                await asyncio.sleep(0)
            return num_cancels
        return 99

    async def main() -> None:
        async with visited(body) as (handler, client):
            await asyncio.to_thread(client.recv, 1)
            client.shutdown(socket.SHUT_WR)
            await left.wait()
            reset(client)
            await until(lambda: handler.writer is not None)
            assert handler.writer is not None
            handler.writer.transport.abort()
            assert await handler.end() == 1

    run(main)


def test_exception_of_a_handler_is_reported_as_asyncio_does(run: LoopRunner) -> None:
    async def body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        raise KeyError("of the handler")

    async def main() -> None:
        async with serving(Handler(body)) as connect:
            client = connect()
            assert await asyncio.to_thread(client.recv, 1) == b""

    run(main, reports=1)
    (report,) = run.reports
    assert report["message"] == "Unhandled exception in client_connected_cb"
    assert isinstance(report["exception"], KeyError)
    assert report["transport"] is not None


def test_cancel_from_outside_closes_the_connection_and_is_not_reported(run: LoopRunner) -> None:
    async def body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().call_soon(task.cancel)
        await forever()

    async def main() -> None:
        async with visited(body) as (handler, client):
            assert await asyncio.to_thread(client.recv, 1) == b""
            assert handler.ends == [asyncio.CancelledError]

    run(main)


def test_plain_function_is_called_and_nothing_is_cancelled(run: LoopRunner) -> None:
    async def main() -> None:
        writers = []

        def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writers.append((reader, writer))
            writer.write(b"hello")

        async with serving(handle) as connect:
            client = connect()
            assert await asyncio.to_thread(client.recv, 5) == b"hello"
            _, writer = writers.pop()
            with pytest.raises(ClientDisconnected):
                async with watch(writer):
                    client.close()
                    await forever()
            writer.close()

    run(main)


def test_limit_and_other_arguments_reach_asyncio(run: LoopRunner) -> None:
    async def body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
        with pytest.raises(ValueError, match="limit"):
            await reader.readline()
        return "refused"

    async def main() -> None:
        handler = Handler(body)
        server = await start_server(handler, "127.0.0.1", 0, limit=16, backlog=5)
        async with server:
            with socket.create_connection(server.sockets[0].getsockname()) as client:
                client.sendall(b"x" * 100)
                assert await handler.end() == "refused"

    run(main)


def test_unix_server_cancels_too(run: LoopRunner, tmp_path: Any) -> None:
    async def body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b".")
        await forever()

    async def main() -> None:
        handler = Handler(body)
        path = str(tmp_path / "s")
        server = await dw.start_unix_server(handler, path)
        async with server:
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(path)
                assert await asyncio.to_thread(client.recv, 1) == b"."
            assert await handler.end() == asyncio.CancelledError

    run(main)


def test_unknown_half_close_policy_is_refused(run: LoopRunner) -> None:
    async def main() -> None:
        with pytest.raises(ValueError, match="'maybe'"):
            await start_server(Handler(lambda *_: forever()), half_close="maybe")  # type: ignore[arg-type]

    run(main)


def test_connection_that_cannot_be_watched_is_refused_and_reported(run: LoopRunner) -> None:
    async def main() -> None:
        watcher = Watcher()
        handler = Handler(lambda *_: forever())
        async with serving(handler, watcher=watcher) as connect:
            watcher.close()
            client = connect()
            with contextlib.suppress(ConnectionResetError):
                assert await asyncio.to_thread(client.recv, 1) == b""
            assert handler.num_started == 0

    run(main, reports=1)
    (report,) = run.reports
    assert isinstance(report["exception"], dw.ClosedError)


def test_owner_does_not_suffer_from_a_watcher_that_is_closed_early(run: LoopRunner) -> None:
    async def body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        async with watch(writer):
            writer.write(b".")
            data = await reader.read()
        writer.close()
        await writer.wait_closed()
        return data

    async def main() -> None:
        watcher = Watcher()
        async with visited(body, watcher=watcher) as (handler, client):
            await asyncio.to_thread(client.recv, 1)
            watcher.close()
            client.sendall(b"all")
            client.shutdown(socket.SHUT_WR)
            assert await handler.end() == b"all"

    run(main)
