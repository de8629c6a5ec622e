"""The one reader of ``receive()``: nothing is taken from the application, or out of order."""

import asyncio
from typing import Any

import pytest

from disconnect_watch.adapters._inbox import READ_AHEAD, Inbox, is_asked_for
from tests.support.loops import LoopRunner
from tests.support.net import until


class Scripted:
    """A server's ``receive()``: what it says is put in by the test."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[Any] = asyncio.Queue()
        self.num_readers = 0
        self.num_taken = 0

    def say(self, *messages: Any) -> None:
        for message in messages:
            self.queue.put_nowait(message)

    async def __call__(self) -> Any:
        self.num_readers += 1
        assert self.num_readers == 1, "receive() has a single reader"
        try:
            message = await self.queue.get()
        finally:
            self.num_readers -= 1
        if isinstance(message, Exception):
            raise message
        self.num_taken += 1
        return message


def body(data: bytes, *, more_body: bool = True) -> dict[str, Any]:
    return {"type": "http.request", "body": data, "more_body": more_body}


DISCONNECT = {"type": "http.disconnect"}


def test_messages_come_in_order_and_the_disconnect_for_ever(run: LoopRunner) -> None:
    async def main() -> None:
        server = Scripted()
        heard: list[str] = []
        inbox = Inbox(server)
        inbox.on_disconnect = lambda: heard.append("gone")
        inbox.listen()
        parts = [body(b"%d" % number) for number in range(5)]
        server.say(*parts, DISCONNECT)
        await until(lambda: heard == ["gone"])
        assert [await inbox.get() for _ in parts] == parts
        assert await inbox.get() == DISCONNECT
        assert await inbox.get() == DISCONNECT
        inbox.close()

    run(main)


def test_an_application_that_waits_hears_of_a_leave_that_we_saw(run: LoopRunner) -> None:
    async def main() -> None:
        server = Scripted()
        inbox = Inbox(server)
        waiting = [asyncio.create_task(inbox.get()) for _ in range(2)]
        await until(lambda: server.num_readers == 1)
        inbox.disconnect()
        assert [await task for task in waiting] == [DISCONNECT] * 2
        inbox.close()

    run(main)


def test_a_cancelled_wait_loses_no_message(run: LoopRunner) -> None:
    """As Starlette's ``is_disconnected`` does it, which cancels at once."""

    async def main() -> None:
        server = Scripted()
        inbox = Inbox(server)
        for _ in range(10):
            task = asyncio.create_task(inbox.get())
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        server.say(body(b"x"), body(b"y"))
        assert [(await inbox.get())["body"] for _ in range(2)] == [b"x", b"y"]
        inbox.close()

    run(main)


def test_a_body_that_nobody_takes_is_left_to_the_server(run: LoopRunner) -> None:
    async def main() -> None:
        server = Scripted()
        inbox = Inbox(server)
        inbox.listen()
        part = bytes(READ_AHEAD // 2)
        server.say(*[body(part)] * 6, DISCONNECT)
        await until(lambda: server.num_taken == 3)
        await asyncio.sleep(0)
        assert server.num_taken == 3
        for _ in range(6):
            assert (await inbox.get())["body"] == part
        assert await inbox.get() == DISCONNECT
        inbox.close()

    run(main)


def test_a_failure_of_the_server_is_raised_where_the_application_asks(run: LoopRunner) -> None:
    async def main() -> None:
        server = Scripted()
        inbox = Inbox(server)
        inbox.on_disconnect = lambda: pytest.fail("a failure is no disconnect")
        inbox.listen()
        server.say(body(b"x"), RuntimeError("broken"))
        assert (await inbox.get())["body"] == b"x"
        with pytest.raises(RuntimeError, match="broken"):
            await inbox.get()
        inbox.close()

    run(main)


def test_a_closed_inbox_keeps_what_it_read_for_who_listens_next(run: LoopRunner) -> None:
    async def main() -> None:
        server = Scripted()
        inbox = Inbox(server)
        inbox.on_disconnect = lambda: pytest.fail("nobody listens")
        inbox.listen()
        server.say(body(b"first"))
        await until(lambda: server.num_taken == 1)
        inbox.close()
        server.say(body(b"second"), DISCONNECT)
        await until(lambda: server.num_readers == 0)
        heard: list[str] = []
        inbox.on_disconnect = lambda: heard.append("gone")
        inbox.listen()
        assert [(await inbox.get())["body"] for _ in range(2)] == [b"first", b"second"]
        await until(lambda: heard == ["gone"])
        inbox.close()

    run(main)


def test_a_body_is_known_to_be_sent_only_when_asked_for() -> None:
    assert is_asked_for([(b"host", b"x"), (b"Expect", b"100-Continue")])
    assert not is_asked_for([(b"host", b"x"), (b"expect", b"nothing")])
