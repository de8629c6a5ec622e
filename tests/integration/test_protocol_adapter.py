"""A protocol of one's own, with the mixin: who leaves it, and what its requests hear."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from disconnect_watch import ClientDisconnected, Reason, watch
from disconnect_watch.adapters.protocol import Request, WatchedProtocol
from disconnect_watch.aio import loop_mailbox
from disconnect_watch.watcher import Watcher, default_watcher
from tests.support.documents import run_blocks
from tests.support.loops import LoopRunner
from tests.support.net import LEAVES, Pair, connected, reset, until
from tests.support.tls import client_context, server_context


class Server(WatchedProtocol, asyncio.Protocol):
    """One request a line; what it does is the test's."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.lines: list[bytes] = []
        self.calls: list[str] = []
        self.lefts: list[Reason] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        super().connection_made(transport)
        self.calls.append("made")

    def data_received(self, data: bytes) -> None:
        for line in data.splitlines():
            self.lines.append(line)
            self.requests.append(self.begin_request())

    def eof_received(self) -> bool | None:
        self.calls.append("eof")
        return super().eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.calls.append("lost")

    def client_left(self, reason: Reason) -> None:
        self.lefts.append(reason)


class Tolerant(Server):
    half_close = "ignore"


@asynccontextmanager
async def serving(
    factory: Callable[[], Server], pair: Pair, *, is_tls: bool = False
) -> AsyncIterator[Server]:
    """The protocol at the server's end of the pair."""
    loop = asyncio.get_running_loop()
    protocol = factory()
    await loop.connect_accepted_socket(
        lambda: protocol, pair.server, ssl=server_context() if is_tls else None
    )
    try:
        yield protocol
    finally:
        protocol.transport.abort()
        await until(lambda: "lost" in protocol.calls)
        assert default_watcher().stats().num_connections == 0


async def begin(protocol: Server, pair: Pair, line: bytes = b"a\n") -> Request:
    pair.client.sendall(line)
    await until(lambda: protocol.requests)
    return protocol.requests[0]


@pytest.mark.parametrize("leave", [name for name in LEAVES if not LEAVES[name].is_before])
@pytest.mark.parametrize("is_paused", [False, True], ids=["reading", "paused"])
def test_a_client_that_leaves_fires_all_tokens_and_is_told_of_once(
    run: LoopRunner, pair: Pair, leave: str, is_paused: bool
) -> None:
    async def main() -> None:
        async with serving(Server, pair) as protocol:
            await begin(protocol, pair, b"a\nb\n")
            if is_paused:
                protocol.transport.pause_reading()
            first, second, *_ = requests = tuple(protocol.requests)
            pair.leave(leave)
            await until(lambda: protocol.lefts)
            assert len(requests) == 2
            assert first.token.cancelled
            assert second.token.cancelled
            # A reset's error may be the transport's before the watcher looks.
            assert protocol.lefts[0] in {LEAVES[leave].reason, Reason.FIN}
        assert len(protocol.lefts) == 1

    run(main)


@pytest.mark.parametrize("way", ["fin", "rst"])
def test_a_client_that_leaves_under_tls_is_heard(run: LoopRunner, tcp: Pair, way: str) -> None:
    async def main() -> None:
        def dial() -> None:
            tcp.client = client_context().wrap_socket(tcp.client, server_hostname="localhost")
            tcp.client.sendall(b"a\n")

        dialling = asyncio.get_running_loop().run_in_executor(None, dial)
        async with serving(Server, tcp, is_tls=True) as protocol:
            await dialling
            await until(lambda: protocol.requests)
            if way == "rst":
                reset(tcp.client)
            else:
                tcp.client.close()
            await until(lambda: protocol.lefts)
            assert protocol.requests[0].token.cancelled

    run(main)


def test_a_task_is_cancelled_with_its_request(run: LoopRunner, tcp: Pair) -> None:
    async def main() -> None:
        async with serving(Server, tcp) as protocol:
            waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()

            async def wait() -> None:
                await waiting

            task = asyncio.create_task(wait())
            protocol.begin_request(task)
            tcp.leave("fin")
            await until(task.done)
            assert task.cancelled()

    run(main)


def test_what_begins_behind_a_client_that_left_is_cancelled_from_the_start(
    run: LoopRunner, tcp: Pair
) -> None:
    async def main() -> None:
        async with serving(Server, tcp) as protocol:
            await begin(protocol, tcp)
            protocol.transport.pause_reading()
            tcp.leave("fin_behind_data")
            await until(lambda: protocol.lefts)
            task = asyncio.create_task(asyncio.sleep(60))
            late = protocol.begin_request(task)
            assert late.token.reason is Reason.FIN
            await until(task.cancelled)
            protocol.transport.close()
            await until(lambda: "lost" in protocol.calls)
            assert protocol.begin_request().token.reason is Reason.FIN
            assert protocol.lefts == [Reason.FIN]

    run(main)


def test_a_request_that_ended_is_not_cancelled(run: LoopRunner, tcp: Pair) -> None:
    async def main() -> None:
        async with serving(Server, tcp) as protocol:
            request = await begin(protocol, tcp)
            protocol.end_request(request)
            protocol.end_request(request)
            assert default_watcher().stats().num_armed == 0
            tcp.leave("rst")
            await until(lambda: "lost" in protocol.calls)
            assert not request.token.cancelled
            assert protocol.lefts == []

    run(main)


def test_who_closes_the_connection_itself_is_not_cancelled(run: LoopRunner, tcp: Pair) -> None:
    async def main() -> None:
        async with serving(Server, tcp) as protocol:
            task = asyncio.create_task(asyncio.sleep(0.01))
            request = protocol.begin_request(task)
            protocol.transport.close()
            await task
            assert request.token.reason is Reason.OWNER_CLOSED
            assert protocol.lefts == []

    run(main)


def test_the_echo_of_ones_own_close_is_no_leave(run: LoopRunner, tcp: Pair) -> None:
    async def main() -> None:
        async with serving(Server, tcp) as protocol:
            task = asyncio.create_task(asyncio.sleep(60))
            request = protocol.begin_request(task)
            protocol.transport.write(bytes(1 << 24))  # keeps it open for now
            protocol.transport.close()
            tcp.client.shutdown(socket.SHUT_WR)
            await until(lambda: request.token.cancelled)
            loop_mailbox().deliver()
            assert protocol.lefts == []
            assert not task.cancelling()
            task.cancel()

    run(main)


def test_a_half_closed_client_is_answered_and_then_closed(run: LoopRunner, tcp: Pair) -> None:
    async def main() -> None:
        async with serving(Tolerant, tcp) as protocol:
            request = await begin(protocol, tcp)
            tcp.client.shutdown(socket.SHUT_WR)
            await until(lambda: "eof" in protocol.calls)
            await asyncio.sleep(0)
            assert not request.token.cancelled
            assert not protocol.transport.is_closing()
            protocol.end_request(request)
            protocol.transport.write(b"answer")
            rest = await asyncio.to_thread(lambda: b"".join(iter(lambda: tcp.client.recv(99), b"")))
            assert rest == b"answer"

    run(main)


def test_a_half_closed_client_that_resets_is_gone(run: LoopRunner, tcp: Pair) -> None:
    async def main() -> None:
        async with serving(Tolerant, tcp) as protocol:
            request = await begin(protocol, tcp)
            tcp.client.shutdown(socket.SHUT_WR)
            await until(lambda: "eof" in protocol.calls)
            tcp.leave("rst")
            await until(lambda: protocol.lefts)
            assert request.token.cancelled

    run(main)


def test_a_half_closed_client_without_a_request_is_closed_as_ever(
    run: LoopRunner, tcp: Pair
) -> None:
    async def main() -> None:
        async with serving(Tolerant, tcp) as protocol:
            tcp.client.shutdown(socket.SHUT_WR)
            await until(lambda: protocol.calls == ["made", "eof", "lost"])

    run(main)


def test_a_watch_shares_what_the_protocol_has_attached(run: LoopRunner, tcp: Pair) -> None:
    async def main() -> None:
        async with serving(Server, tcp) as protocol:
            with pytest.raises(ClientDisconnected):
                async with watch(protocol.transport, pause_reading=False):
                    assert default_watcher().stats().num_connections == 1
                    tcp.leave("rst")
                    await asyncio.get_running_loop().create_future()

    run(main)


def test_a_connection_that_cannot_be_watched_is_served_all_the_same(
    run: LoopRunner, tcp: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        with default_watcher().attach(tcp.server):  # somebody else has it
            async with serving_unwatched(tcp) as protocol:
                request = await begin(protocol, tcp)
                tcp.leave("rst")
                await until(lambda: "lost" in protocol.calls)
                assert request.token.reason is Reason.RESET
                assert protocol.lefts == [Reason.RESET]
        assert "cannot watch" in caplog.text
        caplog.clear()  # it holds the error, and so all that its frames held

    @asynccontextmanager
    async def serving_unwatched(pair: Pair) -> AsyncIterator[Server]:
        protocol = Server()
        loop = asyncio.get_running_loop()
        await loop.connect_accepted_socket(lambda: protocol, pair.server)
        yield protocol

    run(main)


def test_an_option_that_is_none_is_refused_with_the_class() -> None:
    with pytest.raises(ValueError, match="vanish_after"):

        class _Wrong(Server):
            vanish_after = 1.0


def test_a_silent_client_is_looked_for_if_that_is_asked_for(run: LoopRunner, tcp: Pair) -> None:
    class Asking(Server):
        vanish_after = 30.0

    async def main() -> None:
        # A watcher of its own, since the first bound takes it a timer for good.
        with Watcher() as watcher:
            Asking.watcher = watcher
            async with serving(Asking, tcp) as protocol:
                connection = protocol._connection
                assert connection is not None
                assert connection.conn.info().vanish_bound is not None

    run(main)


def test_a_transport_that_goes_to_another_protocol_is_let_go(run: LoopRunner, tcp: Pair) -> None:
    async def main() -> None:
        async with serving(Server, tcp) as protocol:
            request = await begin(protocol, tcp)
            protocol.stop_watching()
            assert default_watcher().stats().num_connections == 0
            tcp.leave("rst")
            await until(lambda: "lost" in protocol.calls)
            assert request.token.cancelled  # connection_lost came here all the same

    run(main)


def test_the_page_of_documentation_works_as_written(run: LoopRunner) -> None:
    names: dict[str, Any] = run_blocks("adapters/protocol.md")

    async def main() -> None:
        with connected() as pair:
            protocol = names["Server"]()
            loop = asyncio.get_running_loop()
            await loop.connect_accepted_socket(lambda: protocol, pair.server)
            pair.client.sendall(b"a\nb\n")
            await until(lambda: default_watcher().stats().num_armed == 2)
            pair.leave("fin")
            await until(lambda: default_watcher().stats().num_connections == 0)
            await until(lambda: len(asyncio.all_tasks()) == 1)

    run(main)
