"""What Sanic alone has: its command, its log, its kinds of handlers."""

import asyncio
import logging
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest
from sanic import HTTPResponse, Request, Sanic
from sanic.response import empty, text
from sanic.views import HTTPMethodView

from disconnect_watch import CancelToken, Reason, is_gone
from disconnect_watch.adapters.sanic import cancel_on_disconnect, client_token, setup
from disconnect_watch.ports import bind
from disconnect_watch.watcher import default_watcher
from tests.support.documents import blocks_of
from tests.support.http import Client
from tests.support.loops import LOOP_KINDS, LoopRunner
from tests.support.net import held_port, open_fds, until, wait_until
from tests.support.sanic_app import sanic_server

Main = Callable[[int], Awaitable[None]]


@pytest.fixture(params=[kind for kind in LOOP_KINDS if kind != "eager"])
def loop_kind(request: pytest.FixtureRequest) -> str:
    """Not with eager tasks, with which Sanic 25.12 serves no request, watched or not."""
    return str(request.param)


@asynccontextmanager
async def served(app: Sanic[Any, Any]) -> AsyncIterator[int]:
    """The application on this loop; gives its port."""
    app.config.TOUCHUP = False
    with bind("127.0.0.1", 0) as sock:
        async with sanic_server(app, sock):
            yield sock.getsockname()[1]
            await until(lambda: default_watcher().stats().num_connections == 0)


@pytest.fixture
def app() -> Sanic[Any, Any]:
    return Sanic("app", configure_logging=False)


async def dial(port: int, path: str = "/") -> Client:
    def connect() -> Client:
        client = Client(port)
        client.post(path)
        return client

    return await asyncio.to_thread(connect)


async def forever() -> None:
    await asyncio.get_running_loop().create_future()


@pytest.mark.parametrize("is_started", [False, True], ids=["waiting", "streaming"])
def test_the_request_of_a_client_that_left_is_logged_once_as_499(
    run: LoopRunner, app: Sanic[Any, Any], caplog: pytest.LogCaptureFixture, is_started: bool
) -> None:
    has_begun = False
    setup(app)

    @app.post("/infer")
    async def infer(request: Request) -> None:
        nonlocal has_begun
        if is_started:
            response = await request.respond()
            await response.send("one")
            caplog.clear()  # the head was logged as it went
        has_begun = True
        await forever()

    async def main() -> None:
        async with served(app) as port:
            client = await dial(port, "/infer")
            await until(lambda: has_begun)
            client.sock.close()
            await until(lambda: caplog.records)

    with caplog.at_level(logging.INFO, "sanic.access"):
        run(main)
    (record,) = (record for record in caplog.records if record.name == "sanic.access")
    assert vars(record)["status"] == 499
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


def test_handlers_of_each_kind_are_watched(run: LoopRunner, app: Sanic[Any, Any]) -> None:
    tokens: dict[str, CancelToken] = {}

    class View(HTTPMethodView):
        @cancel_on_disconnect
        async def post(self, request: Request) -> HTTPResponse:
            tokens[request.path] = client_token(request)
            await forever()
            return empty()

    @app.post("/number/<number:int>")
    @cancel_on_disconnect()
    async def numbered(request: Request, number: int) -> HTTPResponse:
        assert number == 7
        tokens[request.path] = client_token(request)
        await forever()
        return empty()

    @app.post("/plain")
    @cancel_on_disconnect
    def plain(request: Request) -> HTTPResponse:
        tokens[request.path] = client_token(request)
        return text("plain")

    async def main() -> None:
        app.add_route(View.as_view(), "/view")
        async with served(app) as port:
            for path in ("/view", "/number/7"):
                client = await dial(port, path)
                await until(lambda: tokens)
                client.sock.close()
                (token,) = tokens.values()
                await until(lambda token=token: token.reason is Reason.FIN)  # type: ignore[misc]
                tokens.clear()
            client = await dial(port, "/plain")
            assert (await asyncio.to_thread(client.read_response))[2] == b"plain"
            client.sock.close()
        assert not tokens["/plain"].cancelled

    run(main)


def test_a_websocket_is_not_watched(run: LoopRunner, app: Sanic[Any, Any]) -> None:
    armed: list[int] = []
    setup(app)

    @app.websocket("/feed")  # type: ignore[untyped-decorator]
    async def feed(request: Request, ws: Any) -> None:
        armed.append(default_watcher().stats().num_armed)
        await ws.send(await ws.recv())

    async def main() -> None:
        async with (
            served(app) as port,
            aiohttp.ClientSession() as session,
            session.ws_connect(f"http://127.0.0.1:{port}/feed") as websocket,
        ):
            await websocket.send_str("hello")
            assert (await websocket.receive()).data == "hello"
        assert armed == [0]

    run(main)


def test_nothing_is_begun_for_a_client_that_left_before(
    run: LoopRunner, app: Sanic[Any, Any]
) -> None:
    begun: list[str] = []
    setup(app)

    @app.post("/")
    async def infer(request: Request) -> HTTPResponse:
        begun.append("handler")
        return empty()

    async def main() -> None:
        waiting: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        may_go_on = asyncio.Event()

        async def hold(request: Request) -> None:
            transport = cast("asyncio.Transport", request.transport)
            transport.pause_reading()  # nobody but the watcher sees it
            waiting.set_result(transport.get_extra_info("socket").fileno())
            await may_go_on.wait()
            begun.append("middleware")

        app.register_middleware(hold)
        async with served(app) as port:
            client = await dial(port)
            fd = await waiting
            client.sock.close()
            await until(lambda: is_gone(fd))
            may_go_on.set()
            await until(lambda: fd not in open_fds())
        assert begun == ["middleware"]

    run(main)


def test_a_handler_whose_last_write_waits_for_its_client_is_still_watched(
    run: LoopRunner, app: Sanic[Any, Any]
) -> None:
    ends: list[str] = []
    setup(app)

    @app.post("/")
    async def infer(request: Request) -> None:
        response = await request.respond()
        transport = cast("asyncio.Transport", request.transport)
        await response.send("one")
        while request.protocol._can_write.is_set():  # type: ignore[attr-defined]
            transport.write(bytes(65536))
        ends.append("full")
        try:
            await response.eof()
        except asyncio.CancelledError:
            ends.append("cancelled")
            raise

    async def main() -> None:
        async with served(app) as port:
            client = await dial(port)
            await until(lambda: ends)
            # The transport would wait for ever to send the rest to a half-closed client.
            client.sock.shutdown(socket.SHUT_WR)
            await until(lambda: ends == ["full", "cancelled"])
            client.sock.close()

    run(main)


def test_a_route_that_is_not_watched_has_no_token(run: LoopRunner, app: Sanic[Any, Any]) -> None:
    @app.post("/infer")
    async def infer(request: Request) -> HTTPResponse:
        with pytest.raises(LookupError, match=r"POST /infer: none; call setup\(app\)"):
            client_token(request)
        return text("none")

    async def main() -> None:
        async with served(app) as port:
            client = await dial(port, "/infer")
            assert (await asyncio.to_thread(client.read_response))[2] == b"none"
            client.sock.close()

    run(main)


@pytest.fixture
def port() -> Iterator[int]:
    with held_port() as port:
        yield port


@pytest.fixture
def command(tmp_path: Path, port: int) -> Iterator[tuple[int, list[str]]]:
    """The page's application under Sanic's own command: its port, and what it says."""
    (tmp_path / "app.py").write_text("\n".join(blocks_of("adapters/sanic.md")))
    options = f"--host 127.0.0.1 --port {port} --single-process --access-logs --no-motd"
    process = subprocess.Popen(
        [sys.executable, "-m", "sanic", "app:app", *options.split()],
        cwd=tmp_path,
        env={"PYTHONPATH": f"{Path(__file__).parents[2]}:{tmp_path}", "PATH": "/usr/bin:/bin"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines: list[str] = []
    assert process.stdout is not None
    reader = threading.Thread(target=lines.extend, args=(process.stdout,))
    reader.start()
    try:
        wait_until(lambda: any("Worker ready" in line for line in lines))
        yield port, lines
    finally:
        process.kill()
        process.wait(40)
        reader.join(40)
        process.stdout.close()


@pytest.mark.slow
def test_the_page_of_documentation_works_under_sanics_command(
    command: tuple[int, list[str]],
) -> None:
    port, lines = command
    with Client(port) as client:
        client.post("/infer")
        client.post("/behind")
    wait_until(lambda: any("DISCONNECTED" in line for line in lines))
    (logged,) = (line for line in lines if "POST" in line)
    assert "/infer 499" in logged


def test_streams_of_the_page_are_whole(run: LoopRunner) -> None:
    names: dict[str, Any] = {}
    exec(blocks_of("adapters/sanic.md")[1], names)

    async def main() -> None:
        async with (
            served(names["stream"]) as port,
            aiohttp.ClientSession() as session,
            session.get(f"http://127.0.0.1:{port}/stream") as response,
        ):
            assert (await response.text()).count("data:") == 3

    run(main)
