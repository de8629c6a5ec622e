"""For protocols of one's own: requests that hear when their client leaves.

    class Server(WatchedProtocol, asyncio.Protocol):
        def data_received(self, data: bytes) -> None:
            request = self.begin_request()
            if not request.token.cancelled:
                pool.submit(work, data, request)  # reads request.token

One connection, any number of requests at a time:

    connection_made      attach
    begin_request        arm a new token; it is fired already where the client left
    end_request          disarm; do it before the last of the answer is written
    connection_lost      lost, disarm, detach; then the owner closes the fd

The client's leaving has two sources, the watcher and the transport; whichever comes first
fires the tokens, cancels the tasks and calls ``client_left``, once.

A coroutine needs none of this: ``async with disconnect_watch.watch(transport,
pause_reading=False)`` shares the attachment.
"""

import asyncio
import logging
from typing import Any, ClassVar, Literal, cast

from disconnect_watch.aio import loop_mailbox
from disconnect_watch.aio._connection import LoopConnection, reason_of_error
from disconnect_watch.aio._fast import Block
from disconnect_watch.aio._policy import policy
from disconnect_watch.errors import DisconnectWatchError
from disconnect_watch.token import CancelToken, Reason
from disconnect_watch.watcher import MASK_ANY, MASK_GONE, Watcher

__all__ = ["Request", "WatchedProtocol"]

logger = logging.getLogger(__name__)


class Request:
    """One request that is being worked on; ``WatchedProtocol.begin_request`` makes it.

    Attributes:
        token: fires when the client leaves.
        task: is cancelled then, if there is one.
    """

    __slots__ = ("task", "token", "watch_id")

    def __init__(self, task: "asyncio.Task[Any] | None") -> None:
        self.token = CancelToken()
        self.task = task
        self.watch_id = 0


class WatchedProtocol(asyncio.Protocol):
    """A mixin for an ``asyncio.Protocol``; put it before that, and call ``super()``.

    Works on asyncio and uvloop, over TCP, TLS and AF_UNIX.

    Attributes:
        half_close: what a FIN means. "disconnect": the client left. "ignore": it may still
            read; its requests go on, and the transport stays open for them, as long as
            one is under way. Not under TLS, where asyncio closes at the FIN.
        vanish_after: seconds, see ``Connection.set_vanish_after``; None for the watcher's.
        watcher: who watches; None for the process-wide one.

    Threads: the loop's own only; a token may be read and cancelled by any.
    """

    half_close: ClassVar[Literal["disconnect", "ignore"]] = "disconnect"
    vanish_after: ClassVar[float | None] = None
    watcher: ClassVar[Watcher | None] = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Check the options.

        Raises:
            ValueError: one has a value that is none of those allowed.
        """
        super().__init_subclass__(**kwargs)
        policy(half_close=cls.half_close, vanish_after=cls.vanish_after)

    _connection: LoopConnection | None = None
    _transport: asyncio.Transport | None = None
    _left: Reason | None = None
    _owes_close: bool = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._requests: list[Request] = []
        try:
            sock = transport.get_extra_info("socket")
            connection = LoopConnection(loop_mailbox(self.watcher), sock.fileno())
            connection.conn.set_vanish_after(
                self.vanish_after or connection.mailbox.watcher.vanish_after
            )
        except (DisconnectWatchError, OSError) as error:
            # It is served all the same, with connection_lost as the only source.
            logger.warning("cannot watch %r: %s", transport, error)
        else:
            connection.serve(self._transport, self)
            connection.handler = self
            self._connection = connection
        super().connection_made(transport)

    def eof_received(self) -> bool | None:
        if self._connection is not None:
            self._connection.end_of_stream()
        keeps_open = super().eof_received()
        if not keeps_open and self.half_close == "ignore" and self._requests:
            self._owes_close = True
            return True
        return keeps_open

    def connection_lost(self, exc: Exception | None) -> None:
        if self._connection is not None:
            self._connection.ended(exc)
        self._leave(reason_of_error(exc))
        self.stop_watching()
        super().connection_lost(exc)

    def client_left(self, reason: Reason) -> None:
        """The client left while requests were under way; their tokens have fired.

        Called once. For who has neither threads nor tasks to stop.
        """

    def begin_request(self, task: "asyncio.Task[Any] | None" = None) -> Request:
        """Watch for one request, until ``end_request``.

        Args:
            task: is cancelled when the client leaves; at once if it left before.

        Returns:
            The request. Its token is fired already if there is nobody to work for: what is
            queued behind a request whose client left need never start.
        """
        request = Request(task)
        connection = self._connection
        if self._left is not None or connection is None:
            if self._left is not None:
                self._cancel(request, self._left)
        else:
            mask = MASK_ANY if self.half_close == "disconnect" else MASK_GONE
            request.watch_id = connection.mailbox.arm(
                connection.conn, request.token, self.on_leave, mask=mask
            )
        self._requests.append(request)
        return request

    def end_request(self, request: Request) -> None:
        """End the watch of a request: it is not cancelled after this. Idempotent.

        Before the last of the answer is written: a client may leave as soon as it has that.
        """
        if request not in self._requests:
            return
        self._requests.remove(request)
        self._disarm(request)
        if self._owes_close and not self._requests:
            # Behind the answer, which may be written after this call.
            asyncio.get_running_loop().call_soon(self._close)

    def stop_watching(self) -> None:
        """Give the fd back, before the transport goes to another protocol. Idempotent."""
        for request in self._requests:
            self._disarm(request)
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.handler = None
            connection.detach()

    def on_leave(self, reason: Reason, at_ns: int) -> None:
        """What the watcher and the transport call; see ``client_left``."""
        connection = self._connection
        if connection is not None and connection.is_leave(reason):
            self._leave(reason)

    def block_ended(self, block: Block) -> None:
        """A ``watch`` on this connection ended; its task is its own business."""

    def _leave(self, reason: Reason) -> None:
        if self._left is not None:
            return
        self._left = reason
        requests = tuple(self._requests)
        for request in requests:
            self._cancel(request, reason)
        if requests and reason is not Reason.OWNER_CLOSED:
            self.client_left(reason)

    def _cancel(self, request: Request, reason: Reason) -> None:
        request.token.cancel(reason)
        # Who closed the connection himself knows, and his task goes on.
        if request.task is not None and reason is not Reason.OWNER_CLOSED:
            request.task.cancel()

    def _disarm(self, request: Request) -> None:
        if request.watch_id and self._connection is not None:
            self._connection.mailbox.disarm(self._connection.conn, request.watch_id)
        request.watch_id = 0

    def _close(self) -> None:
        if self._transport is not None:
            self._transport.close()
