"""``watch``: the block is cancelled when its client leaves, and in no other case."""

import asyncio
import contextlib
import gc
import os
import socket
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any, cast

import pytest

import disconnect_watch as dw
from disconnect_watch import (
    CancelToken,
    ClientDisconnected,
    Reason,
    UnsupportedSocketError,
    Watcher,
    watch,
)
from disconnect_watch.aio import Watch, loop_mailbox
from disconnect_watch.watcher import default_watcher
from tests.support.loops import LoopRunner
from tests.support.net import (
    LEAVES,
    Pair,
    connected,
    open_fds,
    streams,
    transport_of,
    unread_bytes,
    until,
    wait_until,
)

TARGETS: dict[str, Callable[[asyncio.StreamWriter], Any]] = {
    "writer": lambda writer: writer,
    "transport": lambda writer: writer.transport,
    "socket": lambda writer: writer.get_extra_info("socket"),
    "fd": lambda writer: writer.get_extra_info("socket").fileno(),
}


async def forever() -> None:
    await asyncio.get_running_loop().create_future()


@pytest.mark.parametrize("target", TARGETS)
def test_leave_fires_the_token_and_ends_the_block(
    run: LoopRunner, pair: Pair, leave: str, target: str
) -> None:
    how = LEAVES[leave]

    async def main() -> None:
        async with streams(pair) as (_, writer):
            transport_of(writer).pause_reading()  # a plain socket is watched, so nobody may read
            if how.is_before:
                pair.leave(leave)
            before = time.monotonic()
            block = watch(TARGETS[target](writer))
            with pytest.raises(ClientDisconnected) as caught:
                async with block as w:
                    assert w is block
                    assert w.token.cancelled is how.is_before
                    if not how.is_before:
                        pair.leave(leave)
                    await forever()
            assert caught.value.reason is block.reason is block.token.reason is how.reason
            assert before <= caught.value.detected_at <= time.monotonic()
            assert isinstance(caught.value.__cause__, asyncio.CancelledError)
            assert current().cancelling() == 0

    run(main)


def current() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task


@pytest.mark.parametrize("pause_reading", [True, False], ids=["paused", "reading"])
def test_leave_is_seen_while_the_transport_reads_or_pauses(
    run: LoopRunner, pair: Pair, leave: str, pause_reading: bool
) -> None:
    how = LEAVES[leave]

    async def main() -> None:
        async with streams(pair) as (_, writer):
            if how.is_before:
                pair.leave(leave)
            with pytest.raises(ClientDisconnected) as caught:
                async with watch(writer, pause_reading=pause_reading):
                    if not how.is_before:
                        pair.leave(leave)
                    await forever()
            # Where the transport took the reset's error first, the kernel shows an end.
            allowed = {how.reason} if pause_reading else {how.reason, Reason.FIN}
            assert caught.value.reason in allowed

    run(main)


@pytest.mark.parametrize("way", ["fin", "rst", "half_close"])
def test_owner_that_reads_the_end_first_is_the_second_source(
    run: LoopRunner, pair: Pair, way: str
) -> None:
    # Symptom: with the kernel's event alone, 7 to 22 % of the leaves were lost, because
    # the transport took the end and closed the fd. Here the kernel's event never comes.
    async def main() -> None:
        with Watcher(driver="loop") as deaf:
            async with streams(pair) as (_, writer):
                block = watch(writer, pause_reading=False, watcher=deaf)
                with pytest.raises(ClientDisconnected):
                    async with block:
                        asyncio.get_running_loop().remove_reader(deaf.fileno())
                        pair.leave(way)
                        await forever()
                assert block.reason is LEAVES[way].reason

    run(main)


def test_two_sources_fire_once_and_cancel_once(run: LoopRunner, pair: Pair) -> None:
    async def main() -> None:
        async with streams(pair) as (_, writer):
            num_cancels = 0
            with pytest.raises(ClientDisconnected):
                async with watch(writer, pause_reading=False):
                    pair.leave("rst")
                    while True:
                        try:
                            await until(writer.is_closing)
                            await forever()
                        except asyncio.CancelledError:
                            num_cancels += 1
                            if writer.is_closing():
                                raise
            assert num_cancels <= 2
            assert current().cancelling() == 0

    run(main)


def test_two_sources_told_before_the_block_runs_cancel_once(run: LoopRunner, tcp: Pair) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with streams(tcp) as (_, writer):
            with pytest.raises(ClientDisconnected):
                async with watch(writer) as w:
                    for at_ns in (1, 2):
                        loop.call_soon(w.on_leave, Reason.RESET, at_ns)
                    try:
                        await forever()
                    finally:
                        assert current().cancelling() == 1
            assert current().cancelling() == 0

    run(main)


def test_block_without_a_leave_is_left_alone(run: LoopRunner, pair: Pair) -> None:
    async def main() -> None:
        async with streams(pair) as (reader, writer):
            async with watch(writer) as w:
                pair.client.sendall(b"next request")
                await asyncio.sleep(0)
            assert not w.token.cancelled
            assert w.reason is None
            assert await reader.readexactly(12) == b"next request"
            pair.client.close()
            assert await reader.read() == b""
            await asyncio.sleep(0)
            assert not w.token.cancelled

    run(main)


def test_pipelined_bytes_stay_in_the_kernel_and_reach_the_owner_afterwards(
    run: LoopRunner, pair: Pair
) -> None:
    async def main() -> None:
        async with streams(pair) as (reader, writer):
            async with watch(writer):
                assert not transport_of(writer).is_reading()
                pair.client.sendall(b"pipelined")
                await until(lambda: unread_bytes(pair.server) == 9)
            assert transport_of(writer).is_reading()
            assert await reader.readexactly(9) == b"pipelined"

    run(main)


def test_bytes_end_of_stream_and_errno_of_a_gone_client_reach_the_owner(
    run: LoopRunner, pair: Pair
) -> None:
    async def main() -> None:
        async with streams(pair) as (reader, writer):
            with pytest.raises(ClientDisconnected):
                async with watch(writer):
                    pair.leave("fin_behind_data")
                    await forever()
            assert (await reader.read()).startswith(b"GET /next")
            assert reader.at_eof()

    run(main)


def test_errno_of_a_reset_reaches_the_owner(run: LoopRunner, pair: Pair) -> None:
    async def main() -> None:
        async with streams(pair) as (reader, writer):
            with pytest.raises(ClientDisconnected):
                async with watch(writer):
                    pair.leave("rst")
                    await forever()
            with pytest.raises(ConnectionResetError):
                await reader.read()

    run(main)


def test_half_close_is_served_when_it_is_ignored_and_a_reset_is_not(
    run: LoopRunner, pair: Pair
) -> None:
    async def main() -> None:
        async with streams(pair) as (_, writer):
            async with watch(writer, half_close="ignore") as w:
                pair.leave("half_close")
                await until(lambda: dw.is_gone(pair.server))
                await asyncio.sleep(0)
                writer.write(b"answer")
                assert pair.client.recv(6) == b"answer"
            assert not w.token.cancelled
            with pytest.raises(ClientDisconnected) as caught:
                async with watch(writer, half_close="ignore"):
                    pair.leave("rst")
                    await forever()
            assert caught.value.reason is Reason.RESET

    run(main)


def test_end_of_stream_is_told_to_the_protocol_once(run: LoopRunner, pair: Pair) -> None:
    class Counting(asyncio.Protocol):
        num_ends = 0

        def eof_received(self) -> bool:
            self.num_ends += 1
            return True

    async def main() -> None:
        loop = asyncio.get_running_loop()
        transport, protocol = await loop.create_connection(Counting, sock=pair.server)
        pair.leave("half_close")
        await until(lambda: protocol.num_ends)
        async with watch(transport, half_close="ignore"):
            await asyncio.sleep(0)
        for _ in range(10):
            await asyncio.sleep(0)
        assert protocol.num_ends == 1
        transport.close()

    if pair.kind != "unix":
        run(main)


def test_bytes_before_an_ignored_end_of_stream_are_left_unread_by_every_block(
    run: LoopRunner, tcp: Pair
) -> None:
    # The second block starts with the end known, and with bytes before it unread.
    class Recording(asyncio.Protocol):
        def __init__(self) -> None:
            self.heard: list[bytes | None] = []

        def data_received(self, data: bytes) -> None:
            self.heard.append(data)

        def eof_received(self) -> bool:
            self.heard.append(None)
            return True

    async def main() -> None:
        loop = asyncio.get_running_loop()
        transport, protocol = await loop.create_connection(Recording, sock=tcp.server)
        async with watch(transport, half_close="ignore"):
            tcp.client.sendall(b"next")
            tcp.leave("half_close")
            await until(lambda: dw.is_gone(tcp.server))
        for _ in range(2):
            async with watch(transport, half_close="ignore"):
                for _ in range(10):
                    await asyncio.sleep(0)
                assert protocol.heard == []
        await until(lambda: None in protocol.heard)
        assert protocol.heard == [b"next", None]
        transport.close()

    run(main)


# --- the rules of asyncio.timeout ------------------------------------------------------


def test_cancel_from_outside_is_neither_swallowed_nor_disguised(run: LoopRunner, tcp: Pair) -> None:
    async def main() -> None:
        async with streams(tcp) as (_, writer):
            entered = asyncio.Event()

            async def body() -> None:
                async with watch(writer):
                    entered.set()
                    await forever()

            task = asyncio.create_task(body())
            await entered.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert task.cancelled()
            assert task.cancelling() == 1

    run(main)


@pytest.mark.parametrize("first", ["leave", "outside"])
def test_cancel_from_outside_at_the_time_of_the_leave_wins(
    run: LoopRunner, tcp: Pair, first: str
) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with streams(tcp) as (_, writer):
            task = current()
            mailbox = loop_mailbox()
            block = watch(writer)

            def is_told() -> bool:
                mailbox.deliver()
                return block.was_cancelled

            def cancel() -> None:
                # The loop stands still here, so both come before the task runs again.
                if first == "outside":
                    task.cancel()
                wait_until(is_told)
                if first == "leave":
                    task.cancel()

            with pytest.raises(asyncio.CancelledError):
                async with block:
                    tcp.leave("fin")
                    loop.call_soon(cancel)
                    await forever()
            assert block.was_cancelled
            assert task.uncancel() == 0

    run(main)


def test_outermost_of_nested_blocks_converts_the_cancel(run: LoopRunner, tcp: Pair) -> None:
    async def main() -> None:
        async with streams(tcp) as (_, writer):
            seen = []
            with pytest.raises(ClientDisconnected):
                async with watch(writer) as outer:
                    try:
                        async with watch(writer) as inner:
                            tcp.leave("fin")
                            await forever()
                    except BaseException as error:
                        seen.append(type(error))
                        raise
            assert seen == [asyncio.CancelledError]
            assert inner.reason is outer.reason is Reason.FIN
            assert current().cancelling() == 0

    run(main)


def test_leave_inside_a_timeout_is_no_timeout_and_the_other_way_round(
    run: LoopRunner, tcp: Pair
) -> None:
    async def main() -> None:
        async with streams(tcp) as (_, writer):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.001), watch(writer):
                    await forever()
            with pytest.raises(TimeoutError):
                async with watch(writer), asyncio.timeout(0.001):
                    await forever()
            with pytest.raises(ClientDisconnected):
                async with asyncio.timeout(40), watch(writer):
                    tcp.leave("fin")
                    await forever()
            assert current().cancelling() == 0

    run(main)


def test_block_that_swallows_the_cancel_ends_normally(run: LoopRunner, tcp: Pair) -> None:
    async def main() -> None:
        async with streams(tcp) as (_, writer):
            async with watch(writer) as w:
                tcp.leave("fin")
                with contextlib.suppress(asyncio.CancelledError):
                    await forever()
            assert w.reason is Reason.FIN
            assert current().cancelling() == 0
            await asyncio.sleep(0)

    run(main)


def test_exception_raised_meanwhile_propagates(run: LoopRunner, tcp: Pair) -> None:
    async def main() -> None:
        async with streams(tcp) as (_, writer):
            with pytest.raises(KeyError):
                async with watch(writer):
                    tcp.leave("fin")
                    try:
                        await forever()
                    finally:
                        raise KeyError
            assert current().cancelling() == 0
            await asyncio.sleep(0)

    run(main)


def test_exception_without_a_leave_propagates(run: LoopRunner, tcp: Pair) -> None:
    async def main() -> None:
        async with streams(tcp) as (_, writer):
            with pytest.raises(KeyError):
                async with watch(writer):
                    raise KeyError
            assert transport_of(writer).is_reading()

    run(main)


def test_no_cancel_escapes_a_block_that_has_no_await_left(run: LoopRunner, tcp: Pair) -> None:
    async def main() -> None:
        async with streams(tcp) as (_, writer):
            async with watch(writer) as w:
                tcp.leave("fin")
                assert w.token.wait(40)
            await asyncio.sleep(0)
            async with watch(writer) as w:
                assert w.token.cancelled
            await asyncio.sleep(0)
            assert current().cancelling() == 0
            assert w.reason is Reason.FIN

    run(main)


def test_block_entered_after_the_leave_is_cancelled_at_its_first_await(
    run: LoopRunner, tcp: Pair, leave: str
) -> None:
    async def main() -> None:
        async with streams(tcp) as (_, writer):
            transport_of(writer).pause_reading()
            tcp.leave(leave)
            wait_until(lambda: dw.is_gone(tcp.server))
            steps = []
            with pytest.raises(ClientDisconnected):
                async with watch(writer) as w:
                    steps.append(w.token.cancelled)
                    await asyncio.sleep(0)
                    steps.append(False)
            assert steps == [True]

    run(main)


def test_leave_told_while_the_task_itself_runs_does_not_escape_the_block(
    run: LoopRunner, tcp: Pair
) -> None:
    async def main() -> None:
        async with streams(tcp) as (_, writer):
            async with watch(writer) as w:
                writer.transport.get_protocol().connection_lost(ConnectionResetError())
                assert w.token.reason is Reason.RESET
            await asyncio.sleep(0)
            assert current().cancelling() == 0

    run(main)


def test_block_is_cancelled_in_the_task_that_entered_it(run: LoopRunner, tcp: Pair) -> None:
    async def main() -> None:
        async with streams(tcp) as (_, writer):
            ended = []

            async def body(name: str) -> None:
                try:
                    async with watch(writer):
                        await forever()
                except ClientDisconnected:
                    ended.append(name)

            tasks = [asyncio.create_task(body(name)) for name in "abc"]
            await asyncio.sleep(0)
            tcp.leave("fin")
            await asyncio.gather(*tasks)
            assert sorted(ended) == ["a", "b", "c"]

    run(main)


def test_watch_is_for_one_block_and_inside_a_task(run: LoopRunner, tcp: Pair) -> None:
    async def main() -> None:
        async with streams(tcp) as (_, writer):
            block = watch(writer)
            async with block:
                with pytest.raises(RuntimeError, match="twice"):
                    await block.__aenter__()
            with pytest.raises(RuntimeError, match="twice"):
                await block.__aenter__()

            outside: list[BaseException] = []

            def enter() -> None:
                try:
                    watch(writer).__aenter__().send(None)
                except BaseException as error:
                    outside.append(error)

            asyncio.get_running_loop().call_soon(enter)
            await until(lambda: outside)
            assert "inside a task" in str(outside[0])

    run(main)


# --- whose pause it is ------------------------------------------------------------------


def test_pause_of_the_owner_is_not_resumed(run: LoopRunner, tcp: Pair) -> None:
    async def main() -> None:
        async with streams(tcp) as (_, writer):
            transport_of(writer).pause_reading()
            async with watch(writer):
                await asyncio.sleep(0)
            assert not transport_of(writer).is_reading()

    run(main)


def test_full_stream_reader_is_not_resumed(run: LoopRunner, tcp: Pair) -> None:
    async def main() -> None:
        async with streams(tcp) as (reader, writer):
            tcp.client.setblocking(False)
            chunk = b"x" * 65536
            sent = 0

            def is_full() -> bool:
                nonlocal sent
                with contextlib.suppress(BlockingIOError):
                    sent += tcp.client.send(chunk)
                return not transport_of(writer).is_reading()

            async with watch(writer):
                pass
            await until(is_full)  # its own flow control works after a pause of ours
            async with watch(writer):
                await asyncio.sleep(0)
            assert not transport_of(writer).is_reading()
            assert len(await reader.readexactly(sent)) == sent
            assert transport_of(writer).is_reading()

    run(main)


def test_nested_blocks_pause_once_and_the_last_resumes(run: LoopRunner, tcp: Pair) -> None:
    async def main() -> None:
        async with streams(tcp) as (_, writer):
            async with watch(writer):
                async with watch(writer):
                    assert not transport_of(writer).is_reading()
                assert not transport_of(writer).is_reading()
            assert transport_of(writer).is_reading()

    run(main)


def test_pause_reading_off_lets_the_transport_read(run: LoopRunner, tcp: Pair) -> None:
    async def main() -> None:
        async with streams(tcp) as (reader, writer), watch(writer, pause_reading=False):
            assert transport_of(writer).is_reading()
            tcp.client.sendall(b"more")
            assert await reader.readexactly(4) == b"more"

    run(main)


def test_block_may_read_its_stream_although_reading_is_paused(run: LoopRunner, tcp: Pair) -> None:
    async def main() -> None:
        async with streams(tcp) as (reader, writer):
            async with watch(writer):
                tcp.client.sendall(b"the body")
                assert await reader.readexactly(8) == b"the body"
            assert transport_of(writer).is_reading()

    run(main)


def test_protocol_of_ones_own_is_resumed(run: LoopRunner, tcp: Pair) -> None:
    class Own(asyncio.Protocol):
        data = b""

        def data_received(self, data: bytes) -> None:
            self.data += data

    async def main() -> None:
        loop = asyncio.get_running_loop()
        transport, protocol = await loop.create_connection(Own, sock=tcp.server)
        async with watch(transport):
            tcp.client.sendall(b"later")
            await until(lambda: unread_bytes(tcp.server) == 5)
            assert protocol.data == b""
        await until(lambda: protocol.data == b"later")
        transport.close()

    run(main)


def test_pause_of_the_owner_of_a_protocol_is_not_resumed(run: LoopRunner, tcp: Pair) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_connection(asyncio.Protocol, sock=tcp.server)
        transport.pause_reading()
        async with watch(transport):
            await asyncio.sleep(0)
        assert not transport.is_reading()
        transport.close()

    run(main)


# --- whose close it is ------------------------------------------------------------------


def test_close_of_ones_own_fires_the_token_and_cancels_nobody(run: LoopRunner, tcp: Pair) -> None:
    async def main() -> None:
        async with streams(tcp) as (_, writer):
            async with watch(writer) as w:
                writer.close()
                await writer.wait_closed()
                await until(lambda: w.token.cancelled)
            assert w.reason is Reason.OWNER_CLOSED

    run(main)


def test_client_that_answers_our_close_with_his_own_cancels_nobody(
    run: LoopRunner, tcp: Pair
) -> None:
    async def main() -> None:
        async with streams(tcp) as (_, writer):
            # More than the socket takes: closing waits until the client has read it.
            answer = b"x" * 4_000_000
            async with watch(writer) as w:
                writer.write(answer)
                writer.close()
                tcp.leave("half_close")
                await until(lambda: w.token.cancelled)
                await asyncio.sleep(0)
                reading = asyncio.get_running_loop().run_in_executor(None, drain, tcp.client)
                assert await reading == len(answer)
                await writer.wait_closed()

    run(main)


def drain(sock: socket.socket) -> int:
    total = 0
    while data := sock.recv(1 << 20):
        total += len(data)
    return total


def test_transport_that_is_closed_has_no_client(run: LoopRunner, tcp: Pair) -> None:
    async def main() -> None:
        async with streams(tcp) as (_, writer):
            writer.close()
            for _ in range(2):
                with pytest.raises(ClientDisconnected) as caught:
                    async with watch(writer) as w:
                        assert w.token.cancelled
                        await forever()
                assert caught.value.reason is Reason.OWNER_CLOSED
                await writer.wait_closed()

    run(main)


def test_transport_that_a_reset_closed_says_reset(run: LoopRunner, tcp: Pair) -> None:
    async def main() -> None:
        async with streams(tcp) as (reader, writer):
            tcp.leave("rst")
            with pytest.raises(ConnectionResetError):
                await reader.read()
            with pytest.raises(ClientDisconnected) as caught:
                async with watch(writer):
                    await forever()
            assert caught.value.reason is Reason.RESET

    run(main)


# --- what can be watched ----------------------------------------------------------------


def test_wrong_targets_are_named(run: LoopRunner) -> None:
    async def enter(target: Any, **options: Any) -> None:
        async with watch(target, **options):
            pass

    async def main() -> None:
        with pytest.raises(TypeError, match="float"):
            await enter(5.0)
        with pytest.raises(UnsupportedSocketError, match="-1"):
            await enter(-1)
        closed = socket.socket()
        closed.close()
        with pytest.raises(UnsupportedSocketError, match="closed"):
            await enter(closed)
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_datagram_endpoint(
            asyncio.DatagramProtocol, local_addr=("127.0.0.1", 0)
        )
        with pytest.raises(UnsupportedSocketError):
            await enter(transport)
        transport.close()
        reader, writer = os.pipe()
        with pytest.raises(UnsupportedSocketError):
            await enter(reader)
        os.close(reader)
        os.close(writer)
        with pytest.raises(ValueError, match="maybe"):
            await enter(transport, half_close="maybe")

    run(main)


def test_transport_that_cannot_be_paused_leaves_nothing_armed(tcp: Pair) -> None:
    async def main() -> None:
        def refuse() -> None:
            raise RuntimeError("not now")

        async with streams(tcp) as (_, writer):
            vars(writer.transport)["pause_reading"] = refuse
            with pytest.raises(RuntimeError, match="not now"):
                async with watch(writer):
                    pass
            assert default_watcher().stats().num_armed == 0

    LoopRunner("asyncio")(main)  # uvloop's transports take no attribute


def test_disarmed_block_runs_on_when_its_client_leaves(run: LoopRunner, tcp: Pair) -> None:
    async def main() -> None:
        async with streams(tcp) as (_, writer):
            async with watch(writer) as w:
                w.disarm()
                tcp.leave("rst")
                await until(writer.transport.is_closing)
                await asyncio.sleep(0)
                w.disarm()
            assert not w.token.cancelled
            assert w.reason is None

    run(main)


def test_disarm_takes_back_a_cancel_that_is_due(run: LoopRunner, tcp: Pair) -> None:
    async def main() -> None:
        tcp.leave("rst")
        async with streams(tcp) as (_, writer), watch(writer) as w:
            assert w.token.cancelled  # on entry; the cancel follows at the loop's next turn
            w.disarm()
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    run(main)


def test_disarm_does_not_take_back_a_cancel_that_was_made(run: LoopRunner, tcp: Pair) -> None:
    async def main() -> None:
        async with streams(tcp) as (_, writer):
            with pytest.raises(ClientDisconnected):
                async with watch(writer) as w:
                    try:
                        tcp.leave("rst")
                        await forever()
                    finally:
                        w.disarm()

    run(main)


def test_plain_socket_watched_twice_is_attached_once(run: LoopRunner, pair: Pair) -> None:
    async def main() -> None:
        with pytest.raises(ClientDisconnected):
            async with watch(pair.server):
                async with watch(pair.server.fileno()):
                    assert default_watcher().stats().num_connections == 1
                assert default_watcher().stats().num_connections == 1
                pair.leave("fin")
                await forever()
        assert default_watcher().stats().num_connections == 0

    run(main)


def test_transport_is_attached_once_and_detached_when_it_ends(run: LoopRunner, pair: Pair) -> None:
    async def main() -> None:
        async with streams(pair) as (_, writer):
            for _ in range(3):
                async with watch(writer):
                    assert default_watcher().stats().num_armed == 1
                stats = default_watcher().stats()
                assert (stats.num_connections, stats.num_armed) == (1, 0)
        assert default_watcher().stats().num_connections == 0

    run(main)


def test_fd_number_used_again_is_another_connection(run: LoopRunner) -> None:
    async def main() -> None:
        fds = set()
        for _ in range(3):
            with connected() as pair:
                fds.add(pair.server.fileno())
                async with streams(pair) as (_, writer):
                    async with watch(writer) as first:
                        await asyncio.sleep(0)
                    assert not first.token.cancelled
                    with pytest.raises(ClientDisconnected):
                        async with watch(writer):
                            pair.leave("fin")
                            await forever()
        assert len(fds) == 1

    run(main)


class Slotted(asyncio.Protocol):
    """Takes no attribute, as aiohttp's protocol takes none."""

    __slots__ = ("calls", "data")
    calls: list[str]
    data: bytearray

    def __init__(self) -> None:
        object.__setattr__(self, "data", bytearray())
        object.__setattr__(self, "calls", [])

    def data_received(self, data: bytes) -> None:
        self.data += data

    def eof_received(self) -> None:
        self.calls.append("eof")

    def connection_lost(self, error: Exception | None) -> None:
        self.calls.append("lost")


class Sealed(Slotted):
    """Takes no other class either."""

    __slots__ = ()

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(name)

    def data_received(self, data: bytes) -> None:
        self.data.extend(data)


@pytest.mark.parametrize(("way", "calls"), [("fin", ["eof", "lost"]), ("rst", ["lost"])])
def test_protocol_without_attributes_is_followed_while_it_reads(
    run: LoopRunner, way: str, calls: list[str]
) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        with connected() as pair, Watcher(driver="loop") as deaf:
            transport, protocol = await loop.create_connection(Slotted, sock=pair.server)
            async with watch(transport, watcher=deaf, pause_reading=False):
                pair.client.sendall(b"now")
                await until(lambda: protocol.data == b"now")
            gc.collect()  # nothing but its mailbox holds it now
            assert deaf.stats().num_connections == 1
            loop.remove_reader(deaf.fileno())  # what the protocol hears is all there is
            with pytest.raises(ClientDisconnected):
                async with watch(transport, watcher=deaf, pause_reading=False):
                    pair.leave(way)
                    await forever()
            await until(lambda: protocol.calls == calls)
            assert type(protocol) is Slotted
            assert not loop_mailbox(deaf).held
            assert deaf.stats().num_connections == 0

    run(main)


def test_two_protocols_without_attributes_are_told_apart(run: LoopRunner) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        with connected() as first, connected() as second:
            transports = [
                (await loop.create_connection(Slotted, sock=pair.server))[0]
                for pair in (first, second)
            ]
            async with watch(transports[0], pause_reading=False) as stays:
                with pytest.raises(ClientDisconnected):
                    async with watch(transports[1], pause_reading=False):
                        second.leave("rst")
                        await forever()
                assert not stays.token.cancelled
            transports[0].close()

    run(main)


def test_protocol_that_takes_nothing_is_attached_for_each_block(run: LoopRunner) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        with connected() as pair:
            transport, protocol = await loop.create_connection(Sealed, sock=pair.server)
            mailbox = loop_mailbox()
            async with watch(transport):
                (connection,) = mailbox.connections.values()
                assert default_watcher().stats().num_connections == 1
                async with watch(transport):
                    pair.client.sendall(b"later")
            assert not connection.conn.is_attached
            assert default_watcher().stats().num_connections == 0
            await until(lambda: protocol.data == b"later")
            with pytest.raises(UnsupportedSocketError, match="Sealed"):
                async with watch(transport, pause_reading=False):
                    pass
            assert default_watcher().stats().num_connections == 0
            with pytest.raises(ClientDisconnected):
                async with watch(transport):
                    pair.leave("rst")
                    await forever()
            transport.close()

    run(main)


def test_fd_number_that_another_transport_got_amid_a_block_is_another_connection(
    run: LoopRunner,
) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        with connected() as first:
            number = first.server.fileno()
            transport, _ = await loop.create_connection(Sealed, sock=first.server)
            async with watch(transport):
                transport.abort()
                await until(lambda: number not in open_fds())
                server, client = socket.socketpair()
                assert server.fileno() == number
                successor, _ = await loop.create_unix_connection(Sealed, sock=server)
                with pytest.raises(ClientDisconnected):
                    async with watch(successor):
                        client.close()
                        await forever()
                successor.close()

    run(main)


def test_connection_is_followed_to_another_protocol(run: LoopRunner, tcp: Pair) -> None:
    # As an upgrade to WebSocket does; the second source must not stay with the old one.
    async def main() -> None:
        with Watcher(driver="loop") as deaf:
            async with streams(tcp) as (_, writer):
                async with watch(writer, watcher=deaf):
                    pass
                upgraded = asyncio.StreamReaderProtocol(asyncio.StreamReader())
                writer.transport.set_protocol(upgraded)
                with pytest.raises(ClientDisconnected):
                    async with watch(writer.transport, watcher=deaf, pause_reading=False):
                        asyncio.get_running_loop().remove_reader(deaf.fileno())
                        tcp.leave("rst")
                        await forever()
                writer.transport.set_protocol(writer._protocol)  # type: ignore[attr-defined]
                writer._protocol.connection_lost(None)  # type: ignore[attr-defined]

    run(main)


def test_protocols_own_callbacks_still_run_and_are_its_own_again_afterwards(
    run: LoopRunner, tcp: Pair
) -> None:
    class Noting(asyncio.Protocol):
        def __init__(self) -> None:
            self.calls: list[str] = []

        def eof_received(self) -> bool:
            self.calls.append("eof")
            return False

        def connection_lost(self, exc: Exception | None) -> None:
            self.calls.append("lost")

    async def main() -> None:
        loop = asyncio.get_running_loop()
        transport, protocol = await loop.create_connection(Noting, sock=tcp.server)
        with pytest.raises(ClientDisconnected):
            async with watch(transport, pause_reading=False):
                tcp.leave("fin")
                await forever()
        await until(lambda: protocol.calls == ["eof", "lost"])
        assert set(vars(protocol)) == {"calls"}

    run(main)


# --- life -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["tcp", "unix"], indirect=True)
def test_thousand_requests_on_one_connection_are_never_cancelled(
    run: LoopRunner, pair: Pair
) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()

        def client() -> int:
            for number in range(1000):
                pair.client.sendall(b"%d\n" % number)
                assert pair.client.recv(100) == b"=%d\n" % number
            return number

        async with streams(pair) as (reader, writer):
            asking = loop.run_in_executor(None, client)
            counts = set()
            for number in range(1000):
                line = await reader.readline()
                async with watch(writer) as w:
                    if number % 100 == 0:
                        counts.add((len(open_fds()), len(asyncio.all_tasks())))
                    await asyncio.sleep(0)
                    assert not w.token.cancelled
                writer.write(b"=" + line)
            assert await asking == 999
            assert len(counts) == 1
            assert default_watcher().stats().num_armed == 0

    run(main)


def test_blocked_loop_delays_no_token(run: LoopRunner) -> None:
    async def main() -> None:
        with connected() as pair:
            async with streams(pair) as (_, writer):
                seen = []

                def work(token: CancelToken) -> None:
                    pair.client.close()
                    seen.append(token.wait(40))

                with pytest.raises(ClientDisconnected):
                    async with watch(writer) as w:
                        thread = threading.Thread(target=work, args=(w.token,))
                        thread.start()
                        # The loop stands still here until the other thread has seen it.
                        thread.join()
                        assert seen == [True]
                        await forever()

    run(main)


def test_two_loops_in_two_threads_share_one_watcher(run: LoopRunner) -> None:
    async def main() -> None:
        with connected() as pair:
            async with streams(pair) as (_, writer):
                for _ in range(20):
                    async with watch(writer):
                        await asyncio.sleep(0)
                with pytest.raises(ClientDisconnected):
                    async with watch(writer):
                        pair.leave("fin")
                        await forever()

    runners = [LoopRunner(run.kind), LoopRunner(run.kind)]
    threads = [threading.Thread(target=runner, args=(main,)) for runner in runners]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [runner.reports for runner in runners] == [[], []]


def test_watch_works_in_a_forked_child_with_a_loop_of_its_own(run: LoopRunner) -> None:
    async def main() -> None:
        with connected() as pair:
            async with streams(pair) as (_, writer):
                with pytest.raises(ClientDisconnected):
                    async with watch(writer):
                        pair.leave("fin")
                        await forever()

    run(main)  # the parent has used its watcher before
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            run(main)
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    run(main)


def test_open_connection_of_a_closed_loop_holds_nothing_once_collected(run: LoopRunner) -> None:
    before = len(open_fds())
    with connected() as pair:
        # As a server that is stopped over open connections.
        holder: list[Any] = []

        async def main() -> None:
            holder.extend(await asyncio.open_connection(sock=pair.server))
            async with watch(holder[1]):
                pass

        with warnings.catch_warnings():  # of the unclosed transport, as it should be
            warnings.simplefilter("ignore", ResourceWarning)
            run(main)
            holder.clear()
            gc.collect()
    assert len(open_fds()) == before
    assert default_watcher().stats().num_connections == 0


def test_watch_has_no_room_for_strays() -> None:
    with pytest.raises(AttributeError):
        watch(0).tokne = 1  # type: ignore[attr-defined]
    assert isinstance(watch(0), Watch)


def test_transport_that_took_over_a_watched_protocol_is_followed(
    run: LoopRunner, tcp: Pair
) -> None:
    class Layer:
        """A transport over another with the same protocol, as ``start_tls`` makes one."""

        def __init__(self, below: asyncio.Transport) -> None:
            self._below = below

        def __getattr__(self, name: str) -> Any:
            return getattr(self._below, name)

    async def main() -> None:
        mailbox = loop_mailbox()
        async with streams(tcp) as (_, writer):
            below = transport_of(writer)
            layer = cast("asyncio.Transport", Layer(below))
            for transport in (below, layer, below):
                async with watch(transport):
                    assert mailbox.connections[tcp.server.fileno()].transport is transport

    run(main)


def test_transport_is_watched_by_the_watcher_that_is_asked_for_now(
    run: LoopRunner, tcp: Pair
) -> None:
    async def main() -> None:
        with Watcher() as own:
            async with streams(tcp) as (_, writer):
                for watcher in (None, own, None, own):
                    watchers = {None: default_watcher(), own: own}
                    armed = {watcher: watchers[watcher].stats().num_armed for watcher in watchers}
                    async with watch(writer, watcher=watcher):
                        for other, before in armed.items():
                            more = watchers[other].stats().num_armed - before
                            assert more == (other is watcher)

    run(main)


def test_transport_reads_again_though_its_reader_got_another_one(
    run: LoopRunner, tcp: Pair
) -> None:
    class Shim:
        """Somebody else's transport, whose flow is none of ours."""

        def resume_reading(self) -> None:
            raise AssertionError("resumed")

    async def main() -> None:
        async with streams(tcp) as (reader, writer):
            own, transport = reader._transport, transport_of(writer)  # type: ignore[attr-defined]
            async with watch(writer):
                assert not transport.is_reading()
                reader._transport = Shim()  # type: ignore[attr-defined]
            assert transport.is_reading()
            reader._transport = own  # type: ignore[attr-defined]

    run(main)
