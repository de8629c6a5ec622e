"""The owner is told of the end before the watcher, for certain: nothing may be lost."""

import asyncio
import socket
from collections.abc import Iterator

import pytest

from disconnect_watch import ClientDisconnected, Reason, Watcher, start_server, watch
from disconnect_watch.aio._mailbox import loop_mailbox
from tests.stress.owner_first import USERS, Target, opened
from tests.support.loops import LoopRunner
from tests.support.net import Pair, dial, reset, transport_of, until


class HeldWatcher(Watcher):
    """A watcher driven by the loop that looks at nothing while it is held."""

    is_held = True

    def poll(self, timeout: float = 0.0) -> int:
        return 0 if self.is_held else super().poll(timeout)


@pytest.fixture
def held() -> Iterator[HeldWatcher]:
    with HeldWatcher(driver="loop") as watcher:
        yield watcher


def _transport_of(target: Target) -> asyncio.Transport:
    return transport_of(target) if isinstance(target, asyncio.StreamWriter) else target


async def forever() -> None:
    await asyncio.get_running_loop().create_future()


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("way", ["fin", "rst", "half_close", "fin_behind_data"])
def test_end_that_the_owner_reads_is_told_although_nobody_watched(
    run: LoopRunner, held: HeldWatcher, pair: Pair, user: str, way: str
) -> None:
    async def main() -> None:
        async with opened(user, pair.server) as target:
            with pytest.raises(ClientDisconnected) as caught:
                async with watch(target, pause_reading=False, watcher=held) as w:
                    pair.leave(way)
                    await forever()
            assert caught.value.reason is w.token.reason
            assert held.stats().num_wakeups == 0
            assert held.stats().num_fired == 1

    run(main)


@pytest.mark.parametrize("pause_reading", [True, False], ids=["paused", "reading"])
@pytest.mark.parametrize("user", USERS)
def test_reset_that_the_owner_meets_in_a_write_is_told_although_nobody_watched(
    run: LoopRunner, held: HeldWatcher, tcp: Pair, user: str, pause_reading: bool
) -> None:
    async def main() -> None:
        async with opened(user, tcp.server) as target:
            with pytest.raises(ClientDisconnected) as caught:
                async with watch(target, pause_reading=pause_reading, watcher=held) as w:
                    tcp.leave("rst")
                    while not _transport_of(target).is_closing():
                        target.write(b".")
                        await asyncio.sleep(0)
                    await forever()
            assert caught.value.reason is w.token.reason is Reason.RESET
            assert held.stats().num_wakeups == 0

    run(main)


@pytest.mark.parametrize("way", ["fin", "rst"])
def test_handler_is_cancelled_by_an_end_that_only_the_owner_saw(
    run: LoopRunner, held: HeldWatcher, way: str
) -> None:
    ended: list[BaseException] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readline()
            await forever()
        except asyncio.CancelledError as error:
            ended.append(error)
            raise

    async def main() -> None:
        server = await start_server(handle, "127.0.0.1", 0, watcher=held)
        async with server:
            client = await asyncio.to_thread(dial, server.sockets[0])
            client.sendall(b"prompt\n")
            await until(lambda: held.stats().num_armed)
            if way == "rst":
                reset(client)
            else:
                client.close()
            await until(lambda: ended)
            assert held.stats().num_wakeups == 0

    run(main)


def test_block_and_token_name_the_reason_that_was_told_first(tcp: Pair) -> None:
    # asyncio's transport closes on the reset one step before it says so, and the news of
    # the FIN before it is delivered in between.
    async def main() -> None:
        async with opened("protocol", tcp.server) as target:
            with pytest.raises(ClientDisconnected) as caught:
                async with watch(target) as w:
                    tcp.leave("half_close")
                    assert w.token.wait(40)
                    tcp.leave("rst")
                    while not _transport_of(target).is_closing():
                        target.write(b".")
                    loop_mailbox().deliver()
                    await forever()
            assert caught.value.reason is w.token.reason is Reason.FIN

    LoopRunner("asyncio")(main)


def test_end_that_the_owner_made_himself_is_no_leave(run: LoopRunner, tcp: Pair) -> None:
    async def main() -> None:
        async with opened("stream", tcp.server) as target:
            assert isinstance(target, asyncio.StreamWriter)
            reader: asyncio.StreamReader = target._reader  # type: ignore[attr-defined]
            async with watch(target, pause_reading=False) as w:
                tcp.server.shutdown(socket.SHUT_RD)
                await until(reader.at_eof)
            assert not w.token.cancelled
            with pytest.raises(ClientDisconnected):
                async with watch(target, pause_reading=False):
                    tcp.client.close()
                    await forever()

    run(main)
