"""RPCs of a grpc.aio server whose clients cancel, time out, or lose their connection."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from grpc import aio

from disconnect_watch import CancelToken, Reason
from disconnect_watch.adapters.grpc import Interceptor, client_token
from tests.support.documents import run_blocks
from tests.support.loops import LoopRunner
from tests.support.net import until

#: Of the four kinds: what makes a handler, and a stub.
KINDS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "unary_unary": (grpc.unary_unary_rpc_method_handler, lambda channel: channel.unary_unary),
    "unary_stream": (grpc.unary_stream_rpc_method_handler, lambda channel: channel.unary_stream),
    "stream_unary": (grpc.stream_unary_rpc_method_handler, lambda channel: channel.stream_unary),
    "stream_stream": (grpc.stream_stream_rpc_method_handler, lambda channel: channel.stream_stream),
}


@dataclass
class Record:
    """What the handlers of one server did.

    Attributes:
        was_told: whether the token had fired when the handler saw its cancel.
    """

    contexts: list[Any] = field(default_factory=list)
    tokens: list[CancelToken] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    was_told: list[bool] = field(default_factory=list)

    @contextlib.contextmanager
    def running(self, context: Any) -> Iterator[CancelToken]:
        token = client_token(context)
        self.contexts.append(context)
        self.tokens.append(token)
        try:
            yield token
        except BaseException as error:
            self.was_told.append(token.cancelled)
            self.ended.append(type(error).__name__)
            raise
        self.ended.append("done")


async def forever() -> None:
    await asyncio.get_running_loop().create_future()


def handlers_of(record: Record) -> dict[str, Callable[..., Any]]:
    """Handlers by the name of their method: the kind of the RPC, and of the function."""

    async def waits(request: Any, context: Any) -> bytes:
        with record.running(context):
            await forever()
        return b""

    async def streams(request: Any, context: Any) -> AsyncIterator[bytes]:
        with record.running(context):
            yield b"one"
            await forever()

    async def writes(request: Any, context: Any) -> None:
        with record.running(context):
            await context.write(b"one")
            await forever()

    def in_thread(request: Any, context: Any) -> bytes:
        with record.running(context) as token:
            assert token.wait(40)
        return b""

    def streams_in_thread(request: Any, context: Any) -> Iterator[bytes]:
        with record.running(context) as token:
            yield b"one"
            assert token.wait(40)

    async def answers(request: Any, context: Any) -> bytes:
        with record.running(context):
            return b"answer"

    async def counts(request: Any, context: Any) -> AsyncIterator[bytes]:
        with record.running(context):
            for number in range(3):
                yield b"%d" % number

    async def fails(request: Any, context: Any) -> bytes:
        with record.running(context):
            await context.abort(grpc.StatusCode.NOT_FOUND, "nothing here")
        return b""

    return {
        "unary_unary waits": waits,
        "stream_unary waits": waits,
        "unary_stream streams": streams,
        "stream_stream streams": streams,
        "unary_stream writes": writes,
        "unary_unary in_thread": in_thread,
        "unary_stream streams_in_thread": streams_in_thread,
        "unary_unary answers": answers,
        "unary_stream counts": counts,
        "unary_unary fails": fails,
    }


#: Seconds until a deadline: the first in which the handler begins, however busy the machine.
PATIENCE = (0.1, 1, 10)

ENDLESS = [
    "unary_unary waits",
    "stream_unary waits",
    "unary_stream streams",
    "stream_stream streams",
    "unary_stream writes",
    "unary_unary in_thread",
    "unary_stream streams_in_thread",
]


@asynccontextmanager
async def serving(record: Record) -> AsyncIterator[tuple[aio.Server, int]]:
    # gRPC leaves the future of a stream that is cancelled in its thread to nobody, now and then.
    loop = asyncio.get_running_loop()
    report = loop.get_exception_handler()
    loop.set_exception_handler(
        lambda loop, context: (
            None
            if isinstance(context.get("exception"), asyncio.CancelledError) or report is None
            else report(loop, context)
        )
    )
    server = aio.server(interceptors=[Interceptor()])
    methods = {
        name: KINDS[name.split()[0]][0](behavior) for name, behavior in handlers_of(record).items()
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.Test", methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield server, port
    finally:
        await server.stop(0)


def call(channel: aio.Channel, name: str, *, timeout: float | None = None) -> Any:
    """Begin an RPC; a streamed request stays open."""
    kind = name.split()[0]
    stub = KINDS[kind][1](channel)(f"/t.Test/{name}")
    return stub(timeout=timeout) if kind.startswith("stream") else stub(b"prompt", timeout=timeout)


@asynccontextmanager
async def calling(record: Record) -> AsyncIterator[aio.Channel]:
    async with serving(record) as (_, port), aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel


@pytest.fixture(scope="module", autouse=True)
def grpc_is_up() -> None:
    """gRPC's own threads and fds live as long as the process, or the last channel."""

    async def main() -> None:
        async with calling(Record()) as channel:
            await call(channel, "unary_unary answers")

    asyncio.run(main())


@pytest.mark.parametrize("name", ENDLESS)
def test_an_rpc_that_its_client_cancels_fires_its_token(run: LoopRunner, name: str) -> None:
    record = Record()

    async def main() -> None:
        async with calling(record) as channel:
            rpc = call(channel, name)
            await until(lambda: record.tokens)
            rpc.cancel()
            await until(lambda: record.ended)
            assert record.tokens[0].reason is Reason.RESET

    run(main)
    if "thread" not in name:
        assert record.ended == ["CancelledError"]
        assert record.was_told == [True]


@pytest.mark.parametrize("name", ENDLESS)
def test_an_rpc_whose_deadline_is_over_says_so(run: LoopRunner, name: str) -> None:
    record = Record()

    async def main() -> None:
        async with calling(record) as channel:
            for timeout in PATIENCE:
                rpc = call(channel, name, timeout=timeout)
                assert await rpc.code() is grpc.StatusCode.DEADLINE_EXCEEDED
                if record.tokens:
                    break
            await until(lambda: record.ended)
            assert record.tokens[0].reason is Reason.DEADLINE

    run(main)


@pytest.mark.parametrize("name", ENDLESS)
def test_an_rpc_whose_connection_is_lost_fires_its_token(run: LoopRunner, name: str) -> None:
    record = Record()

    async def main() -> None:
        async with serving(record) as (_, port):
            ends: list[asyncio.StreamWriter] = []

            async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                while data := await reader.read(65536):
                    writer.write(data)

            async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                up_reader, up_writer = await asyncio.open_connection("127.0.0.1", port)
                ends.extend([writer, up_writer])
                with contextlib.suppress(ConnectionError):
                    await asyncio.gather(forward(reader, up_writer), forward(up_reader, writer))

            proxy = await asyncio.start_server(relay, "127.0.0.1", 0)
            number = proxy.sockets[0].getsockname()[1]
            async with proxy, aio.insecure_channel(f"127.0.0.1:{number}") as channel:
                rpc = call(channel, name)
                await until(lambda: record.tokens)
                proxy.close()
                for end in ends:
                    end.transport.abort()
                await until(lambda: record.ended)
                assert record.tokens[0].reason is Reason.RESET
                rpc.cancel()

    run(main)


def test_an_rpc_that_a_stopping_server_cancels_fires_its_token(run: LoopRunner) -> None:
    record = Record()

    async def main() -> None:
        async with (
            serving(record) as (server, port),
            aio.insecure_channel(f"127.0.0.1:{port}") as channel,
        ):
            rpc = call(channel, "unary_unary waits")
            await until(lambda: record.tokens)
            await server.stop(0)
            await until(lambda: record.ended == ["CancelledError"])
            assert record.tokens[0].cancelled
            rpc.cancel()

    run(main)


@pytest.mark.parametrize("name", ["unary_unary answers", "unary_stream counts"])
def test_an_rpc_that_is_answered_fires_no_token(run: LoopRunner, name: str) -> None:
    record = Record()

    async def main() -> None:
        async with calling(record) as channel:
            for _ in range(100):
                rpc = call(channel, name)
                if "stream" in name:
                    assert [answer async for answer in rpc] == [b"0", b"1", b"2"]
                else:
                    assert await rpc == b"answer"
        assert not any(token.cancelled for token in record.tokens)
        with pytest.raises(LookupError):
            client_token(record.contexts[0])  # the RPC is over

    run(main)


def test_an_rpc_that_aborts_is_answered_with_its_status(run: LoopRunner) -> None:
    record = Record()

    async def main() -> None:
        async with calling(record) as channel:
            rpc = call(channel, "unary_unary fails")
            assert await rpc.code() is grpc.StatusCode.NOT_FOUND
        assert not record.tokens[0].cancelled

    run(main)


def test_a_client_that_left_between_two_answers_of_a_stream_fires_its_token(
    run: LoopRunner,
) -> None:
    tokens: list[CancelToken] = []
    ended: list[bool] = []

    async def flood(request: Any, context: Any) -> AsyncIterator[bytes]:
        tokens.append(client_token(context))
        try:
            while True:
                yield bytes(1 << 20)
        finally:
            ended.append(client_token(context).cancelled)

    async def main() -> None:
        server = aio.server(interceptors=[Interceptor()])
        handler = grpc.unary_stream_rpc_method_handler(flood)
        methods = {"Flood": handler}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.Test", methods),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            rpc = channel.unary_stream("/t.Test/Flood")(b"")
            await rpc.read()
            rpc.cancel()
            await until(lambda: ended == [True])
            assert tokens[0].reason is Reason.RESET
        await server.stop(0)

    run(main)


def test_a_method_that_does_not_exist_is_answered_as_without_us(run: LoopRunner) -> None:
    async def main() -> None:
        async with calling(Record()) as channel:
            rpc = channel.unary_unary("/t.Test/None")(b"")
            assert await rpc.code() is grpc.StatusCode.UNIMPLEMENTED

    run(main)


def test_a_context_of_no_rpc_has_no_token() -> None:
    with pytest.raises(LookupError, match="interceptors="):
        client_token(object())


def test_the_page_of_documentation_works_as_written(run: LoopRunner) -> None:
    async def main() -> None:
        names = run_blocks("adapters/grpc.md")
        server, port = await names["serve"]("127.0.0.1:0")
        async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            for timeout in PATIENCE:
                rpc = channel.unary_unary("/demo.Infer/Infer")(b"prompt", timeout=timeout)
                assert await rpc.code() is grpc.StatusCode.DEADLINE_EXCEEDED
                with contextlib.suppress(AssertionError):  # it may not have begun
                    await until(lambda: names["stopped"], 2)
                    break
            assert names["stopped"] == [Reason.DEADLINE]
        await server.stop(0)

    run(main)
