"""Questions and answers between two processes of one server."""

import asyncio
import itertools
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import Any, Self

import msgspec

from disconnect_watch.backends.remote_engine.frames import FrameLink
from disconnect_watch.errors import DisconnectWatchError

__all__ = ["Channel", "ChannelError"]

#: Answers a question, by its name and what came with it.
Handler = Callable[[str, list[Any]], Awaitable[Any]]

_logger = logging.getLogger(__name__)


class ChannelError(DisconnectWatchError):
    """The other process is gone, or failed at the question."""


class Channel:
    """One end: asks, and answers by a handler; a question that nobody waits for is a message.

    Threads: the loop's only.
    """

    def __init__(self, handler: Handler, on_lost: Callable[[], object]) -> None:
        self._handler = handler
        self._on_lost = on_lost
        self._frames: FrameLink | None = None
        self._numbers = itertools.count(1)
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @classmethod
    async def open(
        cls, sock: socket.socket, handler: Handler, on_lost: Callable[[], object]
    ) -> Self:
        """Take over a connected socket."""
        channel = cls(handler, on_lost)
        channel._frames = await FrameLink.connect(sock, channel._hear, channel._lost)
        return channel

    async def ask(self, name: str, *arguments: Any) -> Any:
        """Ask, and return the answer, of msgpack's types.

        Raises:
            ChannelError: there is none.
        """
        if self._frames is None or self._frames.is_lost:
            raise ChannelError(f"'{name}' was asked of a process that is gone")
        call = next(self._numbers)
        answer = self._calls[call] = asyncio.get_running_loop().create_future()
        self._send(call, name, list(arguments))
        try:
            return await answer
        finally:
            del self._calls[call]

    def tell(self, name: str, *arguments: Any) -> None:
        """Say what needs no answer."""
        self._send(0, name, list(arguments))

    def close(self) -> None:
        """Let go of the socket, behind what was sent. Idempotent."""
        if self._frames is not None:
            self._frames.close()

    def _send(self, call: int, name: str, body: Any) -> None:
        if self._frames is not None:
            self._frames.send(msgspec.msgpack.encode((call, name, body)))

    def _hear(self, frame: memoryview) -> None:
        call, name, body = msgspec.msgpack.decode(frame)
        if call < 0 or not name:
            self._resolve(-call, name, body)
            return
        task = asyncio.get_running_loop().create_task(self._answer(call, name, body))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _resolve(self, call: int, error: str, result: Any) -> None:
        answer = self._calls.get(call)
        if answer is None or answer.done():
            return  # whoever asked was cancelled
        if error:
            answer.set_exception(ChannelError(error))
        else:
            answer.set_result(result)

    async def _answer(self, call: int, name: str, body: list[Any]) -> None:
        error, result = "", None
        try:
            result = await self._handler(name, body)
        except Exception as failure:
            _logger.exception("'%s' of another process failed", name)
            error = f"'{name}' failed: {type(failure).__name__}: {failure}"
        if call:
            self._send(-call, error, result)

    def _lost(self) -> None:
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(ChannelError("the process that was asked is gone"))
        self._on_lost()
