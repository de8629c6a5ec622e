"""What both of our protocols add to uvicorn's: a watch for each request.

One connection, one exchange at a time:

    connection_made      attach
      request begins     arm a new token; gone already: the app is never called
      last of response   disarm, then uvicorn writes it
      response complete  disarmed at the latest, after a write that had to wait
      app returned       disarm, where it ended without a whole response
    eof_received         lost, disarm: the request hears of it in this turn of the loop
    connection_lost      lost, disarm, detach; then uvicorn closes the fd

The peer's leaving has two sources, the watcher and what uvicorn's transport reads;
the connection takes the first and counts the other. With a grace, the request hears of
it when that is over, if it still runs: see ``_grace``.

What is used of uvicorn beyond its documented surface (0.54, held by
``tests/integration/test_serve_adapter.py``): ``UvicornProtocol`` below, that ``receive``
and ``send`` are methods of the request's cycle, and the cycle's ``disconnected``, ``flow``,
``message_event``, ``on_response`` and ``response_complete``.
"""

import asyncio
import logging
from typing import TYPE_CHECKING, Any, ClassVar

from disconnect_watch.adapters import LEAVES, TOKEN_KEY
from disconnect_watch.adapters._hang_up import hang_up
from disconnect_watch.adapters._own_word import says_client_left
from disconnect_watch.adapters.uvicorn._exchange import (
    Exchange,
    Message,
    ProbedExchange,
    Receive,
    Send,
)
from disconnect_watch.adapters.uvicorn._flow import UnblindingFlow
from disconnect_watch.adapters.uvicorn._grace import GracePeriod
from disconnect_watch.aio import LoopMailbox, loop_mailbox
from disconnect_watch.aio._connection import LoopConnection, reason_of_error
from disconnect_watch.aio._policy import Grace, HalfClose, OnDisconnect
from disconnect_watch.errors import DisconnectWatchError
from disconnect_watch.token import Reason
from disconnect_watch.watcher import (
    MASK_ANY,
    MASK_FIN,
    MASK_GONE,
    Connection,
    Mailbox,
    Watcher,
    default_watcher,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from uvicorn.config import Config
    from uvicorn.protocols.http.flow_control import FlowControl
    from uvicorn.server import ServerState

    class UvicornProtocol(asyncio.Protocol):
        """What uvicorn's two protocols have in common, as far as it is used here."""

        app: Any
        client: tuple[str, int] | None
        cycle: Any
        flow: FlowControl
        scheme: Any
        transport: asyncio.Transport

        def __init__(
            self,
            config: Config,
            server_state: ServerState,
            app_state: dict[str, Any],
            _loop: asyncio.AbstractEventLoop | None = None,
        ) -> None: ...

        def handle_websocket_upgrade(self, *event: Any) -> None: ...

        def on_response_complete(self) -> None: ...

else:
    UvicornProtocol = asyncio.Protocol

__all__ = ["WatchedProtocol"]

logger = logging.getLogger(__name__)


class WatchedProtocol(UvicornProtocol):
    """Stands before one of uvicorn's protocols among the bases; see ``HttpTools``."""

    half_close: ClassVar[HalfClose] = "disconnect"
    vanish_after: ClassVar[float | None] = None
    unblind: ClassVar[int | None] = None
    on_disconnect: ClassVar[OnDisconnect] = "cancel"
    watcher: ClassVar[Watcher | None] = None

    # Not in the instance's dict: with more than 30 attributes it is no longer shared
    # between instances, and each look-up of uvicorn's own gets slower (CPython 3.11-3.13).
    __slots__ = (
        "_application",
        "_connection",
        "_cookie",
        "_core",
        "_exchange",
        "_exchange_of_1_1",
        "_grace",
        "_has_eof",
        "_is_probing",
        "_mailbox",
        "_mask",
        "_shared",
    )

    #: For requests of HTTP/1.0, to which nothing is written that was not asked for.
    _exchange_of_1_0: ClassVar[type[Exchange]] = Exchange

    def __init__(
        self,
        config: "Config",
        server_state: "ServerState",
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._application: Callable[..., Awaitable[None]] = self.app
        self.app = self._run_watched
        self._is_probing = self.half_close == "probe"
        self._mask = MASK_ANY if self.half_close == "disconnect" else MASK_GONE
        self._exchange_of_1_1 = ProbedExchange if self._is_probing else Exchange
        on_disconnect = self.on_disconnect
        self._grace = on_disconnect.seconds if isinstance(on_disconnect, Grace) else 0.0
        self._connection: Connection | None = None
        self._mailbox: LoopMailbox | None = None
        self._core: Mailbox | None = None
        self._cookie = 0
        self._exchange: Exchange | None = None
        self._has_eof = False
        self._shared: LoopConnection | None = None

    @property
    def _disconnect_watch_connection(self) -> LoopConnection | None:
        """What ``watch`` inside an application finds: our attachment, for it to share."""
        if self._shared is None and self._connection is not None and self._mailbox is not None:
            self._shared = LoopConnection(self._mailbox, self._connection.fd, self._connection)
            self._shared.share(self.transport, self)
        return self._shared

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        watcher = self.watcher or default_watcher()
        try:
            mailbox = loop_mailbox(watcher)
            connection = watcher.attach(
                transport.get_extra_info("socket").fileno(), vanish_after=self.vanish_after
            )
        except (DisconnectWatchError, OSError) as error:
            self._warn(error)
            return
        self._connection, self._mailbox, self._core = connection, mailbox, mailbox.core
        self._cookie = mailbox.listen(connection, self._watch_fired)
        if self.unblind is not None:
            self.flow = UnblindingFlow(transport, connection, self.unblind)

    def connection_lost(self, exc: Exception | None) -> None:
        reason = self._reason_of_loss(exc)
        if self._shared is not None:
            self._shared.owner_heard(reason, is_end=True)
        self._owner_heard(reason)
        exchange = self._running
        if exchange is not None:  # in its grace; it may be older than uvicorn's newest
            exchange.disconnect()
        super().connection_lost(exc)
        self._let_go()

    def eof_received(self) -> Any:
        """Keep the transport open for answers to a half-closed client, if that is the policy."""
        self._has_eof = True
        if self.half_close == "disconnect":
            # Not left to connection_lost, which comes a turn of the loop later.
            self._owner_heard(Reason.FIN)
            if not self._grace:
                return False
        # Under TLS asyncio closes the transport whatever it is told, and warns.
        is_open = self.scheme != "https" and self.cycle is not None
        if not is_open or self.cycle.response_complete:
            return False
        self._close_after_newest()
        return True

    def _close_after_newest(self) -> None:
        """Close with the response to the newest request, since no other can come."""
        if self.cycle.response_complete:
            self.transport.close()
        else:
            self.cycle.on_response = self._complete_after_eof

    def _complete_after_eof(self) -> None:
        self.on_response_complete()
        self._close_after_newest()

    def handle_websocket_upgrade(self, *event: Any) -> None:
        # The transport goes to another protocol, whose connection_lost is not ours.
        self._end_running()
        self._let_go()
        super().handle_websocket_upgrade(*event)

    async def send_last(self, exchange: Exchange, message: Message) -> None:
        """Send what ends a response but has to wait for the client, watching it as long."""
        await exchange.cycle.send(message)
        self.end(exchange)

    async def _run_watched(self, scope: Message, receive: Receive, send: Send) -> None:
        """The application that uvicorn sees: the real one, while its peer is there."""
        exchange = self._begin(scope, receive.__self__)  # type: ignore[attr-defined]
        try:
            if not exchange.armed.cancelled:
                scope["state"][TOKEN_KEY] = exchange.token
                if exchange.grace is not None:
                    receive = exchange.grace.receive
                await self._application(scope, receive, exchange.send)
        except Exception as error:
            # The application's way of saying that it stopped is not a failure of it.
            if not says_client_left(error) or exchange.token.reason not in LEAVES:
                raise
        finally:
            if not exchange.is_over:
                self.end(exchange)

    def _begin(self, scope: Message, cycle: Any) -> Exchange:
        kind = self._exchange_of_1_0 if scope["http_version"] == "1.0" else self._exchange_of_1_1
        exchange = self._exchange = kind(self, cycle)
        if self._grace:
            exchange.grace = GracePeriod(self._grace, cycle, self._cut)
            exchange.armed = exchange.grace.left
        connection = self._connection
        if connection is None:
            return exchange
        try:
            exchange.arm(connection, self._mask, self._core, self._cookie)
            if self._is_probing:
                exchange.fin_watch_id = connection.arm(
                    None, mask=MASK_FIN, mailbox=self._core, cookie=self._cookie
                )
        except DisconnectWatchError as error:  # the watcher was closed
            self._detach()
            self._warn(error)
        return exchange

    @property
    def _running(self) -> Exchange | None:
        """The exchange that is being watched."""
        exchange = self._exchange
        return None if exchange is None or exchange.is_over else exchange

    def end(self, exchange: Exchange, *, is_answered: bool = False) -> None:
        """End an exchange. A watch that fired is answered now: its delivery is cut off.

        Args:
            exchange: whichever; one that is over stays so.
            is_answered: the application is about to end it by itself, within its grace if
                it has one.
        """
        if exchange.is_over:
            return
        connection = self._connection
        has_fired = exchange.disarm()
        if exchange.grace is not None:
            exchange.grace.end()
            has_fired &= not is_answered
        if has_fired and not exchange.cycle.response_complete:
            reason = None if connection is None else connection.reason
            self._cut(reason or Reason.OWNER_CLOSED)
        exchange.finish()
        if self._exchange is exchange:
            self._exchange = None

    def _end_running(self) -> None:
        exchange = self._exchange
        if exchange is not None:
            self.end(exchange)

    def _watch_fired(self, reason: Reason, at_ns: int, watch_id: int) -> None:
        exchange = self._running
        if exchange is None:
            return
        if watch_id == exchange.watch_id:
            self._peer_left(reason)
        elif watch_id == exchange.fin_watch_id:
            self._probe_peer(exchange)

    def _peer_left(self, reason: Reason) -> None:
        """End the running request, and the connection; with a grace, later."""
        exchange = self._running
        if exchange is not None and exchange.grace is not None:
            exchange.grace.begin(reason)
        else:
            self._cut(reason)

    def _cut(self, reason: Reason) -> None:
        """End the running request, and the connection.

        The transport closes as it does when uvicorn itself reads the EOF: what is
        written already still goes out to a peer that half-closed.
        """
        if self._shared is not None:
            self._shared.owner_heard(reason)
        exchange = self._running
        if exchange is None:
            return
        exchange.cancel(reason)
        if exchange.grace is not None:
            exchange.grace.end()
        self.flow.resume_writing()
        hang_up(self.transport, reason)

    def _owner_heard(self, reason: Reason) -> None:
        """The transport knows how the connection ended; the watch may have told before."""
        if self._connection is not None:
            try:
                self._connection.lost(reason)
            except DisconnectWatchError:  # the watcher was closed
                self._detach()
            else:
                if not self._grace:
                    self._end_running()
        # Where nothing is attached, or in its grace; else it has ended.
        self._peer_left(reason)

    def _probe_peer(self, exchange: Exchange) -> None:
        """A FIN came: a client that closed must answer what is written now by a reset."""
        if self._connection is None or self.transport.is_closing():
            return
        self._connection.set_probing(True)
        # What waits to be written is a question already.
        if not self.flow.write_paused and not exchange.cycle.response_complete:
            question = exchange.question()
            if question:
                self.transport.write(question)

    def _reason_of_loss(self, exc: Exception | None) -> Reason:
        # A FIN is no end where half-closed clients are served; that the transport
        # closed all the same is one.
        if exc is None and self._has_eof and self.half_close == "disconnect":
            return Reason.FIN
        return reason_of_error(exc)

    def _warn(self, error: Exception) -> None:
        # The connection is served all the same, with what the transport reads as the
        # only source of a disconnect.
        logger.warning("cannot watch the connection of %s: %s", self.client, error)

    def _detach(self) -> None:
        """Give the fd back."""
        connection, mailbox = self._connection, self._mailbox
        self._connection = self._mailbox = self._core = None
        if connection is not None and mailbox is not None:
            mailbox.forget(connection)
            if self._shared is not None:
                self._shared.let_go()
                self._shared = None
            connection.detach()

    def _let_go(self) -> None:
        """Detach, and hold ourselves no longer: no garbage collection is needed then."""
        self._detach()
        self.app = self._application
