"""Policies of ``watch`` and ``start_server``: probe, vanish_after, unblind and grace."""

import asyncio
import gc
import os
import socket
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from disconnect_watch import (
    ClientDisconnected,
    Reason,
    Watcher,
    grace,
    start_server,
    watch,
)
from disconnect_watch.aio._policy import HalfClose
from tests.support.loops import LoopRunner, cancelled
from tests.support.net import (
    Pair,
    connected,
    dial,
    listener,
    options_of,
    reset,
    streams,
    transport_of,
    until,
    vanish,
)


async def forever() -> None:
    await asyncio.get_running_loop().create_future()


def comment(transport: asyncio.Transport) -> None:
    transport.write(b":\n")


# --- probe ------------------------------------------------------------------------------


def test_a_probing_write_tells_a_close_from_a_half_close(run: LoopRunner, kind: str) -> None:
    async def main() -> None:
        with connected(kind) as pair:
            async with streams(pair) as (_, writer):
                with pytest.raises(ClientDisconnected) as caught:
                    async with watch(writer, half_close="probe", probe=comment):
                        pair.leave("fin")
                        await forever()
                assert caught.value.reason is Reason.RESET

    run(main)


def test_a_half_closed_client_is_probed_once_and_served(run: LoopRunner, pair: Pair) -> None:
    probed = []

    def probe(transport: asyncio.Transport) -> None:
        probed.append(transport)
        transport.write(b":\n")

    async def main() -> None:
        async with streams(pair) as (reader, writer):
            async with watch(writer, half_close="probe", probe=probe) as w:
                pair.leave("half_close")
                await until(lambda: probed)
                writer.write(b"answer")
                await writer.drain()
                assert await asyncio.to_thread(pair.client.recv, 8, socket.MSG_WAITALL) == (
                    b":\nanswer"
                )
                assert not w.token.cancelled
            assert probed == [transport_of(writer)]
            assert await reader.read() == b""

    run(main)


def test_a_client_that_half_closed_and_then_leaves_is_gone(run: LoopRunner, pair: Pair) -> None:
    async def main() -> None:
        async with streams(pair) as (_, writer):
            with pytest.raises(ClientDisconnected):
                async with watch(writer, half_close="probe") as w:
                    pair.leave("half_close")
                    await asyncio.sleep(0)
                    assert not w.token.cancelled
                    reset(pair.client, pair.server)
                    await forever()
            assert w.reason is Reason.RESET

    run(main)


def test_without_a_probing_write_keepalive_asks_and_is_put_back(run: LoopRunner, tcp: Pair) -> None:
    before = options_of(tcp.server)

    async def main() -> None:
        async with streams(tcp) as (_, writer):
            async with watch(writer, half_close="probe"):
                assert options_of(tcp.server) == before
                tcp.leave("half_close")
                await until(lambda: options_of(tcp.server) != before)
                assert tcp.server.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
                async with watch(writer, half_close="probe"):
                    pass
                assert tcp.server.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert options_of(tcp.server) == before

    run(main)


def test_over_unix_a_close_is_told_from_a_half_close_without_a_byte(run: LoopRunner) -> None:
    async def main() -> None:
        with connected("unix") as pair:
            async with streams(pair) as (_, writer):
                with pytest.raises(ClientDisconnected) as caught:
                    async with watch(writer, half_close="probe"):
                        pair.leave("fin")
                        await forever()
                assert caught.value.reason is Reason.RESET

    run(main)


def test_a_failing_probe_is_reported_and_ends_nothing(run: LoopRunner, tcp: Pair) -> None:
    def broken(transport: asyncio.Transport) -> None:
        raise RuntimeError("no comment")

    async def main() -> None:
        async with (
            streams(tcp) as (_, writer),
            watch(writer, half_close="probe", probe=broken),
        ):
            tcp.leave("half_close")
            await until(lambda: run.reports)

    run(main, reports=1)
    assert str(run.reports[0]["exception"]) == "no comment"


def test_who_has_closed_the_connection_himself_probes_nobody(run: LoopRunner, tcp: Pair) -> None:
    probed: list[object] = []

    async def main() -> None:
        with Watcher() as watcher:
            async with streams(tcp) as (_, writer):
                async with watch(writer, half_close="probe", probe=probed.append, watcher=watcher):
                    # More than goes out at once, so that the transport stays open a while.
                    writer.write(bytes(1 << 23))
                    writer.close()
                    tcp.leave("half_close")
                    await until(lambda: watcher.stats().num_signals[Reason.FIN])
                    await asyncio.sleep(0.01)
                tcp.client.close()

    run(main)
    assert not probed


# --- vanish_after -----------------------------------------------------------------------


@pytest.mark.slow
def test_a_client_that_vanished_ends_the_block(run: LoopRunner, tcp: Pair) -> None:
    async def main() -> None:
        with Watcher() as watcher:
            async with streams(tcp) as (_, writer):
                with pytest.raises(ClientDisconnected) as caught:
                    async with watch(writer, vanish_after=2, watcher=watcher):
                        vanish(tcp.client)
                        await forever()
                assert caught.value.reason is Reason.TIMED_OUT

    run(main)


def test_the_shortest_bound_of_all_holds_while_its_block_lasts(run: LoopRunner, tcp: Pair) -> None:
    def keepidle() -> int:
        return tcp.server.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)

    before = options_of(tcp.server)

    async def main() -> None:
        with Watcher(vanish_after=90) as watcher:
            async with streams(tcp) as (_, writer), watch(writer, watcher=watcher):
                assert keepidle() == 30
                async with watch(writer, vanish_after=60, watcher=watcher):
                    assert keepidle() == 20
                    async with watch(writer, vanish_after=300, watcher=watcher):
                        assert keepidle() == 20
                    assert keepidle() == 20
                assert keepidle() == 30
            # The transport is closed by now; a socket of our own shows what comes back.
        with Watcher() as watcher, connected() as other:
            async with watch(other.server, vanish_after=60, watcher=watcher):
                assert options_of(other.server) != before
            assert options_of(other.server) == before

    run(main)


def test_a_bound_ends_with_its_handler(run: LoopRunner) -> None:
    writers: list[asyncio.StreamWriter] = []
    may_end = asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        await may_end.wait()

    def is_asking() -> bool:
        sock: socket.socket = writers[0].get_extra_info("socket")
        return sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1

    async def main() -> None:
        with Watcher() as watcher, listener("tcp") as listening:
            server = await start_server(
                handle, sock=listening.dup(), vanish_after=60, watcher=watcher
            )
            async with server:
                with dial(listening):
                    await until(lambda: writers and is_asking())
                    may_end.set()
                    await until(lambda: not is_asking())
                    writers[0].close()
                await until(lambda: not watcher.stats().num_connections)

    run(main)


# --- unblind ----------------------------------------------------------------------------


#: More than a receive window takes by itself, less than one that is unblinded.
NUM_UNREAD = 1 << 19


def lowat(sock: socket.socket) -> int:
    return sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT)


@pytest.fixture
def narrow() -> Any:
    """A pair whose client cannot keep much in its own buffer."""
    with connected() as pair:
        pair.client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
        yield pair


def test_a_leave_behind_a_full_window_ends_the_block(run: LoopRunner, narrow: Pair) -> None:
    async def main() -> None:
        async with streams(narrow) as (reader, writer):
            sock = narrow.server
            with pytest.raises(ClientDisconnected) as caught:
                async with watch(writer, unblind=1 << 20):
                    assert lowat(sock) == 1 << 20
                    await asyncio.to_thread(narrow.client.sendall, bytes(NUM_UNREAD))
                    narrow.leave("half_close")
                    await forever()
            assert caught.value.reason is Reason.FIN
            assert lowat(sock) == 1
            assert len(await reader.read()) == NUM_UNREAD

    run(main)


def test_a_body_may_read_on_while_unblinded(run: LoopRunner, tcp: Pair) -> None:
    async def main() -> None:
        async with streams(tcp) as (reader, writer):
            async with watch(writer, unblind=1 << 20):
                assert lowat(tcp.server) == 1 << 20
                tcp.client.sendall(b"more\n")
                assert await asyncio.wait_for(reader.readline(), 40) == b"more\n"
                assert lowat(tcp.server) == 1
            tcp.client.sendall(b"next\n")
            assert await asyncio.wait_for(reader.readline(), 40) == b"next\n"
            assert vars(reader)["_transport"] is writer.transport

    run(main)


@pytest.mark.parametrize("end", ["return", "raise", "cancel", "close"])
def test_reading_is_as_before_however_the_block_ends(run: LoopRunner, tcp: Pair, end: str) -> None:
    # A second owner, whose view outlives the transport's.
    copy = tcp.server.dup()

    async def main() -> None:
        async with streams(tcp) as (_, writer):

            async def block() -> None:
                async with watch(writer, unblind=1 << 20):
                    assert lowat(copy) == 1 << 20
                    if end == "raise":
                        raise KeyError
                    if end == "close":
                        writer.close()
                    if end == "cancel":
                        await forever()

            task = asyncio.create_task(block())
            await asyncio.sleep(0)
            if end == "cancel":
                task.cancel()
                await cancelled(task_of(task))
            elif end == "raise":
                with pytest.raises(KeyError):
                    await task
            else:
                await task
            await until(lambda: lowat(copy) == 1)

    try:
        run(main)
    finally:
        copy.close()


async def task_of(task: asyncio.Task[None]) -> None:
    await task


def test_nested_blocks_unblind_until_the_last_is_over(run: LoopRunner, tcp: Pair) -> None:
    async def main() -> None:
        async with streams(tcp) as (_, writer):
            async with watch(writer, unblind=1 << 16):
                async with watch(writer, unblind=1 << 20):
                    assert lowat(tcp.server) == 1 << 20
                assert lowat(tcp.server) >= 1 << 16
            assert lowat(tcp.server) == 1

    run(main)


def test_a_server_sees_a_leave_behind_more_than_its_reader_takes(run: LoopRunner) -> None:
    ended = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await forever()
        finally:
            ended.append(asyncio.current_task())
            writer.close()

    async def main() -> None:
        with listener("tcp") as listening:
            server = await start_server(handle, sock=listening.dup(), limit=1024, unblind=1 << 20)
            async with server:
                with dial(listening) as client:
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
                    await asyncio.to_thread(client.sendall, bytes(NUM_UNREAD))
                    client.shutdown(socket.SHUT_WR)
                    await until(lambda: ended)

    run(main)


def test_a_server_goes_on_reading_after_it_was_unblinded(run: LoopRunner) -> None:
    read = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sock = writer.get_extra_info("socket")
        await until(lambda: lowat(sock) > 1)
        async with watch(writer):
            pass
        read.append(await reader.readexactly(NUM_UNREAD))
        writer.write(b".")
        writer.close()

    async def main() -> None:
        with listener("tcp") as listening:
            server = await start_server(handle, sock=listening.dup(), limit=1024, unblind=1 << 20)
            async with server:
                with dial(listening) as client:
                    await asyncio.to_thread(client.sendall, bytes(NUM_UNREAD))
                    assert await asyncio.to_thread(client.recv, 1) == b"."
        assert len(read[0]) == NUM_UNREAD

    run(main)


# --- grace ------------------------------------------------------------------------------


def test_grace_lets_the_block_end_by_itself(run: LoopRunner, pair: Pair, leave: str) -> None:
    async def main() -> None:
        async with streams(pair) as (_, writer):
            async with watch(writer, on_disconnect=grace(60)) as w:
                pair.leave(leave)
                await until(lambda: w.reason)
                await asyncio.sleep(0)
                assert not w.token.cancelled
            assert not w.token.cancelled

    run(main)


def test_after_the_grace_the_token_fires_and_the_block_is_cancelled(
    run: LoopRunner, pair: Pair, leave: str
) -> None:
    async def main() -> None:
        async with streams(pair) as (_, writer):
            block = watch(writer, on_disconnect=grace(0.05))
            with pytest.raises(ClientDisconnected) as caught:
                async with block as w:
                    pair.leave(leave)
                    await until(lambda: w.reason)
                    assert not w.token.cancelled
                    await forever()
            assert caught.value.reason is block.token.reason
            # The error tells of the leave, the token of the end of the grace.
            fired_at = block.token.cancelled_at
            assert fired_at is not None
            assert fired_at - caught.value.detected_at >= 0.04

    run(main)


@pytest.mark.parametrize(
    ("half_close", "way", "has_left"),
    [
        ("disconnect", "fin", True),
        ("ignore", "half_close", False),
        ("ignore", "rst", True),
    ],
)
def test_a_block_in_its_grace_can_ask_whether_its_client_left_before(
    run: LoopRunner, tcp: Pair, half_close: HalfClose, way: str, has_left: bool
) -> None:
    async def main() -> None:
        tcp.leave(way)
        async with watch(tcp.server, half_close=half_close, on_disconnect=grace(60)) as w:
            assert w.has_left is has_left
            assert not w.token.cancelled
        async with watch(tcp.server, half_close=half_close) as w:
            assert w.has_left is has_left
            w.disarm()

    run(main)


def test_a_transport_that_is_closed_before_gets_its_grace_too(run: LoopRunner, tcp: Pair) -> None:
    async def main() -> None:
        async with streams(tcp) as (_, writer):
            writer.close()
            async with watch(writer, on_disconnect=grace(60)) as w:
                assert not w.token.cancelled
            with pytest.raises(ClientDisconnected):
                async with watch(writer, on_disconnect=grace(0.01)):
                    await forever()

    run(main)


@pytest.mark.parametrize(("seconds", "end"), [(0.02, "cancelled"), (60, "by itself")])
def test_a_handler_has_its_grace(run: LoopRunner, seconds: float, end: str) -> None:
    ends: list[str] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await until(writer.transport.is_closing)
            if end == "cancelled":
                await forever()
            await asyncio.sleep(0)
            ends.append("by itself")
        except asyncio.CancelledError:
            ends.append("cancelled")
            raise
        finally:
            writer.close()

    async def main() -> None:
        with listener("tcp") as listening:
            server = await start_server(handle, sock=listening.dup(), on_disconnect=grace(seconds))
            async with server:
                with dial(listening) as client:
                    reset(client)
                await until(lambda: ends)
                await asyncio.sleep(0)
            assert ends == [end]

    run(main)


def test_a_handler_that_ended_in_its_grace_is_not_kept_till_its_end(run: LoopRunner) -> None:
    protocols: list[weakref.ref[asyncio.BaseProtocol]] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        protocols.append(weakref.ref(transport_of(writer).get_protocol()))
        await until(writer.transport.is_closing)
        await asyncio.sleep(0.01)

    async def main() -> None:
        with listener("tcp") as listening:
            server = await start_server(handle, sock=listening.dup(), on_disconnect=grace(60))
            async with server:
                with dial(listening) as client:
                    reset(client)
                await until(lambda: protocols and gc.collect() >= 0 and protocols[0]() is None)

    run(main)


# --- pipes ------------------------------------------------------------------------------


@pytest.mark.parametrize("pause_reading", [True, False], ids=["paused", "reading"])
@pytest.mark.parametrize("num_waiting", [0, 1 << 20], ids=["idle", "full"])
def test_a_block_that_writes_to_a_pipe_ends_when_its_reader_leaves(
    run: LoopRunner, pause_reading: bool, num_waiting: int
) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        read_end, write_end = os.pipe()
        transport, protocol = await loop.connect_write_pipe(
            asyncio.streams.FlowControlMixin, os.fdopen(write_end, "wb", buffering=0)
        )
        writer = asyncio.StreamWriter(transport, protocol, None, loop)
        with pytest.raises(ClientDisconnected) as caught:
            async with watch(writer, pause_reading=pause_reading):
                writer.write(bytes(num_waiting))
                await asyncio.sleep(0)
                os.close(read_end)
                await forever()
        assert caught.value.reason is Reason.RESET
        if not transport.is_closing():
            transport.abort()
        await asyncio.sleep(0.01)

    run(main)


def test_who_closes_a_pipe_himself_is_not_cancelled(run: LoopRunner) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        read_end, write_end = os.pipe()
        transport, _ = await loop.connect_write_pipe(
            asyncio.streams.FlowControlMixin, os.fdopen(write_end, "wb", buffering=0)
        )
        async with watch(transport) as w:
            transport.close()
            await until(lambda: w.token.cancelled)
        assert w.reason is Reason.OWNER_CLOSED
        os.close(read_end)

    run(main)


# --- what is refused --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"half_close": "maybe"}, "half_close 'maybe'"),
        ({"probe": comment}, "'probe' too"),
        ({"vanish_after": 1}, "vanish_after 1"),
        ({"unblind": 0}, "unblind 0"),
        ({"on_disconnect": "wait"}, "on_disconnect 'wait'"),
    ],
)
@pytest.mark.parametrize("enter", [watch, start_server])
def test_unknown_policies_are_refused(
    run: LoopRunner, enter: Callable[..., Any], options: dict[str, Any], named: str
) -> None:
    async def main() -> None:
        with pytest.raises(ValueError, match=named):
            await enter(0, **options)

    run(main)


def test_a_grace_is_more_than_nothing() -> None:
    for seconds in (0, -1, float("nan")):
        with pytest.raises(ValueError, match="grace"):
            grace(seconds)
