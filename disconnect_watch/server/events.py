"""A response that is a stream of server-sent events."""

from collections.abc import AsyncGenerator
from contextlib import AbstractContextManager, aclosing

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from disconnect_watch.server.documents import encode
from disconnect_watch.server.errors import CancelledByPeer

__all__ = ["EventStream", "frame"]


class EventStream(Response):
    """A ``text/event-stream`` of frames.

    When the client has left, the body ends without its last chunk: nothing that was
    cut short may look complete. Starlette's own streaming response runs a second task
    to listen for the disconnect; here the engine's outcome tells of it.

    Args:
        frames: the events; raises ``CancelledByPeer`` where the client has left, and tells of
            every other error by a frame.
        source: what the frames come from, left with the response.
    """

    media_type = "text/event-stream"
    charset = "utf-8"

    def __init__(
        self,
        frames: AsyncGenerator[bytes, None],
        *,
        source: AbstractContextManager[object],
        status: int = 200,
    ) -> None:
        # nginx buffers a stream unless it is told not to.
        super().__init__(
            status_code=status, headers={"cache-control": "no-cache", "x-accel-buffering": "no"}
        )
        del self.headers["content-length"]
        self._frames = frames
        self._source = source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._source:
            await send(
                {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.raw_headers,
                }
            )
            try:
                async with aclosing(self._frames) as frames:
                    async for data in frames:
                        await send({"type": "http.response.body", "body": data, "more_body": True})
            except CancelledByPeer:
                return
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def frame(value: object) -> bytes:
    """One event that carries a value as JSON."""
    return b"data: %b\n\n" % encode(value)
