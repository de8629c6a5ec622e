# Held to the truth by stubtest and by tests/unit/test_surface.py.
from collections.abc import Awaitable, Callable
from typing import Any, Final

from typing_extensions import disjoint_base

from disconnect_watch.adapters._asgi_call import Scope, Send, WatchedCall
from disconnect_watch.adapters._asgi_uvicorn import ProtocolCall, UvicornCall
from disconnect_watch.adapters._inbox import Inbox, Message, Receive
from disconnect_watch.adapters.uvicorn._grace import GracePeriod
from disconnect_watch.adapters.uvicorn._watched import WatchedProtocol
from disconnect_watch.aio._fast import Block
from disconnect_watch.aio._policy import Policy
from disconnect_watch.token import CancelToken, Reason
from disconnect_watch.watcher import Connection, Mailbox, Watcher

CALL_KEY: Final[str]
counts: Final[Counts]

@disjoint_base
class Counts:
    protocol: int
    transport: int
    addresses: int
    none: int
    left: int
    not_started: int
    def found(self, how: str) -> None: ...

@disjoint_base
class Calls:
    def __new__(
        cls,
        policy: Policy,
        watcher: Watcher | None,
        of_any_server: type[WatchedCall],
        of_uvicorn: type[UvicornCall],
        of_ours: type[ProtocolCall],
    ) -> Calls: ...
    def outermost(self, scope: Scope, receive: Receive, send: Send, /) -> WatchedCall | None: ...
    def make(self, scope: Scope, receive: Receive, send: Send, /) -> WatchedCall: ...

@disjoint_base
class Call(Block):
    token: CancelToken
    inbox: Inbox | None
    is_borrowed: bool
    _cycle: Any
    _scope: Scope
    _receive: Receive
    _send: Send
    _transport: Any
    _head: Message | None
    _num_receiving: int
    _has_heard: bool
    _is_cut: bool
    _is_over: bool
    _began_ns: int
    @property
    def has_left(self) -> bool: ...
    def begin(self) -> bool: ...
    def end(self, error: BaseException | None = None) -> bool: ...
    def send(self, message: Message, /) -> Awaitable[None]: ...

@disjoint_base
class Exchange:
    protocol: WatchedProtocol | None
    cycle: Any
    token: CancelToken
    armed: CancelToken
    grace: GracePeriod | None
    head: Message | None
    is_over: bool
    watch_id: int
    fin_watch_id: int
    on_cancel: Callable[[Reason], object] | None
    def __new__(cls, protocol: WatchedProtocol, cycle: Any) -> Exchange: ...
    def arm(
        self, connection: Connection, mask: int, mailbox: Mailbox | None, cookie: int
    ) -> None: ...
    def disarm(self) -> bool: ...
    def send(self, message: Message, /) -> Awaitable[None]: ...
    def finish(self) -> None: ...
    def cancel(self, reason: Reason) -> None: ...
    def disconnect(self) -> None: ...
    def question(self) -> bytes: ...

async def in_parts(exchange: Exchange, message: Message) -> None: ...
