"""asyncio's selector hears of a paused transport only when there is something to read."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from disconnect_watch import watch
from tests.support.loops import LoopRunner
from tests.support.net import Pair, streams, transport_of, unread_bytes, until


class Selector:
    """Counts what a loop tells the kernel of one fd."""

    def __init__(self, loop: Any, fd: int) -> None:
        self._selector = loop._selector
        self._fd = fd
        self.num_changes = 0
        for name in ("register", "unregister", "modify"):
            self._count(name, getattr(self._selector, name))

    def _count(self, name: str, own: Any) -> None:
        def counted(fileobj: Any, *arguments: Any) -> Any:
            self.num_changes += fileobj == self._fd
            return own(fileobj, *arguments)

        setattr(self._selector, name, counted)

    @property
    def has_fd(self) -> bool:
        return self._fd in self._selector.get_map()


@pytest.fixture
def run() -> Iterator[LoopRunner]:
    """Selectors are asyncio's own; uvloop's libuv is as lazy by itself."""
    runner = LoopRunner("asyncio")
    yield runner
    runner.reports.clear()


async def selector_of(writer: asyncio.StreamWriter) -> Selector:
    await asyncio.sleep(0)  # a new transport begins to read at the loop's next turn
    fd = writer.get_extra_info("socket").fileno()
    return Selector(asyncio.get_running_loop(), fd)


def test_block_whose_client_is_silent_tells_the_kernel_nothing(run: LoopRunner, tcp: Pair) -> None:
    async def main() -> None:
        async with streams(tcp) as (reader, writer):
            selector = await selector_of(writer)
            for target in (writer, writer.transport):
                async with watch(target):
                    assert not transport_of(writer).is_reading()
                    await asyncio.sleep(0)
                assert transport_of(writer).is_reading()
            assert selector.num_changes == 0
            tcp.client.sendall(b"read")
            assert await reader.readexactly(4) == b"read"

    run(main)


def test_first_byte_takes_the_socket_out_of_the_selector_once_and_stays_unread(
    run: LoopRunner, tcp: Pair
) -> None:
    async def main() -> None:
        async with streams(tcp) as (reader, writer):
            selector = await selector_of(writer)
            async with watch(writer):
                tcp.client.sendall(b"later")
                await until(lambda: not selector.has_fd)
                tcp.client.sendall(b"more")
                await until(lambda: unread_bytes(tcp.server) == 9)
                assert selector.num_changes == 1
            assert selector.has_fd
            assert await reader.readexactly(9) == b"latermore"

    run(main)


def test_block_that_reads_takes_the_socket_back(run: LoopRunner, tcp: Pair) -> None:
    async def main() -> None:
        async with streams(tcp) as (reader, writer):
            for _ in range(2):
                async with watch(writer):
                    tcp.client.sendall(b"body")
                    assert await reader.readexactly(4) == b"body"
                    assert transport_of(writer).is_reading()
                async with watch(writer):
                    assert not transport_of(writer).is_reading()

    run(main)


def test_transport_that_closes_inside_the_block_is_gone_from_the_selector(
    run: LoopRunner, tcp: Pair
) -> None:
    async def main() -> None:
        async with streams(tcp) as (_, writer):
            selector = await selector_of(writer)
            async with watch(writer):
                writer.close()
                assert not selector.has_fd

    run(main)


def test_reader_that_stays_full_leaves_the_kernels_pause_behind(run: LoopRunner, tcp: Pair) -> None:
    async def main() -> None:
        async with streams(tcp) as (reader, writer):
            selector = await selector_of(writer)
            reader.feed_data(b"x" * (65536 + 1))  # above its limit, below that of its own pause
            assert transport_of(writer).is_reading()
            async with watch(writer):
                await asyncio.sleep(0)
            assert not transport_of(writer).is_reading()
            assert not selector.has_fd
            await reader.read(65536)
            assert transport_of(writer).is_reading()
            assert selector.has_fd

    run(main)


def test_socket_with_a_reader_of_somebody_elses_is_paused_as_ever(
    run: LoopRunner, tcp: Pair
) -> None:
    async def main() -> None:
        loop: Any = asyncio.get_running_loop()
        async with streams(tcp) as (_, writer):
            selector = await selector_of(writer)
            loop._add_reader(tcp.server.fileno(), lambda: None)
            async with watch(writer):
                assert not transport_of(writer).is_reading()
                assert not selector.has_fd
            assert transport_of(writer).is_reading()

    run(main)
