"""Each snippet of the README's "In your server", run under its server, and left.

A snippet is the middle of a module: what stands before and after it here is the rest
of a small application, whose handler waits in ``asyncio.sleep`` and says so.
"""

import contextlib
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from disconnect_watch.testing import LeavingClient, Way, serving
from tests.support.net import held_port, wait_until

README = Path(__file__).parents[2] / "README.md"

HANDLER = """
import asyncio

async def wait():
    print("begun", flush=True)
    try:
        await asyncio.sleep(30)
    except asyncio.CancelledError:
        print("cancelled", flush=True)
        raise
"""

FASTAPI = """
from fastapi import FastAPI

app = FastAPI()
app.get("/")(wait)
"""

LISTENER = """
async def app(scope, receive, send):
    if scope["type"] == "http":
        print("begun", flush=True)
        while (await receive())["type"] != "http.disconnect":
            pass
        print("cancelled", flush=True)
"""

AIOHTTP = """
async def handle(request):
    await wait()

app.router.add_get("/", handle)
web.run_app(app, host="127.0.0.1", port={port})
"""

SANIC = """
from sanic import Sanic

app = Sanic("readme")

@app.get("/")
async def handle(request):
    await wait()
"""

TORNADO = """
from tornado.web import Application, RequestHandler

class Handler(RequestHandler):
    async def get(self):
        await wait()

app = Application([("/", Handler)])
"""

RUN_TORNADO = """
async def main():
    app.listen({port}, "127.0.0.1")
    await asyncio.Event().wait()

asyncio.run(main())
"""

GRPC = """
import grpc
from grpc import aio

def work(request, context):
    token = client_token(context)
    print("begun", flush=True)
    if token.wait(40):
        print("cancelled", flush=True)
    return b""

async def main():
"""

RUN_GRPC = """
    method = grpc.unary_unary_rpc_method_handler(work)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("readme", {"Infer": method}),)
    )
    server.add_insecure_port("127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()

asyncio.run(main())
"""

RUN_PROTOCOL = """
class Waiting(Server):
    async def answer(self, data):
        await wait()

async def main():
    server = await asyncio.get_running_loop().create_server(Waiting, "127.0.0.1", {port})
    await server.serve_forever()

asyncio.run(main())
"""

SCRIPT = "{module}.py"
AT_PORT = {
    "uvicorn": "--port {port}",
    "hypercorn": "--bind 127.0.0.1:{port}",
    "granian": "--port {port}",
    "gunicorn": "--bind 127.0.0.1:{port} --no-control-socket",
}


def section() -> str:
    text = README.read_text()
    start = text.index("## In your server\n")
    return text[start : text.index("\n## ", start)]


def blocks(language: str) -> list[str]:
    """The fenced blocks of the section."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", section(), re.DOTALL | re.MULTILINE)
    return [source for of, source in fenced if of == language]


def snippet(module: str) -> str:
    """The Python block that imports ``disconnect_watch.<module>``."""
    (found,) = (each for each in blocks("python") if f"disconnect_watch.{module} " in each)
    return found


def commands() -> list[str]:
    """The command lines that serve an ASGI application."""
    lines = "".join(blocks("")).splitlines()
    return [line for line in lines if line.split()[0] in AT_PORT]


@contextlib.contextmanager
def running(folder: Path, source: str, command: str, port: int) -> Iterator[Path]:
    """``command`` in ``folder``, where ``app.py`` is ``source``. Yields what it has printed."""
    (folder / "app.py").write_text(HANDLER + source.replace("{port}", str(port)))
    output = folder / "output"
    with output.open("w") as stream:
        process = subprocess.Popen(
            [sys.executable, *command.replace("{port}", str(port)).split()],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{README.parent}"},
            stdout=stream,
            stderr=subprocess.STDOUT,
        )
    try:
        yield output
    finally:
        process.terminate()
        try:
            process.wait(40)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(40)


def client_of(port: int) -> LeavingClient:
    """Connected as soon as somebody listens."""
    clients = []

    def connects() -> bool:
        with contextlib.suppress(OSError):
            clients.append(LeavingClient(("127.0.0.1", port)))
        return bool(clients)

    wait_until(connects)
    return clients[0]


def is_cancelled_when_its_client_leaves(port: int, output: Path) -> None:
    request = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with client_of(port) as client:
        client.send(request)
        wait_until(lambda: "begun" in output.read_text())
        # A pipelined request behind: the way that a server alone does not see.
        client.leave(Way.BEHIND_REQUEST, request=request)
        wait_until(lambda: "cancelled" in output.read_text())


@pytest.fixture
def port() -> Iterator[int]:
    with held_port() as port:
        yield port


@pytest.mark.parametrize("command", [line for line in commands() if "--http" not in line])
def test_asgi_snippet_cancels_under(command: str, tmp_path: Path, port: int) -> None:
    source = FASTAPI + snippet("adapters.asgi")
    words = f"-m {command} {AT_PORT[command.split()[0]]}"
    with running(tmp_path, source, words, port) as output:
        is_cancelled_when_its_client_leaves(port, output)


@pytest.mark.parametrize("command", [line for line in commands() if "--http" in line])
def test_protocol_of_uvicorn_tells_an_application_that_listens(
    command: str, tmp_path: Path, port: int
) -> None:
    words = f"-m {command} {AT_PORT['uvicorn']}"
    with running(tmp_path, LISTENER, words, port) as output:
        is_cancelled_when_its_client_leaves(port, output)


@pytest.mark.parametrize(
    ("name", "before", "after", "command"),
    [
        ("aiohttp", "from aiohttp import web", AIOHTTP, "app.py"),
        (
            "sanic",
            SANIC,
            "",
            "-m sanic app:app --host 127.0.0.1 --port {port} --single-process --no-motd",
        ),
        ("tornado", TORNADO, RUN_TORNADO, "app.py"),
        ("protocol", "", RUN_PROTOCOL, "app.py"),
    ],
)
def test_snippet_cancels_the_handler(
    name: str, before: str, after: str, command: str, tmp_path: Path, port: int
) -> None:
    source = f"{before}\n{snippet(f'adapters.{name}')}\n{after}"
    with running(tmp_path, source, command, port) as output:
        is_cancelled_when_its_client_leaves(port, output)


def test_snippet_for_grpc_stops_a_handler_in_a_thread(tmp_path: Path, port: int) -> None:
    imports, server = snippet("adapters.grpc").split("\n\n")
    source = imports + GRPC + textwrap.indent(server, "    ") + RUN_GRPC
    with running(tmp_path, source, "app.py", port) as output:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = channel.unary_unary("/readme/Infer").future(b"", wait_for_ready=True)
            wait_until(lambda: "begun" in output.read_text())
            call.cancel()
        wait_until(lambda: "cancelled" in output.read_text())


def test_snippet_for_tests_passes_for_a_server_that_stops() -> None:
    begun: list[str] = []
    stopped: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        begun.append(scope["path"])
        while (await receive())["type"] != "http.disconnect":
            pass
        stopped.append(scope["path"])

    with serving(app, lifespan="off") as server:
        names = {"server": server, "begun": begun, "stopped": stopped}
        exec(compile(snippet("testing"), "README.md", "exec"), names)
    assert set(begun) == {"/generate"}
