"""``dw.watch`` inside an application under our uvicorn protocols, which attached before it."""

import asyncio
import threading
from typing import Any

import pytest

import disconnect_watch as dw
from disconnect_watch.adapters import TOKEN_KEY
from disconnect_watch.watcher import Watcher
from tests.support.http import Client
from tests.support.net import reset, wait_until
from tests.support.serve import STACKS, Stack

pytestmark = pytest.mark.parametrize("stack", STACKS, ids=str)


class Watching:
    """Works inside a block that watches, and notes how the block ended."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.entered: list[str] = []
        self.left: list[dw.Reason] = []
        self.tokens: list[dw.CancelToken] = []
        self.release = threading.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        transport = receive.__self__.transport
        self.tokens.append(scope["state"][TOKEN_KEY])
        try:
            async with dw.watch(transport, **self.options):
                self.entered.append(scope["path"])
                if scope["path"] == "/wait":
                    await asyncio.to_thread(self.release.wait, 20)
                    await asyncio.Event().wait()
        except dw.ClientDisconnected as left:
            self.left.append(left.reason)
            raise
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"done"})


@pytest.mark.parametrize("pause_reading", [True, False])
@pytest.mark.parametrize("way", ["fin", "reset", "behind"])
def test_a_block_shares_the_attachment_of_the_protocol(
    stack: Stack, way: str, pause_reading: bool
) -> None:
    app = Watching(pause_reading=pause_reading)
    with (
        Watcher() as watcher,
        stack.serving(app, stack.configured(watcher=watcher)) as server,
        Client(server.port) as client,
    ):
        for _ in range(3):
            client.post("/again", b"")
            assert client.read_response()[2] == b"done"
        client.post("/wait", b"")
        wait_until(lambda: app.entered[-1] == "/wait")
        assert watcher.stats().num_connections == 1
        if way == "behind":
            client.post("/behind", b"")
        if way == "reset":
            reset(client.sock)
        else:
            client.sock.close()
        wait_until(lambda: app.tokens[-1].cancelled)
        app.release.set()
        wait_until(lambda: len(app.left) == 1)
        wait_until(lambda: watcher.stats().num_connections == 0)
        assert app.left[0] in (dw.Reason.FIN, dw.Reason.RESET)
        assert app.entered == ["/again"] * 3 + ["/wait"]
        assert watcher.stats().num_armed == 0


def test_a_block_hears_of_a_close_that_the_transport_read_first(stack: Stack) -> None:
    app = Watching(pause_reading=False)
    with (
        Watcher(driver="loop") as watcher,  # polled by nobody, so it never tells by itself
        stack.serving(app, stack.configured(watcher=watcher)) as server,
        Client(server.port) as client,
    ):
        app.release.set()
        client.post("/wait", b"")
        wait_until(lambda: app.entered == ["/wait"])
        client.sock.close()
        wait_until(lambda: len(app.left) == 1)
