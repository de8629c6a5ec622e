"""What Tornado alone has: its log, its buffer, its callbacks, WebSockets."""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from tornado.http1connection import HTTP1Connection
from tornado.httpclient import AsyncHTTPClient
from tornado.web import Application, RequestHandler
from tornado.websocket import WebSocketHandler, websocket_connect

from disconnect_watch import grace, is_gone
from disconnect_watch.adapters.tornado import cancel_on_disconnect, client_token, setup
from disconnect_watch.aio._policy import OnDisconnect
from disconnect_watch.ports import bind
from disconnect_watch.watcher import default_watcher
from tests.support.documents import run_blocks
from tests.support.http import Client
from tests.support.loops import LoopRunner
from tests.support.net import open_fds, unread_bytes, until
from tests.support.tornado_app import tornado_server


@asynccontextmanager
async def served(app: Application) -> AsyncIterator[int]:
    """The application on this loop; gives its port."""
    with bind("127.0.0.1", 0) as sock:
        async with tornado_server(app, sock):
            yield sock.getsockname()[1]
            await until(lambda: default_watcher().stats().num_connections == 0)


def app_of(handler: type[RequestHandler], *, on_disconnect: OnDisconnect = "cancel") -> Application:
    app = Application([("/.*", handler)])
    setup(app, on_disconnect=on_disconnect)
    return app


async def dial(port: int, path: str = "/") -> Client:
    def connect() -> Client:
        client = Client(port)
        client.post(path)
        return client

    return await asyncio.to_thread(connect)


async def forever() -> None:
    await asyncio.get_running_loop().create_future()


def fd_of(handler: RequestHandler) -> int:
    assert isinstance(handler.request.connection, HTTP1Connection)
    return handler.request.connection.stream.socket.fileno()


@pytest.mark.parametrize("is_started", [False, True], ids=["waiting", "streaming"])
def test_the_request_of_a_client_that_left_is_logged_once_as_499(
    run: LoopRunner, caplog: pytest.LogCaptureFixture, is_started: bool
) -> None:
    calls: list[str] = []

    class Handler(RequestHandler):
        async def post(self) -> None:
            if is_started:
                self.write("one")
                await self.flush()
            calls.append("begun")
            await forever()

        def on_connection_close(self) -> None:
            calls.append("closed")

    async def main() -> None:
        async with served(app_of(Handler)) as port:
            client = await dial(port, "/infer")
            await until(lambda: calls)
            client.sock.close()
            await until(lambda: caplog.records and "closed" in calls)

    run(main)
    (record,) = caplog.records
    assert record.getMessage().startswith("499 POST /infer")
    assert record.levelno == logging.WARNING


@pytest.mark.parametrize("is_paused", [True, False], ids=["open", "closed"])
@pytest.mark.parametrize("on_disconnect", ["cancel", grace(60)], ids=["cancel", "grace"])
def test_nothing_is_begun_for_a_client_that_left_before(
    run: LoopRunner,
    caplog: pytest.LogCaptureFixture,
    on_disconnect: OnDisconnect,
    is_paused: bool,
) -> None:
    begun: list[str] = []

    async def main() -> None:
        waiting: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        may_go_on = asyncio.Event()

        class Handler(RequestHandler):
            async def prepare(self) -> None:
                waiting.set_result(fd_of(self))
                await may_go_on.wait()
                begun.append("prepare")

            def post(self) -> None:
                begun.append("post")

        async with served(app_of(Handler, on_disconnect=on_disconnect)) as port:
            client = await dial(port)
            fd = await waiting
            if is_paused:
                client.sock.sendall(b"G")  # Tornado looks no more
                await until(lambda: not unread_bytes(fd))
            client.sock.close()
            await until(lambda: is_gone(fd) if is_paused else fd not in open_fds())
            may_go_on.set()
            await until(lambda: caplog.messages)
        assert caplog.messages[0].startswith("499")
        assert begun == ["prepare"]

    run(main)


@pytest.mark.parametrize("how", ["cancelled", "swallows", "finishes", "fails", "grace"])
def test_requests_behind_a_cancelled_one_never_start_though_they_are_not_watched(
    run: LoopRunner, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    begun: list[str] = []
    caplog.set_level(logging.INFO)

    class Infer(RequestHandler):
        @cancel_on_disconnect(on_disconnect=grace(0.05) if how == "grace" else "cancel")
        async def post(self) -> None:
            begun.append("infer")
            try:
                await forever()
            except asyncio.CancelledError:
                if how == "finishes":
                    self.finish("nobody reads it")
                elif how == "fails":
                    raise ZeroDivisionError from None
                elif how != "swallows":
                    raise

    class Other(RequestHandler):
        def prepare(self) -> None:
            begun.append("prepare")

        def post(self) -> None:
            begun.append("post")

    async def main() -> None:
        async with served(Application([("/infer", Infer), ("/other", Other)])) as port:
            client = await dial(port, "/infer")
            await until(lambda: begun)
            for _ in range(40):
                client.post("/other")
            client.sock.close()
            await until(lambda: caplog.messages)
            for _ in range(10):
                await asyncio.sleep(0)
        assert begun == ["infer"]

    run(main)


def test_a_handler_whose_last_write_waits_for_its_client_is_still_watched(run: LoopRunner) -> None:
    ends: list[str] = []

    class Handler(RequestHandler):
        async def post(self) -> None:
            connection = self.request.connection
            assert isinstance(connection, HTTP1Connection)
            while not connection.stream.writing():
                self.write(bytes(65536))
                self.flush()
            try:
                ends.append("full")
                await self.finish()
            except asyncio.CancelledError:
                ends.append("cancelled")
                raise

    async def main() -> None:
        async with served(app_of(Handler)) as port:
            client = await dial(port)
            client.sock.sendall(b"G")
            await until(lambda: ends)
            client.sock.shutdown(socket.SHUT_WR)
            await until(lambda: ends == ["full", "cancelled"])
            client.sock.close()

    run(main)


def test_a_handler_that_closes_the_connection_itself_is_not_cancelled(run: LoopRunner) -> None:
    ends: list[object] = []

    class Handler(RequestHandler):
        async def post(self) -> None:
            connection = self.request.connection
            assert isinstance(connection, HTTP1Connection)
            connection.stream.close()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            ends.append(client_token(self).reason)

    async def main() -> None:
        async with served(app_of(Handler)) as port:
            client = await dial(port)
            await until(lambda: ends == ["owner_closed"])
            client.sock.close()

    run(main)


def test_a_websocket_is_not_watched(run: LoopRunner) -> None:
    armed: list[int] = []

    class Feed(WebSocketHandler):
        def on_message(self, message: str | bytes) -> None:
            armed.append(default_watcher().stats().num_armed)
            self.write_message(message)

    async def main() -> None:
        async with served(app_of(Feed)) as port:
            websocket = await websocket_connect(f"ws://127.0.0.1:{port}/feed")
            await websocket.write_message("hello")
            assert await websocket.read_message() == "hello"
            websocket.close()
            await until(lambda: websocket.protocol is None or websocket.close_code is not None)
        assert armed == [0]

    run(main)


def test_a_method_that_is_not_watched_has_no_token(run: LoopRunner) -> None:
    class Handler(RequestHandler):
        def post(self) -> None:
            with pytest.raises(LookupError, match=r"POST /infer: none; call setup\(app\)"):
                client_token(self)
            self.write("none")

    async def main() -> None:
        async with served(Application([("/.*", Handler)])) as port:
            client = await dial(port, "/infer")
            assert (await asyncio.to_thread(client.read_response))[2] == b"none"
            client.sock.close()

    run(main)


def test_the_page_of_documentation_works_as_written(
    run: LoopRunner, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        names = run_blocks("adapters/tornado.md")
        app = names["app"]
        app.add_handlers(".*", [("/stream", names["Stream"])])
        async with served(app) as port:
            http = AsyncHTTPClient(force_instance=True)
            response = await http.fetch(f"http://127.0.0.1:{port}/stream")
            assert response.body.count(b"data:") == 3
            http.close()
            client = await dial(port, "/infer")
            await until(lambda: default_watcher().stats().num_armed)
            client.sock.close()
            await until(lambda: caplog.records)
        assert caplog.messages[-1].startswith("499 POST /infer")

    run(main)
