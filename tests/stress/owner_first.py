"""The owner of a socket and the watcher learn of one end at the same time: who loses it?

An owner that reads, or writes, can be told of the end first, and then closes the fd:
the kernel forgets the watcher's registration, and an event with it. Batches of
connections of every kind of user are left at once, by the loop's own thread or by
another; who stays must not be told anything.
"""

import asyncio
import contextlib
import random
import socket
from collections.abc import AsyncIterator, Callable

from disconnect_watch import ClientDisconnected, watch
from tests.stress.tally import Tally
from tests.support.loops import LOOP_FACTORIES
from tests.support.net import PATIENCE, Pair, dial, listener, until

__all__ = ["USERS", "Target", "opened", "race"]

_BATCH = 40
_WAYS = ("fin", "half_close", "rst", "fin_behind_data")
_MAX_WRITES = 100

Target = asyncio.StreamWriter | asyncio.Transport


class PlainProtocol(asyncio.Protocol):
    """Takes what comes, and lets the transport close at the end of stream."""


class BufferedProtocol(asyncio.BufferedProtocol):
    """The same, with a buffer of its own."""

    def __init__(self) -> None:
        self._buffer = bytearray(4096)

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Forget them."""


#: Who owns a connection: streams, or a protocol of one's own and its transport.
USERS: dict[str, Callable[[], asyncio.BaseProtocol] | None] = {
    "stream": None,
    "protocol": PlainProtocol,
    "buffered protocol": BufferedProtocol,
}


@contextlib.asynccontextmanager
async def opened(user: str, server: socket.socket) -> AsyncIterator[Target]:
    """The server's end as that user has it."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(loop=loop)
    make = USERS[user]
    protocol = asyncio.StreamReaderProtocol(reader, loop=loop) if make is None else make()
    server.setblocking(False)
    transport, _ = await loop.connect_accepted_socket(lambda: protocol, server)
    try:
        if make is None:
            yield asyncio.StreamWriter(transport, protocol, reader, loop)
        else:
            yield transport
    finally:
        transport.abort()


def race(loop_kind: str, num_trials: int, seed: int) -> Tally:
    """Try so many connections on a loop of that kind."""
    rng = random.Random(seed)
    tally = Tally()

    async def main() -> None:
        with listener("tcp") as listening:
            while tally.trials < num_trials:
                size = min(_BATCH, num_trials - tally.trials)
                pairs = [_pair(rng, listening) for _ in range(size)]
                try:
                    await _batch(rng, tally, pairs)
                finally:
                    for pair in pairs:
                        pair.close()

    with asyncio.Runner(loop_factory=LOOP_FACTORIES[loop_kind]) as runner:
        runner.run(main())
    return tally


def _pair(rng: random.Random, listening: socket.socket) -> Pair:
    if rng.random() < 0.5:
        return Pair("unix", *socket.socketpair())
    client = dial(listening)
    return Pair("tcp", listening.accept()[0], client)


async def _batch(rng: random.Random, tally: Tally, pairs: list[Pair]) -> None:
    over = asyncio.Event()
    blocks = [_Block(pair, rng, over) for pair in pairs]
    tasks = [asyncio.create_task(block.run()) for block in blocks]
    await until(lambda: all(block.is_watched for block in blocks))
    leaving = [rng.random() < 0.9 for _ in pairs]
    ways = [
        (pair, rng.choice(_WAYS)) for pair, leaves in zip(pairs, leaving, strict=True) if leaves
    ]
    if rng.random() < 0.5:
        _leave(ways)
    else:
        await asyncio.to_thread(_leave, ways)
    told = [task for task, leaves in zip(tasks, leaving, strict=True) if leaves]
    if told:
        await asyncio.wait(told, timeout=PATIENCE)
    over.set()
    for has_left, was_told in zip(leaving, await asyncio.gather(*tasks), strict=True):
        tally.count(has_left=has_left, was_told=was_told)


def _leave(ways: list[tuple[Pair, str]]) -> None:
    for pair, way in ways:
        # A reset over AF_UNIX needs an answer, which only the owner may send.
        pair.leave("fin" if way == "rst" and pair.kind == "unix" else way)


class _Block:
    """One watched block, whose body waits, or writes to the client first."""

    def __init__(self, pair: Pair, rng: random.Random, over: asyncio.Event) -> None:
        self.is_watched = False
        self._pair = pair
        self._over = over
        self._user = rng.choice(tuple(USERS))
        self._pauses = rng.random() < 0.5
        self._writes = rng.random() < 0.3

    async def run(self) -> bool:
        """Return whether the block was told that its client left."""
        async with opened(self._user, self._pair.server) as target:
            try:
                async with watch(target, pause_reading=self._pauses) as w:
                    self.is_watched = True
                    if self._writes:
                        await self._write(target)
                    await self._over.wait()
            except ClientDisconnected:
                return True
            return w.token.cancelled

    async def _write(self, target: Target) -> None:
        transport = target.transport if isinstance(target, asyncio.StreamWriter) else target
        for _ in range(_MAX_WRITES):
            if transport.is_closing():
                return
            target.write(b".")
            await asyncio.sleep(0)
