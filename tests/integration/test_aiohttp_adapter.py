"""What aiohttp alone has: middlewares, views, bodies that are iterators, WebSockets, its log."""

import asyncio
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from disconnect_watch import CancelToken, Reason, grace, is_gone
from disconnect_watch.adapters.aiohttp import cancel_on_disconnect, client_token, middleware
from disconnect_watch.aio._policy import OnDisconnect
from disconnect_watch.watcher import default_watcher
from tests.support.documents import run_blocks
from tests.support.http import Client
from tests.support.loops import LoopRunner
from tests.support.net import open_fds, until

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def served(app: web.Application, tls: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    """The application on this loop; gives its port."""
    runner = web.AppRunner(app, shutdown_timeout=1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
    await site.start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()
        await until(lambda: default_watcher().stats().num_connections == 0)


def app_of(handler: Handler, *, is_watched: bool = True) -> web.Application:
    app = web.Application(middlewares=[middleware()] if is_watched else [])
    app.router.add_route("*", "/{path:.*}", handler)
    return app


async def dial(port: int, path: str = "/") -> Client:
    def connect() -> Client:
        client = Client(port)
        client.post(path)
        return client

    return await asyncio.to_thread(connect)


async def forever() -> None:
    await asyncio.get_running_loop().create_future()


@pytest.mark.parametrize("is_started", [False, True], ids=["waiting", "streaming"])
def test_the_request_of_a_client_that_left_is_logged_as_499(
    run: LoopRunner, caplog: pytest.LogCaptureFixture, is_started: bool
) -> None:
    has_begun = False

    async def handle(request: web.Request) -> web.StreamResponse:
        nonlocal has_begun
        response = web.StreamResponse()
        if is_started:
            await response.prepare(request)
            await response.write(b"one")
        has_begun = True
        await forever()
        return response

    async def main() -> None:
        async with served(app_of(handle)) as port:
            client = await dial(port, "/infer")
            await until(lambda: has_begun)
            client.sock.close()
            await until(lambda: caplog.messages)

    with caplog.at_level(logging.INFO, "aiohttp.access"):
        run(main)
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert '"POST /infer HTTP/1.1" 499' in caplog.messages[0]


def test_the_iterator_of_a_body_ends_when_its_client_leaves(run: LoopRunner) -> None:
    ends: list[str] = []

    async def body() -> AsyncIterator[bytes]:
        try:
            yield b"one"
            await forever()
        except asyncio.CancelledError:
            ends.append("cancelled")
            raise

    async def handle(request: web.Request) -> web.StreamResponse:
        return web.Response(body=body())

    async def main() -> None:
        async with served(app_of(handle)) as port:
            client = await dial(port)
            await asyncio.to_thread(client.read_until, b"one")
            client.sock.close()
            await until(lambda: ends == ["cancelled"])

    run(main)


def test_the_iterator_of_a_body_is_sent_whole_to_a_client_that_stays(run: LoopRunner) -> None:
    async def body() -> AsyncIterator[bytes]:
        for number in range(3):
            yield b"%d" % number

    async def handle(request: web.Request) -> web.StreamResponse:
        return web.Response(body=body())

    async def main() -> None:
        async with served(app_of(handle)) as port, aiohttp.ClientSession() as session:
            for _ in range(2):
                async with session.get(f"http://127.0.0.1:{port}/") as response:
                    assert await response.read() == b"012"

    run(main)


def test_a_websocket_may_finish_after_its_clients_goodbye(run: LoopRunner) -> None:
    ends: list[object] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        websocket = web.WebSocketResponse()
        await websocket.prepare(request)
        async for message in websocket:
            await websocket.send_str(message.data)
        await until(lambda: request.transport is None or request.transport.is_closing())
        await asyncio.sleep(0)
        ends.append(client_token(request).reason)
        return websocket

    async def main() -> None:
        async with served(app_of(handle)) as port, aiohttp.ClientSession() as session:
            async with session.ws_connect(f"http://127.0.0.1:{port}/") as websocket:
                await websocket.send_str("hello")
                assert (await websocket.receive()).data == "hello"
            await until(lambda: ends)
        assert ends == [None]

    run(main)


@pytest.mark.parametrize("is_paused", [True, False], ids=["paused", "reading"])
@pytest.mark.parametrize("on_disconnect", ["cancel", grace(60)], ids=["cancel", "grace"])
def test_nothing_is_begun_for_a_client_that_left_before(
    run: LoopRunner,
    caplog: pytest.LogCaptureFixture,
    on_disconnect: OnDisconnect,
    is_paused: bool,
) -> None:
    begun: list[str] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        begun.append(request.path)
        return web.Response()

    async def main() -> None:
        waiting: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        may_go_on = asyncio.Event()

        @web.middleware
        async def hold(request: web.Request, handler: Handler) -> web.StreamResponse:
            assert request.transport is not None
            if is_paused:
                request.transport.pause_reading()  # nobody but the watcher sees it
            waiting.set_result(request.transport.get_extra_info("socket").fileno())
            await may_go_on.wait()
            begun.append("middleware")
            return await handler(request)

        app = web.Application(middlewares=[hold, middleware(on_disconnect=on_disconnect)])
        app.router.add_post("/", handle)
        async with served(app) as port:
            client = await dial(port)
            fd = await waiting
            client.sock.close()
            await until(lambda: is_gone(fd) if is_paused else fd not in open_fds())
            may_go_on.set()
            await until(lambda: fd not in open_fds())
        assert begun == ["middleware"]

    run(main)
    assert not caplog.messages


@pytest.mark.parametrize("does_answer", [True, False], ids=["answer", "error"])
def test_the_connection_closes_though_the_cancel_became_an_answer_or_an_error(
    run: LoopRunner, does_answer: bool
) -> None:
    # Behind it requests may wait whose routes are not watched.
    is_closing: list[bool] = []
    begun = asyncio.Event()

    @cancel_on_disconnect
    async def handle(request: web.Request) -> web.StreamResponse:
        begun.set()
        try:
            await forever()
        except asyncio.CancelledError:
            if not does_answer:
                raise web.HTTPBadGateway from None
        return web.Response()

    @web.middleware
    async def look(request: web.Request, handler: Handler) -> web.StreamResponse:
        transport = request.transport
        assert transport is not None
        transport.pause_reading()  # aiohttp finds out nothing
        try:
            return await handler(request)
        finally:
            is_closing.append(transport.is_closing())

    async def main() -> None:
        app = web.Application(middlewares=[look])
        app.router.add_post("/", handle)
        async with served(app) as port:
            client = await dial(port)
            await begun.wait()
            client.sock.close()
            await until(lambda: is_closing)
        assert is_closing == [True]

    run(main)


def test_a_handler_whose_last_write_waits_for_its_client_is_still_watched(run: LoopRunner) -> None:
    ends: list[str] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        assert request.transport is not None
        while not request.protocol.writing_paused:
            request.transport.write(bytes(65536))
        ends.append("full")
        try:
            await response.write_eof()
        except asyncio.CancelledError:
            ends.append("cancelled")
            raise
        return response

    async def main() -> None:
        async with served(app_of(handle)) as port:
            client = await dial(port)
            await until(lambda: ends)
            # aiohttp's transport would wait for ever to send the rest to a half-closed client.
            client.sock.shutdown(socket.SHUT_WR)
            await until(lambda: ends == ["full", "cancelled"])
            client.sock.close()

    run(main)


def test_a_route_that_is_not_watched_has_no_token(run: LoopRunner) -> None:
    async def handle(request: web.Request) -> web.StreamResponse:
        with pytest.raises(LookupError, match=r"GET /infer: none; add middleware\(\)"):
            client_token(request)
        return web.Response()

    async def main() -> None:
        async with (
            served(app_of(handle, is_watched=False)) as port,
            aiohttp.ClientSession() as session,
            session.get(f"http://127.0.0.1:{port}/infer") as response,
        ):
            assert response.status == 200

    run(main)


def test_methods_of_views_and_of_other_objects_are_decorated_alike(run: LoopRunner) -> None:
    tokens: list[CancelToken] = []

    class View(web.View):
        @cancel_on_disconnect
        async def get(self) -> web.StreamResponse:
            tokens.append(client_token(self.request))
            await forever()
            return web.Response()

    class Service:
        @cancel_on_disconnect()
        async def infer(self, request: web.Request) -> web.StreamResponse:
            tokens.append(client_token(request))
            await forever()
            return web.Response()

    async def main() -> None:
        app = web.Application()
        app.router.add_view("/view", View)
        app.router.add_get("/service", Service().infer)
        async with served(app) as port:
            for path in ("/view", "/service"):
                tokens.clear()
                async with aiohttp.ClientSession() as session:
                    asking = asyncio.create_task(session.get(f"http://127.0.0.1:{port}{path}"))
                    await until(lambda: tokens)
                    asking.cancel()
                await until(lambda: tokens[0].reason is Reason.FIN)

    run(main)


def test_the_page_of_documentation_works_as_written(
    run: LoopRunner, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        names = run_blocks("adapters/aiohttp.md")
        app = names["app"]
        app.router.add_view("/view", names["Infer"])
        async with served(app) as port:
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/view") as response:
                    assert await response.text() == "started\n"
                asking = asyncio.create_task(session.get(f"http://127.0.0.1:{port}/infer"))
                await until(lambda: default_watcher().stats().num_armed)
                asking.cancel()
            await until(
                lambda: any("/infer" in line and " 499 " in line for line in caplog.messages)
            )

    with caplog.at_level(logging.INFO, "aiohttp.access"):
        run(main)
