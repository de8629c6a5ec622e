"""Large bodies: from what was read to their place, copied once.

uvicorn's parser cuts each read into pieces, which uvicorn gathers, hands out as copies and has
its application put together: four copies. A body whose length is known needs no parser, so it
is taken past it, and a new parser begins with what comes behind.

The application asks for it, with the place for its body made; until then uvicorn's limits hold,
and it reads no further. What a client only announces costs no memory: nothing has touched it.
"""

from typing import Any

import httptools
import numpy as np

from disconnect_watch.adapters.uvicorn import HttpTools

__all__ = ["LARGE", "UPLOAD_KEY", "UploadProtocol"]

#: Where in ``scope["state"]`` the application asks for it: called with the size, it returns the
#: place for the body, whole when ``receive`` says so; None where it comes by ``receive`` alone.
UPLOAD_KEY = "disconnect_watch.upload"

#: Bytes from which on it is worth it; uvicorn reads up to 64 KiB ahead.
LARGE = 1 << 18


class UploadProtocol(HttpTools):
    """Takes bodies past the parser.

    Threads: the loop's only.
    """

    __slots__ = ("_place", "_place_at", "_place_of")

    def __init__(self, config: Any, server_state: Any, app_state: dict[str, Any], *loop: Any):
        # The state that each request gets a copy of.
        state = {**app_state, UPLOAD_KEY: self.begin_upload}
        super().__init__(config, server_state, state, *loop)
        #: What is to be filled, and up to where it is; for the cycle of one request.
        self._place: memoryview | None = None
        self._place_at = 0
        self._place_of: Any = None

    def begin_upload(self, size: int) -> memoryview | None:
        """The place for the rest of the running request's body, which is ``size`` bytes."""
        running, cycle = self._running, self.cycle
        # Behind a whole request the parser is in another, whose body it is not.
        if running is None or running.cycle is not cycle or not cycle.more_body:
            return None
        place = np.empty(size, np.uint8).data
        self._place_at = len(cycle.body)
        place[: self._place_at] = cycle.body
        cycle.body = bytearray()
        self._place, self._place_of = place, cycle
        return place

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_upload()
        super().connection_lost(exc)
        self.app_state = {}  # which holds a method of ours

    def data_received(self, data: bytes) -> None:
        place = self._place
        if place is None:
            super().data_received(data)
            return
        at, cycle = self._place_at, self._place_of
        end = min(len(place), at + len(data))
        if not cycle.response_complete:
            place[at:end] = memoryview(data)[: end - at]
        self._place_at = end
        if end < len(place):
            return
        self._end_upload()
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's
        self.on_message_complete()
        if len(data) > end - at:
            super().data_received(data[end - at :])

    def _end_upload(self) -> None:
        self._place = self._place_of = None
