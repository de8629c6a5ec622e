"""``start_server``: asyncio's, and the handler of a client that left is cancelled."""

import asyncio
import socket
from collections.abc import Awaitable, Callable

import pytest

import disconnect_watch as dw
from disconnect_watch import Watcher
from disconnect_watch.aio._server import _Reader
from disconnect_watch.watcher import default_watcher
from tests.support.loops import LoopRunner
from tests.support.net import open_fds, reset, transport_of, until
from tests.support.start_server import LEAVING, Handler, forever, hear, serving, visited


@pytest.mark.parametrize("way", LEAVING)
def test_handler_that_computes_is_cancelled_when_its_client_leaves(
    run: LoopRunner, kind: str, way: str
) -> None:
    async def body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(b".")
        await forever()

    async def main() -> None:
        async with visited(body, kind) as (handler, client):
            client.sendall(b"prompt\n")
            assert await hear(client, way) == b"."
            LEAVING[way](client)
            assert await handler.end() == asyncio.CancelledError
            assert handler.writer is not None
            await until(handler.writer.is_closing)
            await until(lambda: default_watcher().stats().num_connections == 0)

    run(main)


@pytest.mark.parametrize("way", ["fin", "half_close", "fin_behind_data"])
@pytest.mark.parametrize(
    "read_all",
    [
        lambda reader: reader.read(),
        lambda reader: read_in_chunks(reader),
        lambda reader: read_in_lines(reader),
        lambda reader: read_until_at_eof(reader),
        lambda reader: asyncio.wait_for(reader.read(), 40),
    ],
    ids=["read", "chunks", "lines", "at_eof", "wait_for"],
)
def test_handler_that_reads_to_the_end_is_served_as_before(
    run: LoopRunner, way: str, read_all: Callable[[asyncio.StreamReader], Awaitable[bytes]]
) -> None:
    # As `nc -N` asks: the whole request, then a FIN, then it waits for the answer.
    async def body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        data = await read_all(reader)
        for _ in range(20):
            await asyncio.sleep(0)
        if way == "half_close":
            writer.write(data[::-1])
            await writer.drain()
        return data

    async def main() -> None:
        async with visited(body) as (handler, client):
            client.sendall(b"one\ntwo\n")
            LEAVING[way](client)
            await until(lambda: handler.ends)
            sent = b"one\ntwo\n" + (b"pipelined" if way == "fin_behind_data" else b"")
            assert handler.ends == [sent]
            if way == "half_close":
                assert await asyncio.to_thread(client.recv, 100) == b"\nowt\neno"

    run(main)


async def read_in_chunks(reader: asyncio.StreamReader) -> bytes:
    data = b""
    while chunk := await reader.read(3):
        data += chunk
    return data


async def read_in_lines(reader: asyncio.StreamReader) -> bytes:
    return b"".join([line async for line in reader])


async def read_until_at_eof(reader: asyncio.StreamReader) -> bytes:
    data = b""
    while not reader.at_eof():
        data += await reader.read(3)
    return data


def test_at_eof_tells_the_end_as_a_read_does(run: LoopRunner) -> None:
    async def main() -> None:
        reader = _Reader()
        reader.feed_data(b"all")
        reader.feed_eof()
        assert await reader.read(3) == b"all"
        ends = [reader.was_end_read]
        assert reader.at_eof()
        ends.append(reader.was_end_read)
        assert ends == [False, True]

    run(main)


def test_end_that_cuts_a_message_short_is_the_handlers_business(run: LoopRunner) -> None:
    async def body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        try:
            await reader.readexactly(100)
        except asyncio.IncompleteReadError as error:
            for _ in range(20):
                await asyncio.sleep(0)
            return error.partial
        return b""

    async def main() -> None:
        async with visited(body) as (handler, client):
            client.sendall(b"short")
            client.close()
            assert await handler.end() == b"short"

    run(main)


@pytest.mark.parametrize("way", ["fin", "half_close"])
def test_client_that_left_before_the_first_step_is_read_to_the_end(
    run: LoopRunner, kind: str, way: str
) -> None:
    async def body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        return await reader.read()

    async def main() -> None:
        handler = Handler(body)
        async with serving(handler, kind) as connect:
            for _ in range(5):
                client = connect()  # accepted by the kernel, not yet by the loop
                client.sendall(b"all")
                LEAVING[way](client)
            await until(lambda: len(handler.ends) == 5)
            assert handler.ends == [b"all"] * 5

    run(main)


@pytest.mark.parametrize("way", ["fin", "half_close"])
def test_client_that_left_before_the_first_step_gets_no_work(run: LoopRunner, way: str) -> None:
    async def body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        await forever()

    async def main() -> None:
        async with visited(body) as (handler, client):
            client.sendall(b"prompt\n")
            LEAVING[way](client)
            assert await handler.end() == asyncio.CancelledError

    run(main)


def test_fin_known_during_a_read_counts_once_the_handler_does_something_else(
    run: LoopRunner,
) -> None:
    # The first read returns without the end, and no further news comes from the kernel.
    async def body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert await reader.readexactly(2) == b"ab"
        assert reader._buffer  # type: ignore[attr-defined]
        await forever()

    async def main() -> None:
        async with visited(body) as (handler, client):
            await until(lambda: handler.num_started)
            client.sendall(b"abcd")
            client.shutdown(socket.SHUT_WR)
            assert await handler.end() == asyncio.CancelledError

    run(main)


def test_reset_after_a_tolerated_fin_cancels(run: LoopRunner) -> None:
    read = asyncio.Event()

    async def body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert await reader.read() == b"all"
        read.set()
        await forever()

    async def main() -> None:
        async with visited(body) as (handler, client):
            client.sendall(b"all")
            client.shutdown(socket.SHUT_WR)
            await read.wait()
            for _ in range(20):
                await asyncio.sleep(0)
            assert not handler.ends
            reset(client)
            assert await handler.end() == asyncio.CancelledError

    run(main)


def test_reset_cancels_a_handler_that_waits_to_read(run: LoopRunner, kind: str) -> None:
    async def body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b".")
        await reader.read()

    async def main() -> None:
        handler = Handler(body)
        async with serving(handler, kind) as connect:
            for _ in range(10):
                client = connect()
                await asyncio.to_thread(client.recv, 1, socket.MSG_PEEK)
                reset(client)
                await until(lambda: len(handler.ends) == handler.num_started)
            assert handler.ends == [asyncio.CancelledError] * 10

    run(main)


def test_half_close_can_be_ignored_and_a_reset_cannot(run: LoopRunner) -> None:
    async def body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        await until(lambda: dw.is_gone(writer.get_extra_info("socket").fileno()))
        for _ in range(20):
            await asyncio.sleep(0)
        writer.write(b"served")
        await forever()

    async def main() -> None:
        async with visited(body, half_close="ignore") as (handler, client):
            client.sendall(b"prompt\n")
            client.shutdown(socket.SHUT_WR)
            assert await asyncio.to_thread(client.recv, 6) == b"served"
            assert not handler.ends
            reset(client)
            assert await handler.end() == asyncio.CancelledError

    run(main)


@pytest.mark.parametrize("way", ["fin", "rst"])
def test_owner_that_reads_the_end_first_is_the_second_source(run: LoopRunner, way: str) -> None:
    # The kernel's event never comes: what the transport read is all there is.
    async def body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asyncio.get_running_loop().remove_reader(deaf.fileno())
        writer.write(b".")
        await forever()

    async def main() -> None:
        async with visited(body, watcher=deaf) as (handler, client):
            await hear(client, way)
            LEAVING[way](client)
            assert await handler.end() == asyncio.CancelledError

    with Watcher(driver="loop") as deaf:
        run(main)


def test_loop_driven_watcher_serves(run: LoopRunner) -> None:
    async def body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        transport_of(writer).pause_reading()  # only the watcher can tell
        writer.write(b".")
        await forever()

    async def main() -> None:
        async with visited(body, watcher=watcher) as (handler, client):
            await asyncio.to_thread(client.recv, 1)
            client.close()
            assert await handler.end() == asyncio.CancelledError

    with Watcher(driver="loop") as watcher:
        run(main)


def test_many_clients_that_leave_at_random_moments_leave_nothing_behind(run: LoopRunner) -> None:
    async def body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if line := await reader.readline():
            writer.write(line)
            await writer.drain()
            await forever()

    async def main() -> None:
        handler = Handler(body)
        async with serving(handler) as connect:
            fds = len(open_fds())
            ways = list(LEAVING.values())
            for round_ in range(10):
                clients = [connect() for _ in range(10)]
                for client in clients[::2]:
                    client.sendall(b"prompt\n")
                await asyncio.sleep(0)
                for number, client in enumerate(clients):
                    ways[(number + round_) % len(ways)](client)
                    if number % 3 == 0:
                        await asyncio.sleep(0)
                for client in clients:
                    client.close()
            await until(lambda: len(handler.ends) == handler.num_started)
            await until(lambda: len(open_fds()) <= fds)
            assert set(handler.ends) <= {asyncio.CancelledError, ConnectionResetError, None}

    run(main)
