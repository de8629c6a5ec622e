"""``start_server``: asyncio's, and the handler of a client that left is cancelled."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

import disconnect_watch as dw
from disconnect_watch import ClientDisconnected, Reason, Watcher, start_server, watch
from disconnect_watch.aio._server import _Reader
from disconnect_watch.watcher import default_watcher
from tests.support.loops import LoopRunner
from tests.support.net import dial, listener, open_fds, reset, transport_of, until

Handle = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None] | None]


@contextlib.asynccontextmanager
async def serving(
    handle: Handle, kind: str = "tcp", **options: Any
) -> AsyncIterator[Callable[[], socket.socket]]:
    """A server on loopback; yields what connects one more client to it."""
    with listener(kind) as listening:
        address = listening.getsockname()
        clients: list[socket.socket] = []
        # A copy: the server closes what it is given.
        server = await start_server(handle, sock=listening.dup(), **options)

        def connect() -> socket.socket:
            clients.append(dial(listening))
            return clients[-1]

        try:
            yield connect
        finally:
            server.close()
            await server.wait_closed()
            for client in clients:
                client.close()
            assert address


async def forever() -> None:
    await asyncio.get_running_loop().create_future()


class Handler:
    """Runs ``body``, and notes how it ended."""

    def __init__(
        self, body: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[object]]
    ) -> None:
        self.body = body
        self.num_started = 0
        self.ends: list[object] = []
        self.writer: asyncio.StreamWriter | None = None

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_started += 1
        self.writer = writer
        try:
            self.ends.append(await self.body(reader, writer))
        except BaseException as error:
            self.ends.append(type(error))
            raise
        writer.close()


def _fin_behind_data(client: socket.socket) -> None:
    client.sendall(b"pipelined")
    client.close()


LEAVING: dict[str, Callable[[socket.socket], None]] = {
    "fin": socket.socket.close,
    "half_close": lambda client: client.shutdown(socket.SHUT_WR),
    "rst": reset,
    "fin_behind_data": _fin_behind_data,
}


async def hear(client: socket.socket, way: str) -> bytes:
    """Wait for one byte, and take it unless a reset needs it: unread, it makes one of a FIN."""
    return await asyncio.to_thread(client.recv, 1, socket.MSG_PEEK if way == "rst" else 0)


@pytest.mark.parametrize("way", LEAVING)
def test_handler_that_computes_is_cancelled_when_its_client_leaves(
    run: LoopRunner, kind: str, way: str
) -> None:
    async def body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(b".")
        await forever()

    async def main() -> None:
        handler = Handler(body)
        async with serving(handler, kind) as connect:
            client = connect()
            client.sendall(b"prompt\n")
            assert await hear(client, way) == b"."
            LEAVING[way](client)
            await until(lambda: handler.ends)
            assert handler.ends == [asyncio.CancelledError]
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
        lambda reader: asyncio.wait_for(reader.read(), 20),
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
        handler = Handler(body)
        async with serving(handler) as connect:
            client = connect()
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
        handler = Handler(body)
        async with serving(handler) as connect:
            client = connect()
            client.sendall(b"short")
            client.close()
            await until(lambda: handler.ends)
            assert handler.ends == [b"short"]

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
        handler = Handler(body)
        async with serving(handler) as connect:
            client = connect()
            client.sendall(b"prompt\n")
            LEAVING[way](client)
            await until(lambda: handler.ends)
            assert handler.ends == [asyncio.CancelledError]

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
        handler = Handler(body)
        async with serving(handler) as connect:
            client = connect()
            await until(lambda: handler.num_started)
            client.sendall(b"abcd")
            client.shutdown(socket.SHUT_WR)
            await until(lambda: handler.ends)
            assert handler.ends == [asyncio.CancelledError]

    run(main)


def test_reset_after_a_tolerated_fin_cancels(run: LoopRunner) -> None:
    read = asyncio.Event()

    async def body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert await reader.read() == b"all"
        read.set()
        await forever()

    async def main() -> None:
        handler = Handler(body)
        async with serving(handler) as connect:
            client = connect()
            client.sendall(b"all")
            client.shutdown(socket.SHUT_WR)
            await read.wait()
            for _ in range(20):
                await asyncio.sleep(0)
            assert not handler.ends
            reset(client)
            await until(lambda: handler.ends)
            assert handler.ends == [asyncio.CancelledError]

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
        handler = Handler(body)
        async with serving(handler, half_close="ignore") as connect:
            client = connect()
            client.sendall(b"prompt\n")
            client.shutdown(socket.SHUT_WR)
            assert await asyncio.to_thread(client.recv, 6) == b"served"
            assert not handler.ends
            reset(client)
            await until(lambda: handler.ends)
            assert handler.ends == [asyncio.CancelledError]

    run(main)


@pytest.mark.parametrize("way", ["fin", "rst"])
def test_owner_that_reads_the_end_first_is_the_second_source(run: LoopRunner, way: str) -> None:
    # The kernel's event never comes: what the transport read is all there is.
    async def body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asyncio.get_running_loop().remove_reader(deaf.fileno())
        writer.write(b".")
        await forever()

    async def main() -> None:
        handler = Handler(body)
        async with serving(handler, watcher=deaf) as connect:
            client = connect()
            await hear(client, way)
            LEAVING[way](client)
            await until(lambda: handler.ends)
            assert handler.ends == [asyncio.CancelledError]

    with Watcher(driver="loop") as deaf:
        run(main)


def test_loop_driven_watcher_serves(run: LoopRunner) -> None:
    async def body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        transport_of(writer).pause_reading()  # only the watcher can tell
        writer.write(b".")
        await forever()

    async def main() -> None:
        handler = Handler(body)
        async with serving(handler, watcher=watcher) as connect:
            client = connect()
            await asyncio.to_thread(client.recv, 1)
            client.close()
            await until(lambda: handler.ends)
            assert handler.ends == [asyncio.CancelledError]

    with Watcher(driver="loop") as watcher:
        run(main)


# --- what stays as in asyncio -----------------------------------------------------------


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
            await until(lambda: handler.ends)
            assert handler.ends == ["done"]
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
        handler = Handler(body)
        async with serving(handler) as connect:
            client = connect()
            client.sendall(b"prompt\n")
            await until(lambda: handler.writer is not None and handler.writer.is_closing())
            client.shutdown(socket.SHUT_WR)
            assert len(await asyncio.to_thread(read_all, client)) == len(answer)
            await until(lambda: handler.ends)
            assert handler.ends == ["done"]

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
        handler = Handler(body)
        async with serving(handler) as connect:
            client = connect()
            client.sendall(b"prompt\n")
            await until(lambda: handler.writer is not None and handler.writer.is_closing())
            reset(client)
            await until(lambda: handler.ends)
            assert handler.ends == [asyncio.CancelledError]

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
        handler = Handler(body)
        async with serving(handler) as connect:
            client = connect()
            await asyncio.to_thread(client.recv, 1)
            client.shutdown(socket.SHUT_WR)
            await left.wait()
            reset(client)
            await until(lambda: handler.writer is not None)
            assert handler.writer is not None
            handler.writer.transport.abort()
            await until(lambda: handler.ends)
            assert handler.ends == [1]

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
        handler = Handler(body)
        async with serving(handler) as connect:
            client = connect()
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
                await until(lambda: handler.ends)
        assert handler.ends == ["refused"]

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
            await until(lambda: handler.ends)
        assert handler.ends == [asyncio.CancelledError]

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
        handler = Handler(body)
        async with serving(handler, watcher=watcher) as connect:
            client = connect()
            await asyncio.to_thread(client.recv, 1)
            watcher.close()
            client.sendall(b"all")
            client.shutdown(socket.SHUT_WR)
            await until(lambda: handler.ends)
            assert handler.ends == [b"all"]

    run(main)


# --- a watch inside a handler -----------------------------------------------------------


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
        handler = Handler(body)
        async with serving(handler, kind) as connect:
            client = connect()
            await asyncio.to_thread(client.recv, 1)
            client.close()
            await until(lambda: handler.ends)
            assert handler.ends == [Reason.FIN]

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
        handler = Handler(body)
        async with serving(handler) as connect:
            client = connect()
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
        handler = Handler(body)
        async with serving(handler) as connect:
            client = connect()
            await asyncio.to_thread(client.recv, 1)
            client.close()
            await until(lambda: handler.ends)
            assert handler.ends == [ClientDisconnected]

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
        handler = Handler(body)
        async with serving(handler) as connect:
            client = connect()
            await asyncio.to_thread(client.recv, 1)
            client.close()
            await until(lambda: handler.ends)
            assert handler.ends == [asyncio.CancelledError]
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
        handler = Handler(body)
        async with serving(handler, watcher=watcher) as connect:
            client = connect()
            await asyncio.to_thread(client.recv, 1)
            client.close()
            await until(lambda: handler.ends)
            assert handler.ends == [None]

    with Watcher() as watcher:
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
