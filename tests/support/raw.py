"""A small HTTP server on a thread of its own, by ``start_server`` of anybody."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.support.net import wait_until

__all__ = ["WHOLE", "Served", "serving_raw"]

WHOLE = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\ndone"

StartServer = Callable[..., Awaitable[asyncio.Server]]


@dataclass
class Served:
    """What the server did; a request is a head of one segment.

    Attributes:
        sockets: those it listens on.
        first: what it sends as soon as a request is there.
        seconds: how long it works for each.
        answer: what it then sends, and closes.
    """

    sockets: list[socket.socket] = field(default_factory=list)
    first: bytes = b""
    seconds: float = 20.0
    answer: bytes = WHOLE
    num_begun: int = 0
    num_cancelled: int = 0
    num_ended: int = 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            self.num_begun += 1
            writer.write(self.first)
            await asyncio.sleep(self.seconds)
            writer.write(self.answer)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
            self.num_ended += 1


@contextlib.contextmanager
def serving_raw(start: StartServer, served: Served, *args: Any, **options: Any) -> Iterator[Served]:
    """Serve until the end of the block; what still runs then is cancelled."""
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda _, context: None)  # of connections that are cut off
    stop = asyncio.Event()

    async def main() -> None:
        server = await start(served, *args, **options)
        served.sockets.extend(server.sockets)
        await stop.wait()
        server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # transports close behind their tasks

    def run() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(main())

    thread = threading.Thread(target=run)
    thread.start()
    try:
        wait_until(lambda: served.sockets)
        yield served
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(40)
        assert not thread.is_alive()
