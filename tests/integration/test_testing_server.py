"""How a ``ThreadedServer`` ends: in order, and without waiting for nobody."""

import asyncio
import threading
from typing import Any

from disconnect_watch.testing.server import serving
from tests.support.http import Client
from tests.support.net import wait_until


class Application:
    """Answers once it may.

    Attributes:
        heard: the messages of its lifespan.
        has_begun: its requests.
    """

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.has_begun = threading.Event()
        self.may_end = threading.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            for _ in range(2):
                self.heard.append((await receive())["type"])
                await send({"type": f"{self.heard[-1]}.complete"})
            return
        self.has_begun.set()
        await asyncio.to_thread(self.may_end.wait, 30)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"whole"})


class Timeless(asyncio.SelectorEventLoop):
    """A loop on which no time passes, so that no sleep ends."""

    def time(self) -> float:
        return 0.0


def test_a_stop_waits_for_no_tick_where_nobody_is_left() -> None:
    app = Application()
    with serving(app, make_loop=Timeless):
        pass
    assert app.heard == ["lifespan.startup", "lifespan.shutdown"]


def test_a_stop_waits_for_the_answer_that_is_under_way() -> None:
    app = Application()
    with (
        serving(app, timeout_graceful_shutdown=30) as server,
        Client(server.port) as client,
    ):
        client.post("/")
        assert app.has_begun.wait(40)
        stopping = threading.Thread(target=server.stop)
        stopping.start()
        wait_until(lambda: not server.server.servers[0].is_serving())
        app.may_end.set()
        assert client.read_response()[2] == b"whole"
        stopping.join(40)
    assert app.heard == ["lifespan.startup", "lifespan.shutdown"]
