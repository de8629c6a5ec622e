"""Under TLS: the socket below is watched, whatever the TLS layer does with its end."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator

import pytest

from disconnect_watch import ClientDisconnected, Reason, start_server, watch
from disconnect_watch.watcher import default_watcher
from tests.support.loops import LoopRunner
from tests.support.net import reset, until
from tests.support.tls import client_context, server_context

WAYS = ("fin", "close_notify_and_fin", "rst")


class Client:
    """A TLS client whose socket can be left in the ways that TLS knows."""

    def __init__(self, address: tuple[str, int], *, greeting: bytes = b"") -> None:
        self.raw = socket.create_connection(address, 10)
        assert self.raw.recv(len(greeting)) == greeting
        self.tls = client_context().wrap_socket(
            self.raw, server_hostname="localhost", suppress_ragged_eofs=False
        )

    def leave(self, way: str) -> None:
        if way == "close_notify_and_fin":
            # Sends the alert and does not wait for the answer, as curl does.
            self.tls.setblocking(False)
            with contextlib.suppress(ssl.SSLWantReadError):
                self.tls.unwrap()
        if way == "rst":
            reset(self.tls)
        else:
            self.tls.close()


@contextlib.asynccontextmanager
async def tls_streams() -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter, Client]]:
    """A plain asyncio server's end of a TLS connection, and the client of it."""
    ends = asyncio.get_running_loop().create_future()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ends.set_result((reader, writer))

    server = await asyncio.start_server(connected, "127.0.0.1", 0, ssl=server_context())
    async with server:
        client = await asyncio.to_thread(Client, server.sockets[0].getsockname())
        reader, writer = await ends
        try:
            yield reader, writer, client
        finally:
            client.tls.close()
            writer.transport.abort()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


async def forever() -> None:
    await asyncio.get_running_loop().create_future()


@pytest.mark.parametrize("pause_reading", [True, False], ids=["paused", "reading"])
@pytest.mark.parametrize("way", WAYS)
def test_leave_under_tls_ends_the_block(run: LoopRunner, way: str, pause_reading: bool) -> None:
    async def main() -> None:
        async with tls_streams() as (_, writer, client):
            with pytest.raises(ClientDisconnected) as caught:
                async with watch(writer, pause_reading=pause_reading):
                    client.leave(way)
                    await forever()
            # The transport below reads on, and may take the reset's error before us.
            assert caught.value.reason in (
                {Reason.RESET, Reason.FIN} if way == "rst" else {Reason.FIN}
            )
            assert default_watcher().stats().num_armed == 0

    run(main)


def test_requests_pipelined_under_tls_reach_the_owner_afterwards(run: LoopRunner) -> None:
    async def main() -> None:
        async with tls_streams() as (reader, writer, client):
            async with watch(writer) as w:
                client.tls.sendall(b"pipelined")
                await asyncio.sleep(0)
                assert not w.token.cancelled
            assert await reader.readexactly(9) == b"pipelined"

    run(main)


@pytest.mark.parametrize("way", WAYS)
def test_handler_under_tls_is_cancelled_when_its_client_leaves(run: LoopRunner, way: str) -> None:
    ends: list[object] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readline()
            writer.write(b".")
            await forever()
        except BaseException as error:
            ends.append(type(error))
            raise

    async def main() -> None:
        server = await start_server(handle, "127.0.0.1", 0, ssl=server_context())
        async with server:
            client = await asyncio.to_thread(Client, server.sockets[0].getsockname())
            client.tls.sendall(b"prompt\n")
            assert await asyncio.to_thread(client.tls.recv, 1) == b"."
            client.leave(way)
            await until(lambda: ends)
            assert ends == [asyncio.CancelledError]
            await until(lambda: default_watcher().stats().num_connections == 0)

    run(main)


def test_handler_that_reads_to_the_end_under_tls_is_not_cancelled(run: LoopRunner) -> None:
    ends: list[object] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            data = await reader.read()
            for _ in range(20):
                await asyncio.sleep(0)
            ends.append(data)
        except BaseException as error:
            ends.append(error)
            raise
        writer.close()

    async def main() -> None:
        server = await start_server(handle, "127.0.0.1", 0, ssl=server_context())
        async with server:
            client = await asyncio.to_thread(Client, server.sockets[0].getsockname())
            client.tls.sendall(b"all of it")
            await asyncio.to_thread(client.tls.unwrap)
            client.tls.close()
            await until(lambda: ends)
            assert ends == [b"all of it"]

    run(main)


@pytest.mark.parametrize("is_known", [False, True], ids=["first", "known_by_its_transport"])
def test_close_of_ones_own_under_tls_cancels_nobody(run: LoopRunner, is_known: bool) -> None:
    async def main() -> None:
        async with tls_streams() as (_, writer, client):
            if is_known:
                async with watch(writer.transport):
                    pass
            async with watch(writer) as w:
                writer.close()
                closing = asyncio.to_thread(client.tls.recv, 1)
                assert await closing == b""
                client.leave("close_notify_and_fin")
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
                for _ in range(20):
                    await asyncio.sleep(0)
            assert w.token.cancelled

    run(main)


def test_handler_that_answers_and_closes_under_tls_is_not_cancelled(run: LoopRunner) -> None:
    ends: list[object] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            writer.write(await reader.readline())
            writer.close()
            await writer.wait_closed()
            for _ in range(20):
                await asyncio.sleep(0)
            ends.append("done")
        except BaseException as error:
            ends.append(error)
            raise

    async def main() -> None:
        server = await start_server(handle, "127.0.0.1", 0, ssl=server_context())
        async with server:
            client = await asyncio.to_thread(Client, server.sockets[0].getsockname())
            client.tls.sendall(b"prompt\n")
            assert await asyncio.to_thread(client.tls.recv, 100) == b"prompt\n"
            await asyncio.to_thread(client.tls.unwrap)
            client.tls.close()
            await until(lambda: ends)
            assert ends == ["done"]

    run(main)


def test_stream_that_starts_tls_inside_a_handler_is_still_watched(run: LoopRunner) -> None:
    reasons: list[Reason] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with watch(writer):
            await asyncio.sleep(0)
        # The client's hello must not come before the transport that can read it.
        writer.write(b"+")
        await writer.start_tls(server_context())
        try:
            async with watch(writer):
                assert default_watcher().stats().num_connections == 1
                writer.write(b".")
                await forever()
        except ClientDisconnected as left:
            reasons.append(left.reason)
            raise

    async def main() -> None:
        server = await start_server(handle, "127.0.0.1", 0)
        async with server:
            address = server.sockets[0].getsockname()
            client = await asyncio.to_thread(Client, address, greeting=b"+")
            assert await asyncio.to_thread(client.tls.recv, 1) == b"."
            client.leave("fin")
            await until(lambda: reasons)
            assert reasons == [Reason.FIN]
            await until(lambda: default_watcher().stats().num_connections == 0)

    run(main)


def test_stream_that_started_tls_can_be_read_inside_a_block(run: LoopRunner) -> None:
    lines: list[bytes] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"+")
        await writer.start_tls(server_context())
        for _ in range(2):
            async with watch(writer):
                writer.write(b".")
                lines.append(await reader.readline())
        writer.close()

    async def main() -> None:
        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        async with server:
            address = server.sockets[0].getsockname()
            client = await asyncio.to_thread(Client, address, greeting=b"+")
            for _ in range(2):
                assert await asyncio.to_thread(client.tls.recv, 1) == b"."
                client.tls.sendall(b"line\n")
            await until(lambda: len(lines) == 2)
            assert lines == [b"line\n"] * 2
            client.tls.close()
            await until(lambda: default_watcher().stats().num_connections == 0)

    run(main)
