"""Large bodies: read to their place, and not copied at all.

uvicorn's parser cuts each read into pieces, which uvicorn gathers, hands out as copies and has
its application put together: four copies, behind that which the transport makes of each read.
A body whose length is known needs no parser. While it comes, the transport is given another
protocol, which tells it to read to where the body is to lie; a new parser begins with what
comes behind.

The application asks for it, with the place for its body made; until then uvicorn's limits hold,
and it reads no further. What a client only announces costs no memory: nothing has touched it.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import httptools
import numpy as np

from disconnect_watch.adapters.uvicorn import HttpTools

__all__ = ["BODY_KEY", "LARGE", "UPLOAD_KEY", "Room", "UploadProtocol"]

#: Where in ``scope["state"]`` the application asks for it: called with the size and a ``Room``,
#: it returns the place for the body, whole when ``receive`` says so; None where it comes by
#: ``receive`` alone.
UPLOAD_KEY = "disconnect_watch.upload"

#: Where in ``scope["state"]`` it asks for a small one: called with its ``receive``, it returns the
#: body if that would return it at once and whole; else None, and nothing was taken.
BODY_KEY = "disconnect_watch.body"

#: Bytes from which on it is worth it; uvicorn reads up to 64 KiB ahead.
LARGE = 1 << 18
#: Of one read, so that other connections have their turn.
MAX_READ = 1 << 20

#: Memory for a body of so many bytes; None where whoever is asked has none of his own for it.
Room = Callable[[int], memoryview | None]


class UploadProtocol(HttpTools):
    """Takes bodies past the parser.

    Threads: the loop's only.
    """

    __slots__ = ()

    def __init__(self, config: Any, server_state: Any, app_state: dict[str, Any], *loop: Any):
        # The state that each request gets a copy of.
        state = {**app_state, UPLOAD_KEY: self.begin_upload, BODY_KEY: self.take_body}
        super().__init__(config, server_state, state, *loop)

    def begin_upload(self, size: int, room: Room | None = None) -> memoryview | None:
        """The place for the running request's body, which is ``size`` bytes, as it comes."""
        running, cycle = self._running, self.cycle
        # Behind a whole request the parser is in another, whose body it is not.
        if running is None or running.cycle is not cycle or not cycle.more_body:
            return None
        place = room(size) if room is not None else None
        if place is None:
            place = np.empty(size, np.uint8).data
        at = len(cycle.body)
        place[:at] = cycle.body
        cycle.body = bytearray()
        self.transport.set_protocol(_Filler(self, place, at))
        return place

    def take_body(self, receive: Any) -> bytes | None:
        """The rest of the running request's body, if that is there."""
        cycle: Any = getattr(receive, "__self__", self)
        if (
            # Who has another gets what somebody makes of the body, or is an earlier request.
            cycle is not self.cycle
            or not cycle.message_event.is_set()
            or cycle.more_body
            or cycle.disconnected
            or cycle.response_complete
            or cycle.waiting_for_100_continue
        ):
            return None
        body = bytes(cycle.body)
        cycle.body = bytearray()
        cycle.message_event.clear()
        return body

    def body_received(self, num_bytes: int) -> None:
        """More of a large body came."""

    def end_upload(self) -> None:
        """The body is whole; what comes next is another request."""
        self.transport.set_protocol(self)
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's
        self.on_message_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.app_state = {}  # which holds a method of ours


class _Filler(asyncio.BufferedProtocol):
    """The transport's protocol while a body comes; all but reading is the real one's.

    Args:
        place: for the body, of which ``at`` bytes are there.
    """

    def __init__(self, protocol: UploadProtocol, place: memoryview, at: int) -> None:
        self._protocol = protocol
        self._place = place
        self._at = at

    def get_buffer(self, sizehint: int) -> memoryview:
        # Never further than its end: behind it lies the next request's head.
        return self._place[self._at : self._at + MAX_READ]

    def buffer_updated(self, nbytes: int) -> None:
        self._at += nbytes
        self._protocol.body_received(nbytes)
        if self._at == len(self._place):
            self._protocol.end_upload()

    def eof_received(self) -> Any:
        return self._protocol.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._protocol.connection_lost(exc)

    def pause_writing(self) -> None:
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        self._protocol.resume_writing()

    @property
    def _disconnect_watch_connection(self) -> Any:
        """What ``watch`` looks for in the protocol of a transport."""
        return self._protocol._disconnect_watch_connection
