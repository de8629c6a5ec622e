"""``start_server``: asyncio's, with handlers that are cancelled when their client leaves.

When does a FIN mean that the client left? Not for a handler that reads: it is the
end of what it asks for. So:

- A reset cancels the handler, whatever it does.
- A FIN cancels it if the handler waits for anything else than a read of this
  connection, by the half-close policy.
- Once the handler has read the end of stream, or while it waits to, the FIN is its
  own business and cancels nothing; a later reset still does.

The decision needs a handler that is suspended. News of a FIN may come before its
first step, or together with the data it waits for; so it is looked at from the
loop, behind the steps that are due: once when the FIN is known, and after each
read that then returns without the end.
"""

import asyncio
import os
import weakref
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, cast

from disconnect_watch.aio._connection import LoopConnection
from disconnect_watch.aio._fast import Block
from disconnect_watch.aio._mailbox import loop_mailbox
from disconnect_watch.aio._policy import HalfClose, OnDisconnect, Policy, Probe, policy
from disconnect_watch.errors import ClientDisconnected, DisconnectWatchError
from disconnect_watch.token import Reason
from disconnect_watch.watcher import MASK_FIN, MASK_GONE, Watcher

__all__ = ["start_server", "start_unix_server"]

ClientConnected = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None] | None]

_DEFAULT_LIMIT = 2**16  # bytes; asyncio's own


async def start_server(
    client_connected_cb: ClientConnected,
    host: str | list[str] | tuple[str, ...] | None = None,
    port: int | str | None = None,
    *,
    half_close: HalfClose = "disconnect",
    probe: Probe | None = None,
    vanish_after: float | None = None,
    unblind: int | None = None,
    on_disconnect: OnDisconnect = "cancel",
    watcher: Watcher | None = None,
    limit: int = _DEFAULT_LIMIT,
    **kwargs: Any,
) -> asyncio.Server:
    """Serve streams as ``asyncio.start_server`` does, and cancel who serves nobody.

    A handler's task is cancelled when its client leaves: at a reset always, at a FIN
    if the handler is waiting for something else than a read of this connection. So a
    handler that reads to the end is served as before, and one that computes an
    answer for nobody is stopped. It sees a plain ``CancelledError``; if it ends by
    it, the connection is closed and nothing is logged. Reading is never paused.

    Use ``watch(writer)`` inside a handler for a token; the block then raises
    ``ClientDisconnected`` in place of the cancel.

    Args:
        client_connected_cb: called with a StreamReader and a StreamWriter; a
            coroutine function runs as a task, a plain function is only called.
        host: as for ``asyncio.start_server``.
        port: as for ``asyncio.start_server``.
        half_close: "disconnect" takes a FIN for a leaving as said above; "ignore"
            cancels at a reset only; "probe" does too, and asks for it: see ``watch``.
        probe: see ``watch``.
        vanish_after: see ``watch``.
        unblind: see ``watch``; here for as long as the reader's buffer is full.
        on_disconnect: "cancel", or ``grace(seconds)`` to let a handler go on for a while.
        watcher: None for the process-wide one.
        limit: of the StreamReader's buffer, bytes.
        **kwargs: as for ``loop.create_server``; ``ssl`` included.

    Returns:
        The loop's server object.

    Raises:
        ValueError: an option has a value that is none of these.
        OSError: as from ``loop.create_server``.
    """
    checked = policy(
        half_close=half_close,
        probe=probe,
        vanish_after=vanish_after,
        unblind=unblind,
        on_disconnect=on_disconnect,
    )
    loop, factory = _factory(client_connected_cb, checked, watcher, limit)
    # typeshed knows no service names and no None here, getaddrinfo does.
    return await loop.create_server(factory, host, cast("int", port), **kwargs)


async def start_unix_server(
    client_connected_cb: ClientConnected,
    path: str | os.PathLike[str] | None = None,
    *,
    half_close: HalfClose = "disconnect",
    probe: Probe | None = None,
    vanish_after: float | None = None,
    unblind: int | None = None,
    on_disconnect: OnDisconnect = "cancel",
    watcher: Watcher | None = None,
    limit: int = _DEFAULT_LIMIT,
    **kwargs: Any,
) -> asyncio.Server:
    """``start_server`` on a Unix socket; arguments else as ``loop.create_unix_server``."""
    checked = policy(
        half_close=half_close,
        probe=probe,
        vanish_after=vanish_after,
        unblind=unblind,
        on_disconnect=on_disconnect,
    )
    loop, factory = _factory(client_connected_cb, checked, watcher, limit)
    return await loop.create_unix_server(factory, path, **kwargs)


def _factory(
    client_connected_cb: ClientConnected,
    policy: Policy,
    watcher: Watcher | None,
    limit: int,
) -> tuple[asyncio.AbstractEventLoop, Callable[[], asyncio.Protocol]]:
    loop = asyncio.get_running_loop()

    def factory() -> asyncio.Protocol:
        reader = _Reader(limit=limit, loop=loop)
        return _HandlerProtocol(client_connected_cb, reader, loop, watcher, policy)

    return loop, factory


class _Reader(asyncio.StreamReader):
    """A StreamReader that knows whether it is being read, and whether to the end."""

    num_reading = 0
    was_end_read = False
    after_read: Callable[[], object] | None = None

    async def _read(self, read: Coroutine[Any, Any, bytes]) -> bytes:
        self.num_reading += 1
        try:
            return await read
        except asyncio.IncompleteReadError:
            self.was_end_read = True
            raise
        finally:
            self.num_reading -= 1
            if self.after_read is not None:
                self.after_read()

    async def read(self, n: int = -1) -> bytes:
        data = await self._read(super().read(n))
        if not data and n:
            self.was_end_read = True
        return data

    async def readuntil(self, separator: Any = b"\n") -> bytes:
        return await self._read(super().readuntil(separator))

    async def readexactly(self, n: int) -> bytes:
        return await self._read(super().readexactly(n))

    def at_eof(self) -> bool:
        is_at_end = super().at_eof()
        self.was_end_read |= is_at_end
        return is_at_end


class _HandlerProtocol(asyncio.StreamReaderProtocol):
    """One connection of ``start_server`` and the task that handles it."""

    def __init__(
        self,
        client_connected_cb: ClientConnected,
        reader: _Reader,
        loop: asyncio.AbstractEventLoop,
        watcher: Watcher | None,
        policy: Policy,
    ) -> None:
        # Bound strongly it would make a cycle of every connection.
        start = weakref.WeakMethod(self._start)

        def started(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            method = start()
            assert method is not None
            method(reader, writer)

        super().__init__(reader, started, loop)
        self._serving_loop = loop
        self.connection: LoopConnection | None = None
        self._callback = client_connected_cb
        self._reader = weakref.ref(reader)
        self._watcher = watcher
        self._policy = policy
        self._handling: asyncio.Task[None] | None = None
        self._watch_ids: list[int] = []
        self._left: Reason | None = None
        self._expiry: asyncio.TimerHandle | None = None
        self._is_grace_over = not policy.grace
        self._was_told = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        served = cast("asyncio.Transport", transport)
        try:
            mailbox = loop_mailbox(self._watcher)
            fd = served.get_extra_info("socket").fileno()
            self.connection = LoopConnection(mailbox, fd)
        except (DisconnectWatchError, OSError) as error:
            # Served unwatched, it would be one of those that nobody stops.
            self._report("a connection cannot be watched and is closed", error, served)
            served.abort()
            return
        self.connection.serve(served, self)
        super().connection_made(transport)

    def _start(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = self.connection
        assert connection is not None
        connection.note_closer(writer)
        result = self._callback(reader, writer)
        if not asyncio.iscoroutine(result):
            return
        connection.handler = self
        # Two watches: one that fired for a tolerated FIN is spent for the reset after it.
        masks = [mask for mask in (MASK_GONE, MASK_FIN) if mask & self._policy.mask]
        self._watch_ids = [
            connection.mailbox.arm(connection.conn, None, self.on_leave, mask=mask)
            for mask in masks
        ]
        connection.opt_in(self, self._policy)
        # Last, since an eager task runs to its first wait within this call.
        self._handling = self._serving_loop.create_task(result)
        self._handling.add_done_callback(self._handled)

    def _handled(self, task: asyncio.Task[None]) -> None:
        self._handling = None
        connection = self.connection
        assert connection is not None
        connection.handler = None
        connection.opt_out(self)
        if self._expiry is not None:
            self._expiry.cancel()
        for watch_id in self._watch_ids:
            connection.mailbox.disarm(connection.conn, watch_id)
        transport = connection.transport
        self._forget()
        error = None if task.cancelled() else task.exception()
        if error is None and not task.cancelled():
            return
        if error is not None and not (
            isinstance(error, ClientDisconnected) and connection.has_peer_left
        ):
            self._report("Unhandled exception in client_connected_cb", error, transport)
        if transport is not None:
            transport.close()

    def _forget(self) -> None:
        """Let go of the mailbox when all is over: the handler may keep its writer for ever."""
        if self._handling is None and self.connection and not self.connection.conn.is_attached:
            self.connection = None

    def _report(
        self, message: str, error: BaseException, transport: asyncio.Transport | None
    ) -> None:
        self._serving_loop.call_exception_handler(
            {"message": message, "exception": error, "transport": transport}
        )

    def eof_received(self) -> bool | None:
        if self.connection is not None:
            self.connection.end_of_stream()
        return super().eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.connection is not None:
            # Before the reader is told: a handler that waits to read is cancelled by a
            # reset like any other, whichever source was first.
            self.connection.ended(exc)
            self._forget()
        super().connection_lost(exc)

    def on_leave(self, reason: Reason, at_ns: int) -> None:
        """The connection ended: see what that means for the handler."""
        assert self.connection is not None
        if self._left in (None, Reason.FIN) and self.connection.is_leave(reason):
            self._left = reason
            if reason is Reason.FIN:
                self._look_soon()
                reader = self._reader()
                if reader is not None:
                    reader.after_read = self._look_soon
            else:
                self._look()

    def block_ended(self, block: Block) -> None:
        """A ``watch`` on this connection ended: it has told its task, or we may now."""
        if block.task is self._handling:
            self._was_told |= block.was_cancelled
            if self._left is not None:
                self._look_soon()

    def _look_soon(self) -> None:
        self._serving_loop.call_soon(self._look)

    def _look(self) -> None:
        task, connection = self._handling, self.connection
        if task is None or task.done() or self._was_told or connection is None:
            return
        if connection.is_watched_by(task):
            return  # the block tells it in its own way
        if self._left is Reason.FIN:
            reader = self._reader()
            if reader is not None and (reader.num_reading or reader.was_end_read):
                return
        if not self._is_grace_over:
            if self._expiry is None:
                self._expiry = self._serving_loop.call_later(self._policy.grace, self._expire)
            return
        self._was_told = True
        task.cancel()

    def _expire(self) -> None:
        self._is_grace_over = True
        self._look()
