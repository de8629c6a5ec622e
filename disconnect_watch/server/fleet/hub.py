"""What frontends ask of all of them together, answered by their supervisor.

A request is known to the frontend that took it, and a client may come to any. So a frontend asks
the others about what it does not know, through here; and what must be one for all, the responses
and how often a caller may cancel, is kept here.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgspec

from disconnect_watch.server.fleet.channel import ChannelError
from disconnect_watch.server.fleet.child import Child
from disconnect_watch.server.fleet.merge import MetricSum
from disconnect_watch.server.frontend import ABORT_BURST, ABORT_RATE
from disconnect_watch.server.openai.responses.store import Entry, ResponseStore, StoreError
from disconnect_watch.server.rate import RateLimit, TooManyError

__all__ = ["Hub"]

#: Seconds that a process has to tell its metrics; then those of the last time are taken.
TELL_WITHIN = 5.0


class Hub:
    """Answers frontends.

    Args:
        children: those that are ready, the engine among them.
        store: of responses; closed by ``close``.
    """

    def __init__(self, children: Callable[[], Sequence[Child]], store: ResponseStore) -> None:
        self._children = children
        self._store = store
        self._limit = RateLimit(ABORT_RATE, burst=ABORT_BURST)
        # By pid, what each said last; and what those had counted that have ended.
        self._texts: dict[int, str] = {}
        self._gone = MetricSum()
        # Who generates the responses that have not ended, by their ids.
        self._makers: dict[str, Child] = {}

    async def answer(self, child: Child, name: str, body: list[Any]) -> Any:
        """Answer one question of a frontend."""
        if name == "metrics":
            return await self._metrics()
        if name == "take":
            return self._take(*body)
        if name == "store":
            return await self._use_store(child, *body)
        # Whatever else is asked is asked of the others.
        return await self._ask_others(child, name, body)

    def forget(self, child: Child) -> None:
        """A process has ended; what it had counted stays counted."""
        text = self._texts.pop(child.pid, None)
        if text is not None:
            self._gone.add(text, only_counted=True)
        for response_id in [key for key, maker in self._makers.items() if maker is child]:
            del self._makers[response_id]

    async def close(self) -> None:
        """Close the store."""
        await self._store.close()

    async def _metrics(self) -> bytes:
        children = self._children()
        await asyncio.gather(*(self._hear_metrics(child) for child in children))
        total = MetricSum()
        for child in children:
            if child.pid in self._texts:
                total.add(self._texts[child.pid])
        total.add(self._gone.render().decode())
        return total.render()

    async def _hear_metrics(self, child: Child) -> None:
        try:
            async with asyncio.timeout(TELL_WITHIN):
                text = await child.channel.ask("metrics")
        except (ChannelError, TimeoutError):
            return
        if not child.has_ended.is_set():
            self._texts[child.pid] = text

    def _take(self, caller: str, num: int, weight: float) -> list[Any] | None:
        try:
            self._limit.take(caller, num, weight=weight)
        except TooManyError as error:
            return [str(error), error.headers["retry-after"]]
        return None

    async def _ask_others(self, child: Child, name: str, body: list[Any]) -> list[Any]:
        """The answers of all other frontends that are there to answer."""

        async def ask(other: Child) -> Any:
            try:
                return await other.channel.ask(name, *body)
            except ChannelError:
                return None

        others = [each for each in self._children() if each.index >= 0 and each is not child]
        answers = await asyncio.gather(*map(ask, others))
        return [answer for answer in answers if answer is not None]

    async def _use_store(self, child: Child, method: str, arguments: list[Any]) -> list[Any]:
        """What a method of the store returns, or which error it raises and why."""
        calls: dict[str, Callable[..., Coroutine[Any, Any, Any]]] = {
            "create": self._create,
            "finish": self._finish,
            "get": self._store.get,
            "delete": self._delete,
            "running": self._store.running,
            "is_abandoned": self._is_abandoned,
            "stats": self._store.stats,
        }
        try:
            result = (
                await calls[method](child, *arguments)
                if method == "create"
                else (await calls[method](*arguments))
            )
        except StoreError as error:
            return [type(error).__name__, str(error)]
        return ["", msgspec.to_builtins(result, builtin_types=(bytes,))]

    async def _create(self, child: Child, entry: dict[str, Any]) -> None:
        await self._store.create(Entry(**entry))
        self._makers[entry["response_id"]] = child

    async def _finish(self, entry: dict[str, Any]) -> bool:
        self._makers.pop(entry["response_id"], None)
        return await self._store.finish(Entry(**entry))

    async def _delete(self, response_id: str) -> bool:
        self._makers.pop(response_id, None)
        return await self._store.delete(response_id)

    async def _is_abandoned(self, response_id: str) -> bool:
        return response_id not in self._makers and await self._store.is_abandoned(response_id)
