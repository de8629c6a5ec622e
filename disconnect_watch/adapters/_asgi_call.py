"""One ASGI request, the task that answers it, and what its client's leaving does to both.

Two sources tell of the leave, the watch on the connection and the server's own
``http.disconnect``; the first counts. The token is set by the watch itself, whatever the
loop is doing. Then, from the loop:

- An application that is waiting in ``receive()`` is told ``http.disconnect`` and ends in
  its own way, as it would without us: Starlette's streams stop, and their background
  tasks run.
- Any other has its task cancelled, once, by the rules of ``asyncio.timeout``: a cancel
  from outside that came at the same time propagates as it is.
- What it sends from then on goes nowhere.

The last message of the response ends all that before it is written. A client may leave
as soon as it has the last byte, and what runs behind the response is no work for it.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from types import TracebackType
from typing import Any

from disconnect_watch.adapters import LEAVES
from disconnect_watch.adapters._asgi_find import connection_of, find
from disconnect_watch.adapters._fast import Call, counts
from disconnect_watch.adapters._inbox import DISCONNECT, Inbox, Message, Receive, is_asked_for
from disconnect_watch.adapters._look import is_mere_look
from disconnect_watch.adapters._own_word import says_client_left
from disconnect_watch.token import CancelToken, Reason
from disconnect_watch.watcher import MASK_ANY

__all__ = ["App", "Scope", "Send", "WatchedCall"]

Scope = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

#: nginx's word for a client that closed before it was answered.
CLIENT_CLOSED_REQUEST = 499

logger = logging.getLogger("disconnect_watch.adapters.asgi")


class WatchedCall(Call):
    """One request that is being answered, as its connection knows it."""

    __slots__ = ()

    def __enter__(self) -> bool:
        return self.begin()

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        return self.end(error)

    def _begin(self) -> None:
        found = find(self._scope, self._receive, self._send)
        self._transport = transport = found.transport
        reason: Reason | None = None
        if self.is_borrowed:
            counts.protocol += 1
            reason = self.token.reason
            self._follow_token()
        elif found.is_lost or (transport is not None and transport.is_closing()):
            counts.found(found.how)
            reason = Reason.OWNER_CLOSED
        else:
            connection = connection_of(found, self._watcher)
            counts.found("none" if connection is None else found.how)
            if connection is not None:
                armed = None if self._policy.grace else self.token
                connection.arm(self, armed, MASK_ANY)
                self._connection = connection
                connection.opt_in(self, self._policy)
                reason = connection.conn.reason
            elif found.socket is not None and not found.socket.is_current():
                reason = Reason.OWNER_CLOSED
        if reason is not None:
            self._has_left_before(reason)
        elif self._is_unheard():
            self._open_inbox().listen()

    def _has_left_before(self, reason: Reason) -> None:
        self.token.cancel(reason)
        self._left = reason, time.monotonic_ns()
        self._is_cut = True
        counts.not_started += 1

    def _is_unheard(self) -> bool:
        """Whether ``http.disconnect`` tells something that the watch does not."""
        is_shared = self._scope["http_version"] not in ("1.0", "1.1")  # by many streams
        is_followed = self._connection is not None and self._connection.is_followed
        return (is_shared or not is_followed) and not is_asked_for(self._scope["headers"])

    def _open_inbox(self) -> Inbox:
        if self.inbox is None:
            self.inbox = Inbox(self._receive)
        self.inbox.on_disconnect = self._disconnected
        return self.inbox

    def _follow_token(self) -> None:
        """Hear of the leave from the token: what it is worth is its maker's to say."""
        self.token.add_callback(self._token_fired, loop=asyncio.get_running_loop())

    def _token_fired(self, token: CancelToken) -> None:
        if token.reason in LEAVES and not self._is_over:
            self.on_leave(token.reason, token.cancelled_at_ns)

    def _disconnected(self) -> None:
        """The server says ``http.disconnect``: of the stream, or of the connection."""
        connection = self._connection
        reason = None if connection is None else connection.conn.reason
        self.on_leave(reason or Reason.OWNER_CLOSED, time.monotonic_ns())

    def on_leave(self, reason: Reason, at_ns: int) -> None:
        """The client left: cut its request off, or begin its grace."""
        if self._soon is not None or self._is_cut or self._is_over:
            return
        if self._policy.grace and not self.is_borrowed:
            loop = asyncio.get_running_loop()
            self._soon = loop.call_later(self._policy.grace, self._cut, reason, at_ns)
        else:
            self._cut(reason, at_ns)

    def _cut(self, reason: Reason, at_ns: int) -> None:
        self._left = reason, at_ns
        self._is_cut = True
        self.token.cancel(reason)
        self._tell_application(reason)
        if self._num_receiving or self._has_heard:
            return
        assert self.task is not None
        loop = self.task.get_loop()
        if asyncio.current_task(loop) is None:
            self._cancel()
        else:
            self._soon = loop.call_soon(self._cancel)

    def _tell_application(self, reason: Reason) -> None:
        """Have ``receive()`` say ``http.disconnect`` from now on."""
        if self.inbox is not None:
            self.inbox.disconnect()

    def _cancel(self) -> None:
        assert self.task is not None
        self.was_cancelled = True
        self.task.cancel()

    async def receive(self) -> Message:
        """The ``receive()`` of the application."""
        self._num_receiving += 1
        try:
            message = await self._next_message()
        except asyncio.CancelledError:
            self._looked()
            raise
        finally:
            self._num_receiving -= 1
        if message["type"] == DISCONNECT:
            if is_mere_look():
                self._looked()
            else:
                self._has_heard = True
        return message

    def _looked(self) -> None:
        """Who was taken for waiting was not: cancel what would have ended by itself."""
        if self._is_cut and not (self._is_over or self._has_heard or self.was_cancelled):
            self._soon = asyncio.get_running_loop().call_soon(self._cancel)

    def _next_message(self) -> Awaitable[Message]:
        inbox = self._open_inbox()
        if self._is_cut:
            inbox.disconnect()
        return inbox.get()

    async def _send_late(self, message: Message) -> None:
        """Send for a client that left, which the loop may not know yet: mostly to nobody.

        Whoever only ever waits for his client to read does not wait any more: without a
        turn of the loop he could not be cancelled, and would keep the loop for good.
        """
        await asyncio.sleep(0)
        if not self._is_cut:
            await self._send(message)

    def _unfollow(self) -> None:
        self.token.remove_callback(self._token_fired)

    def _is_ended_by_us(self, error: BaseException | None) -> bool:
        """The work ended; whether by our cancel, and nobody else's, or in its own way for us."""
        assert self.task is not None
        is_ours_alone = self.was_cancelled and self.task.uncancel() <= self._cancels_before
        if isinstance(error, asyncio.CancelledError):
            return is_ours_alone
        # The application's way of saying that it stopped, not a failure of it.
        return says_client_left(error) and self.token.reason in LEAVES

    async def answer_nobody(self) -> None:
        """Have the server end its side as of any request that was answered.

        Without an answer it would send and log a 500. The client is gone; should it
        read all the same, then this is the truth.
        """
        transport = self._transport
        is_shared = self._scope["http_version"] not in ("1.0", "1.1")
        if transport is not None and not is_shared:
            # What waits to be written may wait for ever. And asyncio's TLS transport forgets
            # its protocol at a second close, after which the server's write fails.
            if transport.is_closing() or transport.get_write_buffer_size():
                transport.abort()
            else:
                transport.close()
        if self._head is None:
            head = {
                "type": "http.response.start",
                "status": CLIENT_CLOSED_REQUEST,
                "headers": [(b"content-length", b"0")],
            }
            with contextlib.suppress(Exception):
                await self._send(head)
                await self._send({"type": "http.response.body", "body": b""})
        elif transport is not None:
            # The server is to know that the connection ended before we return, or
            # gunicorn takes the answer for one that the application forgot to complete.
            await asyncio.sleep(0)

    def log(self) -> None:
        """Tell the log of the client that left."""
        assert self._left is not None
        counts.left += 1
        if not logger.isEnabledFor(logging.INFO):
            return
        client = self._scope.get("client") or ("unix", 0)
        fields = {
            "client": f"{client[0]}:{client[1]}",
            "method": self._scope["method"],
            "path": self._scope["path"],
            "status": CLIENT_CLOSED_REQUEST,
            "reason": self._left[0].value,
            "seconds": round((time.monotonic_ns() - self._began_ns) / 1e9, 6),
        }
        logger.info(
            '%(client)s - "%(method)s %(path)s" %(status)d %(reason)s after %(seconds).3f s',
            fields,
            extra={"request": fields},
        )
