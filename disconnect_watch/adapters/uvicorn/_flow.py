"""uvicorn's flow control, which lets FINs in behind what it does not read."""

import asyncio
import contextlib

from uvicorn.protocols.http.flow_control import FlowControl

from disconnect_watch.errors import DisconnectWatchError
from disconnect_watch.watcher import Connection

__all__ = ["UnblindingFlow"]


class UnblindingFlow(FlowControl):
    """Opens the window for a FIN while reading is paused, and puts it back before it goes on."""

    def __init__(
        self, transport: asyncio.Transport, connection: Connection, num_bytes: int
    ) -> None:
        super().__init__(transport)
        self._connection = connection
        self._num_bytes = num_bytes

    def pause_reading(self) -> None:
        super().pause_reading()
        with contextlib.suppress(DisconnectWatchError, OSError):  # not watched any more
            self._connection.unblind(self._num_bytes)

    def resume_reading(self) -> None:
        with contextlib.suppress(DisconnectWatchError, OSError):
            self._connection.reblind()
        super().resume_reading()
