# Held to the truth by stubtest and by tests/unit/test_surface.py.
import asyncio
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Final, Never, Self, final

from typing_extensions import disjoint_base

from disconnect_watch.aio._connection import Handler, LoopConnection
from disconnect_watch.aio._mailbox import LoopMailbox
from disconnect_watch.aio._optins import OptIns
from disconnect_watch.aio._policy import Policy
from disconnect_watch.aio._watch import Target, Watch
from disconnect_watch.token import CancelToken, Reason
from disconnect_watch.watcher import Connection, Watcher

KNOWN: Final[str]

@final
class Ready:
    def __await__(self) -> Self: ...
    def __next__(self) -> Never: ...
    def send(self, value: object) -> Never: ...
    def throw(self, error: BaseException) -> Never: ...
    def close(self) -> None: ...

@disjoint_base
class Block:
    task: asyncio.Task[Any] | None
    was_cancelled: bool
    watch_id: int
    _target: Target
    _policy: Policy
    _pause_reading: bool
    _watcher: Watcher | None
    _token: CancelToken
    _connection: LoopConnection | None
    _is_pausing: bool
    _cancels_before: int
    _soon: asyncio.Handle | None
    _left: tuple[Reason, int] | None
    def __new__(
        cls, target: Target | None, policy: Policy, pause_reading: bool, watcher: Watcher | None
    ) -> Self: ...
    def __aenter__(self) -> Coroutine[Any, Any, Self]: ...
    def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> Coroutine[Any, Any, None]: ...
    def _exit(self) -> None: ...

@disjoint_base
class Attached:
    mailbox: LoopMailbox
    conn: Connection
    transport: asyncio.Transport | None
    protocol: asyncio.BaseProtocol | None
    is_followed: bool
    is_served: bool
    has_peer_left: bool
    handler: Handler | None
    _optins: OptIns | None
    _is_tls: bool
    _is_pipe: bool
    def _join(self, mailbox: LoopMailbox, conn: Connection, is_default: bool) -> None: ...
    def arm(self, block: Block, token: CancelToken | None, mask: int) -> None: ...
    def armed(self, watch_id: int) -> Watch | None: ...
    @property
    def blocks(self) -> tuple[Watch, ...]: ...
    def pause(self) -> None: ...
    def stream_reader(self) -> Any: ...
    def forget_transport(self) -> None: ...

@disjoint_base
class Hold:
    def tell_kernel(self) -> None: ...
