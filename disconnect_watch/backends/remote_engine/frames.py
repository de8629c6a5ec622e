"""Messages of any size over a stream socket between two processes of one server."""

import asyncio
import socket
from collections.abc import Callable
from typing import Self, cast

__all__ = ["FrameLink"]

#: Of a frame's length, which stands before it, little-endian.
HEAD_BYTES = 4


class FrameLink(asyncio.Protocol):
    """One end of a stream socket, as whole frames.

    Args:
        on_frame: called with each frame, which is valid for the call only.
        on_lost: called once when the other end is gone, or this one was closed; what the other
            had sent before was heard.

    Threads: the loop's only.
    """

    def __init__(
        self, on_frame: Callable[[memoryview], object], on_lost: Callable[[], object]
    ) -> None:
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._transport: asyncio.WriteTransport | None = None
        self._is_lost = False
        self._rest = bytearray()

    @classmethod
    async def connect(
        cls,
        sock: socket.socket,
        on_frame: Callable[[memoryview], object],
        on_lost: Callable[[], object],
    ) -> Self:
        """Take over a connected socket."""
        link = cls(on_frame, on_lost)
        sock.setblocking(False)
        await asyncio.get_running_loop().create_unix_connection(lambda: link, sock=sock)
        return link

    @property
    def is_lost(self) -> bool:
        """Whether the other end is gone; what is sent from then on is dropped."""
        return self._is_lost

    def send(self, frame: bytes) -> None:
        """Send one frame; it waits here where the other end does not read."""
        if self._transport is not None and not self._is_lost:
            self._transport.write(len(frame).to_bytes(HEAD_BYTES, "little") + frame)

    def close(self) -> None:
        """Let go of the socket, behind what was sent. Idempotent."""
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the loop."""
        # Those of uvloop are of a class of their own.
        self._transport = cast("asyncio.WriteTransport", transport)

    def data_received(self, data: bytes) -> None:
        """Called by the loop."""
        buffer: bytes | bytearray = data
        if self._rest:
            self._rest += data  # where it lies, however many pieces a long frame comes in
            buffer = self._rest
        start = 0
        with memoryview(buffer) as view:
            while len(view) - start >= HEAD_BYTES:
                body = start + HEAD_BYTES
                end = body + int.from_bytes(view[start:body], "little")
                if end > len(view):
                    break
                self._on_frame(view[body:end])
                start = end
        if start or buffer is data:
            self._rest = bytearray(buffer[start:])

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the loop."""
        self._is_lost = True
        self._on_lost()
