"""A uvicorn server that ends at once where nobody is left to wait for. Needs uvicorn."""

import asyncio
import contextlib
import socket

import uvicorn

__all__ = ["PromptServer", "made_prompt"]


class PromptServer(uvicorn.Server):
    """Does without what makes each stop last 0.2 s, which is most of the time of a short test.

    uvicorn (0.54) looks each 0.1 s whether it is to stop, and then waits 0.1 s for its
    connections to close even if there is none.
    """

    is_told: asyncio.Event

    def tell_to_stop(self) -> None:
        """Threads: that of the loop."""
        self.is_told.set()

    async def main_loop(self) -> None:
        looking = asyncio.create_task(super().main_loop())
        stopping = asyncio.create_task(self.is_told.wait())
        await asyncio.wait({looking, stopping}, return_when=asyncio.FIRST_COMPLETED)
        looking.cancel()
        stopping.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await looking

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self.server_state.connections or self.server_state.tasks:
            await super().shutdown(sockets)
            return
        for listening in self.servers:
            listening.close()
            await listening.wait_closed()
        await self.lifespan.shutdown()


def made_prompt(server: uvicorn.Server) -> PromptServer:
    """The same server, which does not serve yet; what its class has of its own it keeps."""
    kind = type(server)
    server.__class__ = (
        PromptServer
        if kind is uvicorn.Server
        # Before uvicorn's own methods, and behind those that the class has in their place.
        else type(kind.__name__, (kind, PromptServer), {})
    )
    assert isinstance(server, PromptServer)
    server.is_told = asyncio.Event()
    return server
