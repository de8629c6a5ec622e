"""uvicorn's HTTP protocol, with every request watched by the kernel.

Use it in place of uvicorn's own::

    uvicorn app:app --http disconnect_watch.adapters.uvicorn:HttpTools

Each request finds its ``CancelToken`` in ``scope["state"]["disconnect_watch.token"]``,
and an application that only awaits ``receive()`` hears ``http.disconnect`` also
where uvicorn alone would keep it back: it stops reading as soon as a second request
is pipelined, and tells only the newest request of a connection.

One connection, one exchange at a time:

    connection_made      attach
      request begins     arm a new token; gone already: the app is never called
      last of response   disarm, then uvicorn writes it
      response complete  disarmed at the latest; uvicorn starts the next of the pipeline
      app returned       disarm, where it ended without a whole response
    connection_lost      lost, disarm, detach; then uvicorn closes the fd

The peer's leaving has two sources, the watcher and uvicorn's ``connection_lost``;
the connection takes the first and counts the other.

What is used of uvicorn beyond its documented surface (0.54, held by
``tests/integration/test_serve_adapter.py``): the protocol's public attributes ``app``,
``cycle``, ``flow`` and ``pipeline``, that ``receive`` is a method of the request's
cycle, and the cycle's ``disconnected``, ``message_event``, ``response_complete``,
``chunked_encoding`` and ``expected_content_length``.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, ClassVar, cast

from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from disconnect_watch.adapters import LEAVES, TOKEN_KEY
from disconnect_watch.adapters._http_probe import HttpProbe
from disconnect_watch.aio import LoopMailbox, loop_mailbox
from disconnect_watch.aio._connection import reason_of_error
from disconnect_watch.aio._policy import HalfClose, policy
from disconnect_watch.errors import ClientDisconnected, DisconnectWatchError
from disconnect_watch.token import CancelToken, Reason
from disconnect_watch.watcher import (
    MASK_ANY,
    MASK_FIN,
    MASK_GONE,
    Connection,
    Watcher,
    default_watcher,
)

__all__ = ["HalfClose", "HttpTools", "http_tools"]

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

logger = logging.getLogger(__name__)


class Exchange:
    """One request that is being answered: uvicorn's cycle, our token and its watch."""

    __slots__ = ("cycle", "ends_with_connection", "fin_watch_id", "probe", "token", "watch_id")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self.cycle = cycle
        self.token = CancelToken()
        self.watch_id = 0
        self.fin_watch_id = 0
        self.probe = HttpProbe()
        self.ends_with_connection = False

    def unchunk(self, message: Message) -> None:
        """Have a body of unknown length end with the connection, to a client of HTTP/1.0.

        uvicorn would send it in chunks, of which such a client knows nothing; but it takes
        the framing as given where that is set before the head.

        Source: RFC 9112 6.1 and 6.3.
        """
        if self.cycle.scope["http_version"] != "1.0":
            return
        if message["type"] == "http.response.start":
            names = {name.lower() for name, _ in message.get("headers", ())}
            self.ends_with_connection = not names & {b"content-length", b"transfer-encoding"}
            if self.ends_with_connection:
                self.cycle.chunked_encoding = False
        elif self.ends_with_connection:
            self.cycle.expected_content_length = len(message.get("body", b""))


class UnblindingFlow(FlowControl):
    """uvicorn's flow control, which lets FINs in behind what it does not read."""

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


class HttpTools(HttpToolsProtocol):
    """uvicorn's httptools protocol with a watch on the connection's socket.

    Requests that are queued behind a running one on a connection whose peer left
    are never started. Works on asyncio and uvloop, over TCP, TLS and AF_UNIX.

    Attributes:
        half_close: what a FIN means. "disconnect": the client left, as nginx, Triton
            and uvicorn take it. "ignore": it may still read (``nc -N``); its requests
            are answered, and only a reset cancels them. "probe": find out which, by
            keepalive and, to an HTTP/1.1 client, by 100 Continue before the response
            head or a comment line inside an event stream. Neither under TLS, where
            asyncio closes the transport at the FIN.
        vanish_after: seconds, see ``Connection.set_vanish_after``; None for the
            watcher's.
        unblind: bytes; while uvicorn reads no more of a connection, a FIN is seen
            behind so many. None leaves the receive buffer alone.
        watcher: who watches; None for the process-wide one.
    """

    half_close: ClassVar[HalfClose] = "disconnect"
    vanish_after: ClassVar[float | None] = None
    unblind: ClassVar[int | None] = None
    watcher: ClassVar[Watcher | None] = None

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._application = cast("Callable[..., Awaitable[None]]", self.app)
        self.app = cast("Any", self._run_watched)
        self._connection: Connection | None = None
        self._mailbox: LoopMailbox | None = None
        self._exchange: Exchange | None = None
        self._has_eof = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        watcher = self.watcher or default_watcher()
        try:
            self._connection = watcher.attach(
                transport.get_extra_info("socket").fileno(), vanish_after=self.vanish_after
            )
        except (DisconnectWatchError, OSError) as error:
            # The connection is served all the same, with connection_lost as the
            # only source of a disconnect.
            logger.warning("cannot watch the connection of %s: %s", self.client, error)
        else:
            self._mailbox = loop_mailbox(watcher)
            if self.unblind is not None:
                self.flow = UnblindingFlow(transport, self._connection, self.unblind)

    def connection_lost(self, exc: Exception | None) -> None:
        reason = self._reason_of_loss(exc)
        self._detach(reason)
        # Where nothing is attached, and a no-op where the watch told of it.
        self._peer_left(reason)
        super().connection_lost(exc)
        # run_watched holds self: without it the protocol is freed with its last task.
        self.app = cast("Any", self._application)

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Keep the transport open for answers to a half-closed client, if that is the policy."""
        self._has_eof = True
        is_busy = self.cycle is not None and not self.cycle.response_complete
        return self.half_close != "disconnect" and is_busy

    def handle_websocket_upgrade(self) -> None:
        # The transport goes to another protocol, whose connection_lost is not ours.
        self._detach(None)
        super().handle_websocket_upgrade()

    def on_response_complete(self) -> None:
        self._end_exchange()
        super().on_response_complete()
        if self._has_eof and not self.pipeline and self.cycle.response_complete:
            self.transport.close()

    async def _run_watched(self, scope: Message, receive: Receive, send: Send) -> None:
        """The application that uvicorn sees: the real one, while its peer is there."""
        exchange = self._begin_exchange(receive.__self__)  # type: ignore[attr-defined]

        async def send_and_disarm(message: Message) -> None:
            # A client may leave as soon as it has the last byte, and that is no
            # disconnect: so disarm before it is written. A write that has to wait for
            # the client still needs its watch.
            is_last = message["type"] == "http.response.body" and not message.get("more_body")
            if is_last and self._exchange is exchange and not self.flow.write_paused:
                self._end_exchange()
            exchange.unchunk(message)
            await send(message)
            exchange.probe.sent(message)

        try:
            if not exchange.token.cancelled:
                scope.setdefault("state", {})[TOKEN_KEY] = exchange.token
                await self._application(scope, receive, send_and_disarm)
        except ClientDisconnected:
            # The application's way of saying that it stopped, not a failure of it.
            if exchange.token.reason not in LEAVES:
                raise
        finally:
            if self._exchange is exchange:
                self._end_exchange()

    def _begin_exchange(self, cycle: RequestResponseCycle) -> Exchange:
        exchange = self._exchange = Exchange(cycle)
        if self._connection is None or self._mailbox is None:
            return exchange
        exchange.watch_id = self._mailbox.arm(
            self._connection,
            exchange.token,
            self._peer_left_at,
            mask=MASK_ANY if self.half_close == "disconnect" else MASK_GONE,
        )
        if self.half_close == "probe":
            exchange.fin_watch_id = self._mailbox.arm(
                self._connection, None, self._probe_peer, mask=MASK_FIN
            )
        return exchange

    def _end_exchange(self) -> None:
        """Disarm. A watch that fired is answered now, since its delivery is cut off."""
        exchange = self._exchange
        if exchange is None:
            return
        if exchange.watch_id and self._connection is not None and self._mailbox is not None:
            has_fired = self._mailbox.disarm(self._connection, exchange.watch_id)
            exchange.watch_id = 0
            if exchange.fin_watch_id:
                self._mailbox.disarm(self._connection, exchange.fin_watch_id)
            if has_fired and not exchange.cycle.response_complete:
                self._peer_left(self._connection.reason or Reason.OWNER_CLOSED)
        self._exchange = None

    def _peer_left_at(self, reason: Reason, at_ns: int) -> None:
        self._peer_left(reason)

    def _probe_peer(self, reason: Reason, at_ns: int) -> None:
        """A FIN came: a client that closed must answer what is written now by a reset."""
        exchange = self._exchange
        if exchange is None or self._connection is None or self.transport.is_closing():
            return
        self._connection.set_probing(True)
        # What waits to be written is a question already.
        if not self.flow.write_paused and not exchange.cycle.response_complete:
            question = exchange.probe.bytes_now(
                http_version=exchange.cycle.scope["http_version"],
                is_chunked=bool(exchange.cycle.chunked_encoding),
            )
            if question:
                self.transport.write(question)

    def _peer_left(self, reason: Reason) -> None:
        """End the running request: its token, its ``receive()``, its blocked ``send()``.

        The transport closes as it does when uvicorn itself reads the EOF: what is
        written already still goes out to a peer that half-closed.
        """
        exchange = self._exchange
        if exchange is None:
            return
        exchange.token.cancel(reason)
        exchange.cycle.disconnected = True
        exchange.cycle.message_event.set()
        self.flow.resume_writing()
        if reason is Reason.FIN:
            self.transport.close()
        else:
            self.transport.abort()

    def _reason_of_loss(self, exc: Exception | None) -> Reason:
        # A FIN is no end where half-closed clients are served; that the transport
        # closed all the same is one.
        if exc is None and self._has_eof and self.half_close == "disconnect":
            return Reason.FIN
        return reason_of_error(exc)

    def _detach(self, reason: Reason | None) -> None:
        """Give the fd back. ``reason``: the connection's end as its owner knows it, if it ended."""
        connection = self._connection
        if connection is None:
            return
        if reason is not None:
            connection.lost(reason)
        self._end_exchange()
        self._connection = self._mailbox = None
        connection.detach()


def http_tools(
    *,
    half_close: HalfClose = "disconnect",
    vanish_after: float | None = None,
    unblind: int | None = None,
    watcher: Watcher | None = None,
) -> type[HttpTools]:
    """A protocol class for ``uvicorn.Config(http=...)`` with its own policy.

    Args:
        half_close: see ``HttpTools``.
        vanish_after: see ``HttpTools``.
        unblind: see ``HttpTools``.
        watcher: see ``HttpTools``.

    Raises:
        ValueError: no such policy.
    """
    policy(half_close=half_close, vanish_after=vanish_after, unblind=unblind)
    options = {
        "half_close": half_close,
        "vanish_after": vanish_after,
        "unblind": unblind,
        "watcher": watcher,
    }
    return type("HttpTools", (HttpTools,), options)
