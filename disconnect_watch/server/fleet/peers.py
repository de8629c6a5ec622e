"""A frontend's way to the other frontends and to what all of them share."""

import asyncio
import contextlib
import signal
import socket
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import msgspec

from disconnect_watch.backends.remote_engine.client import RemoteEngine
from disconnect_watch.keys import Caller, Role
from disconnect_watch.server.abort import cancel_known, cancel_live
from disconnect_watch.server.cancel import Cancelled
from disconnect_watch.server.errors import RequestError
from disconnect_watch.server.fleet.channel import Channel, ChannelError
from disconnect_watch.server.openai.responses.store import (
    Entry,
    EntryTooLargeError,
    StoreError,
    StoreFullError,
    StoreStats,
)
from disconnect_watch.server.rate import TooManyError

if TYPE_CHECKING:
    from disconnect_watch.server.frontend import Frontend
    from disconnect_watch.server.metrics import Metrics

__all__ = ["FleetPeers", "SharedStore"]

#: Seconds that a frontend whose supervisor is gone has to end, beside its grace time.
ORPHAN_BOUND = 30.0


class FleetPeers:
    """The others of a fleet; see ``server.peers.Peers``.

    Args:
        engine: gets its links from here.

    Threads: the loop's only.
    """

    def __init__(self, engine: RemoteEngine) -> None:
        self._engine = engine
        self._channel: Channel | None = None
        self._frontend: Frontend | None = None
        self._metrics: Metrics | None = None
        self._linking: set[asyncio.Task[None]] = set()
        self._is_closing = False

    @contextlib.asynccontextmanager
    async def opened(
        self, control: socket.socket, links: socket.socket
    ) -> AsyncIterator["FleetPeers"]:
        """Be one of the fleet, from the first engine on."""
        loop = asyncio.get_running_loop()
        links.setblocking(False)
        loop.add_reader(links, self._take_link, links)
        self._channel = await Channel.open(control, self._answer, self._orphaned)
        try:
            await self._engine.wait_connected()
            yield self
        finally:
            self._is_closing = True
            loop.remove_reader(links)
            self._channel.close()

    def attach(self, frontend: "Frontend", metrics: "Metrics") -> None:
        """Answer the others about this frontend."""
        self._frontend = frontend
        self._metrics = metrics

    def tell_ready(self) -> None:
        """Say that requests are taken."""
        self._ours.tell("ready")

    async def metrics(self) -> bytes:
        """The metrics of all processes together."""
        answer: bytes = await self._ours.ask("metrics")
        return answer

    async def take(self, caller: str, num: int, *, weight: float) -> None:
        """See ``RateLimit.take``."""
        refused = await self._ours.ask("take", caller, num, weight)
        if refused is not None:
            message, seconds = refused
            raise TooManyError(message, retry_after=float(seconds))

    async def cancel(
        self, caller: Caller, names: Sequence[str], *, wait: float
    ) -> dict[str, Cancelled]:
        """Cancel what other frontends know of these; what none knows is not in the answer."""
        role = None if caller.role is None else caller.role.value
        found: dict[str, Cancelled] = {}
        for answer in await self._ours.ask("cancel", caller.name, role, list(names), wait):
            for result in msgspec.convert(answer, list[Cancelled]):
                found.setdefault(result.request_id, result)
        return found

    async def cancel_all(self, *, wait: float) -> list[Cancelled]:
        """Cancel all that runs in the others."""
        answers = await self._ours.ask("cancel_all", wait)
        return [one for answer in answers for one in msgspec.convert(answer, list[Cancelled])]

    async def cancel_response(self, caller: Caller, response_id: str, *, wait: float) -> None:
        """Cancel a response that another generates; it is stored when this returns."""
        role = None if caller.role is None else caller.role.value
        await self._ours.ask("cancel_response", caller.name, role, response_id, wait)

    async def use_store(self, method: str, *arguments: Any) -> Any:
        """Call a method of the one store."""
        error, result = await self._ours.ask("store", method, list(arguments))
        if error:
            raise _STORE_ERRORS[error](result)
        return result

    @property
    def _ours(self) -> Channel:
        assert self._channel is not None
        return self._channel

    async def _answer(self, name: str, body: list[Any]) -> Any:
        if name == "metrics":
            return self._metrics.render().decode() if self._metrics is not None else ""
        if self._frontend is None:
            return []
        if name == "cancel":
            caller, role, names, wait = body
            who = Caller(caller, None if role is None else Role(role))
            results = await cancel_known(self._frontend.ledger, who, names, wait=wait)
            return [asdict(result) for result in results if result.status != "not_found"]
        if name == "cancel_all":
            results = await cancel_live(self._frontend.ledger, wait=body[0])
            return [asdict(result) for result in results]
        assert name == "cancel_response", name
        caller, role, response_id, wait = body
        who = Caller(caller, None if role is None else Role(role))
        if self._frontend.responses.find_live(who, response_id) is not None:
            with contextlib.suppress(RequestError):
                await self._frontend.responses.cancel(who, response_id, wait=wait)
        return []

    def _take_link(self, links: socket.socket) -> None:
        try:
            _, fds, _, _ = socket.recv_fds(links, 8, 1)
        except BlockingIOError:
            return
        if not fds:
            asyncio.get_running_loop().remove_reader(links)
            return
        task = asyncio.get_running_loop().create_task(
            self._engine.connect(socket.socket(fileno=fds[0]))
        )
        self._linking.add(task)
        task.add_done_callback(self._linking.discard)

    def _orphaned(self) -> None:
        """End as by a signal: nobody is left who would start the engine again."""
        if not self._is_closing:
            # Whatever it is busy with: an alarm that nobody handles ends it.
            signal.setitimer(signal.ITIMER_REAL, ORPHAN_BOUND)
            signal.raise_signal(signal.SIGTERM)


#: By their names.
_STORE_ERRORS = {each.__name__: each for each in (StoreError, StoreFullError, EntryTooLargeError)}


class SharedStore:
    """The one store of a fleet, which its supervisor keeps; see ``ResponseStore``."""

    def __init__(self, peers: FleetPeers) -> None:
        self._peers = peers

    async def create(self, entry: Entry) -> None:
        """See ``ResponseStore``."""
        await self._use("create", asdict(entry))

    async def finish(self, entry: Entry) -> bool:
        """See ``ResponseStore``."""
        return bool(await self._use("finish", asdict(entry)))

    async def get(self, response_id: str) -> Entry | None:
        """See ``ResponseStore``."""
        fields = await self._use("get", response_id)
        return None if fields is None else Entry(**fields)

    async def delete(self, response_id: str) -> bool:
        """See ``ResponseStore``."""
        return bool(await self._use("delete", response_id))

    async def running(self) -> list[str]:
        """See ``ResponseStore``."""
        return list(await self._use("running"))

    async def is_abandoned(self, response_id: str) -> bool:
        """See ``ResponseStore``."""
        return bool(await self._use("is_abandoned", response_id))

    async def stats(self) -> StoreStats:
        """See ``ResponseStore``."""
        return StoreStats(**await self._use("stats"))

    async def close(self) -> None:
        """The supervisor closes it."""

    async def _use(self, method: str, *arguments: Any) -> Any:
        try:
            return await self._peers.use_store(method, *arguments)
        except ChannelError as error:
            raise StoreError(f"the store of the responses is gone: {error}") from error
